"""Scripts of transformers, accelerate and PEFT as they publish them, with castor and without.

`make integration CASTOR_PUBLISHED=DIRECTORY` runs them. The packages do not carry them: in
DIRECTORY are clones of their repositories, of the releases that are installed,

    git clone --depth 1 --branch v5.24.0 https://github.com/huggingface/transformers
    git clone --depth 1 --branch v1.15.0 https://github.com/huggingface/accelerate
    git clone --depth 1 --branch v0.21.2 https://github.com/huggingface/peft

No line of a script is changed, and nothing is downloaded: what scripts ask the hub for by name (a
dataset, a model) is in the directory in which they run, or, as metrics and timm's weights, in a
cache like the hub's. `recorded.py` starts them, and writes down losses and weights.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import pytest
import timm
import torch
import transformers as hf
from close import assert_weights_close
from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import processors

from byte_tokens import byte_level_bpe

PUBLISHED = os.environ.get("CASTOR_PUBLISHED", "")
PAGES = Path(__file__).parents[2] / "docs"
RECORDED = Path(__file__).parent / "recorded.py"
CASTOR = ("-m", "castor", "run", "--set", "device=cpu", "--set", "host_memory=1GiB")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")

pytestmark = [
    pytest.mark.skipif(
        not PUBLISHED,
        reason="CASTOR_PUBLISHED is not set: clone transformers, accelerate and peft into a "
        "directory, and give its path (see the first lines of test_published.py)",
    ),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

METRIC = """
import datasets
import evaluate


class Accuracy(evaluate.Metric):
    def _info(self):
        features = {name: datasets.Value("int64") for name in ("predictions", "references")}
        return evaluate.MetricInfo(
            description="", citation="", inputs_description="",
            features=datasets.Features(features),
        )

    def _compute(self, predictions, references):
        right = sum(int(p) == int(r) for p, r in zip(predictions, references, strict=True))
        return {"accuracy": right / len(references)}
"""
"""Stands for accuracy and GLUE's, which evaluate downloads."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """One of them, with arguments for a run of seconds."""

    file: str
    arguments: tuple[str, ...]
    budget: int
    """Device memory, in MiB."""
    read: Callable[[Path], torch.nn.Module] | None = None
    """What reads the model that it writes; None: it writes none."""
    written: str = "model.safetensors"
    resumes: tuple[str, str] = ("", "")
    """The checkpoint in its middle, and the argument that goes on from it."""
    settings: tuple[str, ...] = ()
    output: bool = field(default=True)
    """Whether it takes --output_dir."""


TRAINER = (
    *("--use_cpu", "--do_train", "--do_eval", "--max_steps", "6", "--learning_rate", "1e-3"),
    *("--per_device_train_batch_size", "2", "--per_device_eval_batch_size", "4", "--seed", "3"),
    *("--gradient_accumulation_steps", "2", "--logging_steps", "1", "--save_steps", "3"),
    *("--report_to", "none", "--disable_tqdm", "true"),
)
TEXTS = ("--train_file", "train.txt", "--validation_file", "validation.txt", "--block_size", "64")
FROM_CONFIG = ("--config_name", "gpt2", "--tokenizer_name", "gpt2")
LM = "transformers/examples/pytorch/language-modeling"
SCRIPTS = {
    "run_clm": Script(
        file=f"{LM}/run_clm.py",
        arguments=(*TRAINER, *TEXTS, *FROM_CONFIG),
        budget=48,
        read=hf.GPT2LMHeadModel.from_pretrained,
        resumes=("checkpoint-3", "--resume_from_checkpoint"),
    ),
    "run_clm_no_trainer": Script(
        file=f"{LM}/run_clm_no_trainer.py",
        arguments=(
            *(*TEXTS, *FROM_CONFIG, "--per_device_train_batch_size", "2", "--seed", "3"),
            *("--per_device_eval_batch_size", "4", "--gradient_accumulation_steps", "2"),
            *("--num_train_epochs", "2", "--learning_rate", "1e-3", "--weight_decay", "0.1"),
            *("--checkpointing_steps", "epoch"),
        ),
        budget=48,
        read=hf.GPT2LMHeadModel.from_pretrained,
        resumes=("epoch_0", "--resume_from_checkpoint"),
    ),
    "run_glue": Script(
        file="transformers/examples/pytorch/text-classification/run_glue.py",
        arguments=(
            *(*TRAINER, "--model_name_or_path", "bert-base-cased", "--task_name", "mrpc"),
            *("--max_seq_length", "64"),
        ),
        budget=48,
        read=hf.BertForSequenceClassification.from_pretrained,
        resumes=("checkpoint-3", "--resume_from_checkpoint"),
    ),
    "nlp_example": Script(
        file="accelerate/examples/nlp_example.py", arguments=("--cpu",), budget=60, output=False
    ),
    "complete_nlp_example": Script(
        file="accelerate/examples/complete_nlp_example.py",
        arguments=("--cpu", "--checkpointing_steps", "epoch"),
        budget=60,
        resumes=("epoch_0", "--resume_from_checkpoint"),
    ),
    "by_feature/gradient_accumulation": Script(
        file="accelerate/examples/by_feature/gradient_accumulation.py",
        arguments=("--cpu", "--gradient_accumulation_steps", "2"),
        budget=60,
        output=False,
    ),
    "by_feature/gradient_accumulation_for_autoregressive_models": Script(
        file="accelerate/examples/by_feature/gradient_accumulation_for_autoregressive_models.py",
        arguments=("--cpu", "--gradient_accumulation_steps", "2"),
        budget=60,
        output=False,
    ),
    "by_feature/memory": Script(
        file="accelerate/examples/by_feature/memory.py",
        arguments=("--cpu",),
        budget=60,
        output=False,
    ),
    "cv_example": Script(
        file="accelerate/examples/cv_example.py",
        arguments=("--cpu", "--data_dir", "pets"),
        budget=64,
        output=False,
    ),
    "peft_no_lora_accelerate": Script(
        file="peft/examples/sequence_classification/peft_no_lora_accelerate.py",
        arguments=(
            *("--model_name_or_path", "bert-base-cased", "--num_virtual_tokens", "4"),
            *("--per_device_train_batch_size", "2", "--num_train_epochs", "1", "--seed", "3"),
        ),
        budget=12,
        read=AutoPeftModelForSequenceClassification.from_pretrained,
        written="adapter_model.safetensors",
    ),
    "olora_finetuning": Script(
        file="peft/examples/olora_finetuning/olora_finetuning.py",
        arguments=(
            *("--base_model", "llama", "--data_path", "alpaca", "--device_map", "cpu"),
            *("--dtype", "float32", "--batch_size", "2", "--cutoff_len", "32", "--seed", "3"),
            *("--val_set_size", "4", "--eval_step", "3", "--save_step", "3", "--lora_r", "8"),
        ),
        budget=16,
        read=AutoPeftModelForCausalLM.from_pretrained,
        written="adapter_model.safetensors",
    ),
    "sft/train": Script(
        file="peft/examples/sft/train.py",
        arguments=(
            *TRAINER[1:],
            *("--use_cpu", "--bf16", "false", "--model_name_or_path", "llama"),
            *("--dataset_name", "sentences", "--max_length", "64", "--use_peft_lora", "true"),
            *("--lora_r", "8", "--gradient_checkpointing", "true"),
        ),
        budget=24,
        read=AutoPeftModelForCausalLM.from_pretrained,
        written="adapter_model.safetensors",
        resumes=("checkpoint-3", "--resume_from_checkpoint"),
    ),
}


def write_tokenizer(path: Path, texts: list[str], *, pairs: bool) -> None:
    own = byte_level_bpe(texts, 1024, ["[PAD]", "[UNK]", "[CLS]", "[SEP]"], unknown="[UNK]")
    if pairs:
        own.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
        )
    names = ["input_ids", "token_type_ids", "attention_mask"] if pairs else None
    hf.PreTrainedTokenizerFast(
        tokenizer_object=own, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]",
        sep_token="[SEP]", eos_token="[SEP]", model_max_length=128,
        **({"model_input_names": names} if names else {}),
    ).save_pretrained(path)  # fmt: skip


def write_split(folder: Path, config: str, split: str, table: datasets.Dataset) -> None:
    """A part of a dataset as the hub has it."""
    table.to_parquet(folder / config / f"{split}-00000-of-00001.parquet")
    head = folder / "README.md"
    known = (
        head.read_text().removesuffix("---\n")
        if head.exists()
        else (f"---\nconfigs:\n  - config_name: {config}\n    data_files:\n")
    )
    line = f"      - split: {split}\n        path: {config}/{split}-*\n"
    head.write_text(f"{known}{line}---\n")


def write_pairs(path: Path, texts: list[str]) -> None:
    """GLUE's MRPC, of other sentences."""
    label = datasets.ClassLabel(names=["not_equivalent", "equivalent"])
    for split, count in (("train", 32), ("validation", 12), ("test", 8)):
        rows: dict[str, list[Any]] = {
            "sentence1": [text[:20] for text in texts[:count]],
            "sentence2": [text[20:40] for text in texts[:count]],
            "label": [i % 3 % 2 for i in range(count)],
            "idx": list(range(count)),
        }
        table = datasets.Dataset.from_dict(rows).cast_column("label", label)
        for folder in ("nyu-mll/glue", "glue"):
            write_split(path / folder, "mrpc", split, table)


def write_metrics(path: Path) -> None:
    for name in ("accuracy", "glue"):
        folder = path / "modules/evaluate_modules/metrics" / f"evaluate-metric--{name}" / ("0" * 64)
        folder.mkdir(parents=True)
        for above in (folder, *folder.parents[:3]):
            (above / "__init__.py").touch()
        (folder / f"{name}.py").write_text(METRIC)


def write_images(path: Path) -> None:
    """Six pets, and timm's weights in the hub's cache."""
    (path / "pets").mkdir()
    for i in range(6):
        noise = torch.randint(0, 256, (64, 64, 3), dtype=torch.uint8)
        Image.fromarray(noise.numpy()).save(path / "pets" / f"kind{i % 2}_{i}.jpg")
    cache = path / "hf/hub/models--timm--resnet50d.ra2_in1k"
    commit = "0" * 40
    for folder in ("refs", f"snapshots/{commit}"):
        (cache / folder).mkdir(parents=True)
    (cache / "refs/main").write_text(commit)
    weights = timm.create_model("resnet50d", pretrained=False).state_dict()
    save_file(weights, cache / f"snapshots/{commit}/model.safetensors")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of random weights, tokenizers and data of castor's own pages: the scripts run here."""
    path = tmp_path_factory.mktemp("published")
    texts = [
        " ".join(paragraph.split())
        for page in sorted(PAGES.rglob("*.md"))
        for paragraph in page.read_text(encoding="utf-8").split("\n\n")
        if len(paragraph) > 300
    ][:128]
    (path / "train.txt").write_text("\n".join(text[:300] for text in texts[:48]))
    (path / "validation.txt").write_text("\n".join(text[:300] for text in texts[-8:]))
    for split in ("train", "test"):
        rows = "\n".join(json.dumps({"text": text[:200]}) for text in texts[:64])
        (path / "sentences").mkdir(exist_ok=True)
        (path / "sentences" / f"{split}.jsonl").write_text(rows)
    for split, count in (("train", 24), ("validation", 12)):
        lines = [text[:100] for text in texts[:count]] + [""] * 500  # which the script leaves out
        table = datasets.Dataset.from_dict({"text": lines})
        write_split(path / "Salesforce/wikitext", "wikitext-2-v1", split, table)
    (path / "alpaca").mkdir()
    pairs = [{"instruction": text[:40], "output": text[40:90]} for text in texts[:20]]
    (path / "alpaca/train.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    write_pairs(path, texts)
    write_metrics(path / "hf")
    write_images(path)

    torch.manual_seed(0)
    size = {"vocab_size": 1024, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    gpt = hf.GPT2Config(n_positions=128, n_embd=256, n_layer=6, n_head=8, **size)
    gpt.save_pretrained(path / "gpt2")
    bert = hf.BertConfig(
        hidden_size=256, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=8,
        max_position_embeddings=128, **size,
    )  # fmt: skip
    hf.BertForSequenceClassification(bert).save_pretrained(path / "bert-base-cased")
    llama = hf.LlamaConfig(
        hidden_size=256, intermediate_size=768, num_hidden_layers=12, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=256, **size,
    )  # fmt: skip
    hf.LlamaForCausalLM(llama).save_pretrained(path / "llama")
    shutil.copytree(path / "llama", path / "HuggingFaceTB/SmolLM-360M")
    for name in ("gpt2", "bert-base-cased", "llama", "HuggingFaceTB/SmolLM-360M"):
        write_tokenizer(path / name, texts, pairs=name == "bert-base-cased")
    return path


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a script computed."""

    output: Path
    losses: list[float]
    held: dict[str, torch.Tensor]
    """The state dict of its model at its end."""
    state_bytes: int
    """Of parameters, and of gradients and moments of those that are trained."""
    peaks: tuple[int, int] | None
    """Of device memory under castor: all, and beside the model."""


def start(place: Path, command: list[str]) -> None:
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_EVALUATE_OFFLINE": "1",
        "HF_HOME": str(place / "hf"), "TOKENIZERS_PARALLELISM": "false",
        "ACCELERATE_USE_CPU": "1",  # else an Accelerator without cpu=True forms no group of CPUs
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, *command],
        env=environment, cwd=place, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr[-6000:]}"


def run(place: Path, name: str, launcher: tuple[str, ...], output: str, *more: str) -> Run:
    script, path = SCRIPTS[name], place / "runs" / name / output
    assert not path.exists()
    path.mkdir(parents=True)
    where = ("--output_dir", str(path / "out")) if script.output else ()
    file = str(Path(PUBLISHED).absolute() / script.file)
    start(place, [*launcher, str(RECORDED), str(path), file, *script.arguments, *where, *more])
    [held] = torch.load(path / "held-0.pt")
    recorded = json.loads((path / "recorded-0.json").read_text())
    return Run(
        output=path / "out",
        losses=recorded["losses"],
        held=held,
        state_bytes=recorded["state_bytes"],
        peaks=recorded["peaks"],
    )


def castor(name: str, *more: str) -> tuple[str, ...]:
    script = SCRIPTS[name]
    return (*CASTOR, "--device-memory", f"{script.budget}MiB", *script.settings, *more)


def assert_close(found: Run, expected: Run) -> None:
    assert len(found.losses) == len(expected.losses) > 2
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert_weights_close(found.held, expected.held)


ours: dict[str, Run] = {}


def trained(place: Path, name: str) -> Run:
    """Under castor, once for all tests."""
    if name not in ours:
        ours[name] = run(place, name, castor(name), "castor")
    return ours[name]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_computes_what_it_does_without_castor(
    place: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, expected = trained(place, name), run(place, name, (), "plain")
    assert_close(found, expected)
    assert found.peaks
    peak, beside = found.peaks
    assert peak <= SCRIPTS[name].budget << 20
    assert 2 * SCRIPTS[name].budget << 20 <= expected.state_bytes + beside
    script = SCRIPTS[name]
    monkeypatch.chdir(place)  # adapters name their base from there
    if script.read:
        assert_readable(script, found)
        plain = load_file(expected.output / script.written)
        written = load_file(found.output / script.written)
        assert written.keys() == plain.keys()


def assert_readable(script: Script, run: Run) -> None:
    """What it wrote is what it held, bit for bit, and is read as such."""
    written = load_file(run.output / script.written)
    prompts = written.pop("prompt_embeddings", None)  # PEFT computes them when it saves
    for name, value in written.items():
        assert torch.equal(value, of(name, run.held)), name
    assert script.read
    params = dict(script.read(run.output).named_parameters())
    if prompts is not None:
        assert torch.equal(params.pop("prompt_encoder.default.embedding.weight"), prompts)
        params = {name: one for name, one in params.items() if "prompt_encoder" not in name}
    assert len(params) > 50
    for name, param in params.items():
        assert torch.equal(param, of(name, run.held)), name


def of(name: str, held: dict[str, torch.Tensor]) -> torch.Tensor:
    """A tensor of a file, in which PEFT leaves its adapter's name out."""
    short = {one.replace(".default", "").replace(".modules_to_save", ""): one for one in held}
    return held[name if name in held else short[name]]


@pytest.mark.parametrize("name", [name for name, one in SCRIPTS.items() if one.resumes[0]])
def test_a_run_that_goes_on_from_its_middle_has_the_bits_of_one_that_did_not_stop(
    place: Path, name: str
) -> None:
    whole, (middle, argument) = trained(place, name), SCRIPTS[name].resumes
    rest = run(place, name, castor(name), "resumed", argument, str(whole.output / middle))
    assert 0 < len(rest.losses) < len(whole.losses)
    assert rest.losses == whole.losses[-len(rest.losses) :]
    assert all(torch.equal(value, whole.held[name]) for name, value in rest.held.items())


@pytest.mark.parametrize("name", ["run_clm", "run_clm_no_trainer", "run_glue"])
def test_two_ranks_train_as_ddp_does(place: Path, name: str) -> None:
    found = run(place, name, castor(name, "--nproc", "2"), "ranks")
    assert_close(found, run(place, name, TORCHRUN, "ranks-plain"))


def test_settings_that_a_run_kept_train_the_same_again(place: Path) -> None:
    """And without `recorded.py`: the command that a user types."""
    found, script = trained(place, "run_clm"), SCRIPTS["run_clm"]
    kept = ("-m", "castor", "run", "--config", str(found.output / "castor.json"))
    again = place / "again"
    file = str(Path(PUBLISHED).absolute() / script.file)
    start(place, [*kept, file, *script.arguments, "--output_dir", str(again)])
    mine, first = (load_file(path / script.written) for path in (again, found.output))
    assert all(torch.equal(value, first[name]) for name, value in mine.items())


def test_a_script_that_looks_for_a_batch_size_finds_one_that_the_budget_has_room_for(
    place: Path,
) -> None:
    budget = (*CASTOR, "--device-memory", "48MiB")
    found = run(place, "by_feature/memory", budget, "small")
    assert len(found.losses) > 3 * 2  # of batches of 16 in three epochs
    assert found.peaks
    assert found.peaks[0] <= 48 << 20
