"""`castor run` of training scripts that know nothing of castor."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rank_processes import run_python

SCRIPT = """
import atexit
import sys
from pathlib import Path

import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM
from transformers import TrainingArguments, set_seed
from transformers import Trainer


class Weighted(Trainer):
    def compute_loss(self, *values, **named):
        return super().compute_loss(*values, **named) * 1.0


def main():
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    set_seed(args.seed)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2,
    )
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 64, (64, 8), generator=generator)
    data = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = Weighted(model=LlamaForCausalLM(config), args=args, train_dataset=data)
    found = trainer.train()
    trainer.save_model()
    trainer.log_metrics("train", found.metrics)
    trainer.save_metrics("train", found.metrics)
    print("done as", __name__, Path(sys.argv[0]).name, torch.distributed.is_initialized())
    atexit.register(lambda: print("grouped at exit:", torch.distributed.is_initialized()))


if __name__ == "__main__":
    main()
"""

TRAINING = (
    *("--use_cpu", "--max_steps", "6", "--per_device_train_batch_size", "2", "--seed", "5"),
    *("--logging_steps", "1", "--save_strategy", "no", "--report_to", "none"),
    *("--learning_rate", "1e-3", "--max_grad_norm", "0.5", "--disable_tqdm", "true"),
)
SETTINGS = {"device_memory": "400KiB", "host_memory": "64MiB", "chunk_bytes": "16KiB"}


@pytest.fixture(autouse=True)
def _where_the_script_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "castor", "run", *arguments)


def trained(directory: Path, output: str) -> tuple[float, dict[str, torch.Tensor]]:
    metrics = json.loads((directory / output / "train_results.json").read_text())
    return metrics["train_loss"], load_file(directory / output / "model.safetensors")


def assert_close(found: Any, expected: Any) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert found[1].keys() == expected[1].keys()
    for name, value in found[1].items():
        assert (value - expected[1][name]).norm() <= 1e-5 * expected[1][name].norm()


def trains_in_a_budget() -> None:
    options = [f"--set={name}={value}" for name, value in SETTINGS.items() if "device" not in name]
    own = ("train.py", "--output_dir", "own", *TRAINING)
    first = run("--device-memory", SETTINGS["device_memory"], *options, *own)
    assert first.returncode == 0, first.stderr
    assert "done as __main__ train.py False" in first.stdout


def test_a_script_as_it_is_trains_in_a_budget_and_its_settings_are_kept(tmp_path: Path) -> None:
    plain = run_python("train.py", "--output_dir", "plain", *TRAINING)
    assert plain.returncode == 0, plain.stderr
    trains_in_a_budget()
    assert_close(trained(tmp_path, "own"), trained(tmp_path, "plain"))
    kept = json.loads((tmp_path / "own" / "castor.json").read_text())
    assert kept == SETTINGS | {"precision": "fp32", "device": "cpu"}


@pytest.mark.whole
def test_the_kept_settings_train_a_module_to_the_same_bits(tmp_path: Path) -> None:
    trains_in_a_budget()
    again = run("--config", "own/castor.json", "-m", "train", "--output_dir", "again", *TRAINING)
    assert again.returncode == 0, again.stderr
    first_loss, first_weights = trained(tmp_path, "own")
    loss, weights = trained(tmp_path, "again")
    assert loss == first_loss
    assert all(torch.equal(weights[name], value) for name, value in first_weights.items())


@pytest.mark.parametrize("given", [{}, {"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "ACTIVE"}])
def test_idle_openmp_threads_sleep_soon_unless_the_user_says_otherwise(
    given: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    script = f"import os\nprint({{n: os.environ[n] for n in {names} if n in os.environ}})\n"
    (tmp_path / "wait.py").write_text(script)
    found = run("wait.py")
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == str(given or {"GOMP_SPINCOUNT": "1000"})


@pytest.mark.whole
def test_a_script_as_it_is_trains_on_several_ranks(tmp_path: Path) -> None:
    (tmp_path / "castor.yaml").write_text("device_memory: 400KiB\nhost_memory: 64MiB\n")
    own = ("train.py", "--output_dir", "ranks", *TRAINING)
    done = run("--config", "castor.yaml", "--nproc", "2", *own)
    assert done.returncode == 0, done.stderr
    assert "done as __main__ train.py True\ngrouped at exit: False" in done.stdout
    more = ("--gradient_accumulation_steps", "2")
    plain = run_python("train.py", "--output_dir", "plain", *TRAINING, *more)
    assert plain.returncode == 0, plain.stderr
    assert_close(trained(tmp_path, "ranks"), trained(tmp_path, "plain"))


def test_a_script_that_trains_nothing_is_told(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("print('ran')")
    done = run_python("-m", "castor.integrations.script", '{"device_memory": "1MiB"}', "other.py")
    assert done.returncode == 1
    assert done.stdout == "ran\n"
    assert "castor trained nothing: in this script no model was called" in done.stderr


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("castor.json", "{", "castor.json is no JSON"),
        ("castor.json", "[1]", "castor.json holds a list: give names and values"),
        ("castor.yaml", "a: [", "castor.yaml is no YAML"),
        ("castor.json", '{"colour": 1}', "GeminiPlugin has no argument 'colour'"),
    ],
)
def test_settings_that_cannot_be_read_are_named(
    name: str, text: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    done = run("--config", name, "train.py", "--output_dir", "own", *TRAINING)
    assert done.returncode == 1
    assert message in done.stderr


def test_a_setting_without_a_value_is_named() -> None:
    done = run("--set", "precision", "train.py")
    assert done.returncode == 1
    assert "--set precision: give NAME=VALUE" in done.stderr
