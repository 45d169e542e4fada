"""TRL's scripts as published, under `castor run` and without it: `make integration`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from byte_tokens import byte_level_bpe

PAGES = Path(__file__).parents[2] / "docs"
BUDGET = ("--device-memory", "96MiB", "--set", "host_memory=512MiB")
"""Of 304 MiB that parameters, gradients and moments take, and activations beside them."""
TRAINING = (
    *("--use_cpu", "--max_steps", "6", "--per_device_train_batch_size", "2", "--seed", "3"),
    *("--gradient_accumulation_steps", "2", "--learning_rate", "1e-3", "--max_length", "128"),
    *("--logging_steps", "1", "--save_strategy", "steps", "--save_steps", "3", "--bf16", "false"),
    *("--gradient_checkpointing", "true", "--report_to", "none", "--disable_tqdm", "true"),
)
ADAPTERS = ("--use_peft", "--lora_target_modules", "q_proj", "v_proj")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights, a tokenizer and data of castor's own pages, as a hub has them."""
    path = tmp_path_factory.mktemp("trl")
    texts = [
        paragraph[:600]
        for page in sorted(PAGES.rglob("*.md"))
        for paragraph in page.read_text(encoding="utf-8").split("\n\n")
        if len(paragraph) > 300
    ][:128]
    pairs = [
        {"prompt": text[:80], "chosen": text[80:300], "rejected": other[80:300]}
        for text, other in zip(texts, reversed(texts), strict=True)
    ]
    for name, rows in (("sft", [{"text": text} for text in texts]), ("dpo", pairs)):
        (path / name).mkdir()
        lines = "\n".join(map(json.dumps, rows))
        (path / name / "train.jsonl").write_text(lines, encoding="utf-8")
    PreTrainedTokenizerFast(
        tokenizer_object=byte_level_bpe(texts, 1024, ["<unk>", "<s>", "</s>", "<pad>"]),
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
    ).save_pretrained(path / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=512, intermediate_size=1024, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=512,
        bos_token_id=1, eos_token_id=2, pad_token_id=3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path / "model")
    return path


def run(
    place: Path,
    launcher: tuple[str, ...],
    script: str,
    output: str,
    *more: str,
    command_line: bool = False,
) -> Path:
    """Runs `python -m LAUNCHER -m trl.scripts.SCRIPT`, and returns where it wrote.

    Args:
        command_line: Whether it is `trl SCRIPT` instead, which launches the script.
    """
    trl = (str(Path(sys.executable).parent / "trl"), script)
    command = [
        *(sys.executable, *launcher, *(trl if command_line else ("-m", f"trl.scripts.{script}"))),
        *("--model_name_or_path", str(place / "model"), "--dataset_name", str(place / script)),
        *("--output_dir", str(place / output), *TRAINING, *more),
    ]
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    done = subprocess.run(
        command, env=environment, cwd=place, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return place / output


def castor(*more: str) -> tuple[str, ...]:
    return ("-m", "castor", "run", *BUDGET, *more)


def logged(output: Path, name: str) -> list[float]:
    state = json.loads((output / "checkpoint-6" / "trainer_state.json").read_text())
    return [float(entry[name]) for entry in state["log_history"] if name in entry]


def assert_close(found: Path, expected: Path, file: str = "model.safetensors") -> None:
    for name in ("loss", "grad_norm"):
        assert len(logged(expected, name)) == 6
        assert logged(found, name) == pytest.approx(logged(expected, name), rel=2e-5)
    mine, theirs = load_file(found / file), load_file(expected / file)
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert (value - theirs[name]).norm() <= 1e-5 * theirs[name].norm()


@pytest.fixture(scope="module")
def fine_tuned(place: Path) -> Path:
    return run(place, castor(), "sft", "fine-tuned")


def test_fine_tuning(place: Path, fine_tuned: Path) -> None:
    assert_close(fine_tuned, run(place, (), "sft", "fine-tuned-plain"))
    model = LlamaForCausalLM.from_pretrained(fine_tuned)
    written = load_file(fine_tuned / "model.safetensors")
    for name, param in model.named_parameters():
        assert torch.equal(param, written[name])


def test_a_run_that_goes_on_from_the_middle_has_the_bits_of_one_that_did_not_stop(
    place: Path, fine_tuned: Path
) -> None:
    middle = ("--resume_from_checkpoint", str(fine_tuned / "checkpoint-3"))
    resumed = run(place, castor(), "sft", "resumed", *middle)
    mine, theirs = (load_file(path / "model.safetensors") for path in (resumed, fine_tuned))
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
    assert logged(resumed, "loss") == logged(fine_tuned, "loss")


def test_trl_s_command_line_trains_in_the_process(place: Path, fine_tuned: Path) -> None:
    again = run(place, castor(), "sft", "command-line", command_line=True)
    assert logged(again, "loss") == logged(fine_tuned, "loss")


def test_the_settings_that_were_kept_train_the_same_again(place: Path, fine_tuned: Path) -> None:
    kept = ("-m", "castor", "run", "--config", str(fine_tuned / "castor.json"))
    again = run(place, kept, "sft", "again")
    assert logged(again, "loss") == logged(fine_tuned, "loss")


def test_adapters(place: Path) -> None:
    found = run(place, castor(), "sft", "adapters", *ADAPTERS)
    plain = run(place, (), "sft", "adapters-plain", *ADAPTERS)
    assert_close(found, plain, "adapter_model.safetensors")


def test_two_ranks_train_as_ddp_does(place: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    once = ("--gradient_accumulation_steps", "1")
    plain = run(place, torchrun, "sft", "ranks-plain", *once)
    assert_close(run(place, castor("--nproc", "2"), "sft", "ranks", *once), plain)


def test_preferences(place: Path) -> None:
    more = castor("--set", "device_memory=160MiB")
    assert_close(run(place, more, "dpo", "preferred"), run(place, (), "dpo", "preferred-plain"))
