"""castor estimate --table: its cells are estimates, and the page is what its command makes."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from castor import cli
from castor.config.memory import usable_bytes
from castor.estimate import Workload, estimate, machine
from castor.estimate.estimator import Estimator
from castor.estimate.table import cells, known_models, name_of, page, shown
from estimating import write
from pages import ROOT

PAGE = ROOT / "docs" / "what-fits.md"
BILLIONS = {
    "meta-llama/Llama-3.1-8B": 8.03,
    "Qwen/Qwen3-14B": 14.77,
    "openai/gpt-oss-20b": 20.91,
    "Qwen/Qwen3-32B": 32.76,
    "mistralai/Mixtral-8x7B-v0.1": 46.70,
    "meta-llama/Llama-3.1-70B": 70.554,
}
WIDE: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 2,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2**20,
}


@pytest.fixture(autouse=True)
def _no_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has been asked before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def castor_estimate(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["castor", "estimate", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert isinstance(stop.value.code, int)
    return stop.value.code


@pytest.mark.parametrize("method", ["full", pytest.param("QLoRA", marks=pytest.mark.slow)])
def test_a_cell_is_what_an_estimate_says(method: str, tmp_path: Path) -> None:
    config = write(tmp_path, WIDE)
    workload = Workload(sequence=4096, activations="auto")
    devices, hosts = ("rtx4090", "h100"), (16, 64, 128)
    found = list(
        cells(config, workload, adapter_rank=8, methods=(method,), devices=devices, hosts=hosts)
    )
    assert [(cell.device, cell.host_gib) for cell in found] == [
        (device, host) for device in devices for host in hosts
    ]
    changes: dict[str, Any] = {} if method == "full" else {"lora_rank": 8, "four_bit_base": True}
    asked = Workload(sequence=4096, activations="auto", **changes)
    for cell in found:
        on = machine(cell.device, host_memory=usable_bytes(cell.host_gib * 2**30))
        alone = estimate(config, on, asked)
        assert cell.longest_sequence == alone.max_sequence
        assert cell.tokens_per_s == alone.tokens_per_s
        assert cell.bound == alone.bound
    lacking = [cell.lacks for cell in found]
    assert lacking == (["host", None, None] if method == "full" else [None] * 3) * 2


FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 2**14,
    },
    "llama": {"architectures": ["LlamaForCausalLM"], "intermediate_size": 128},
    "mixtral": {
        "architectures": ["MixtralForCausalLM"], "intermediate_size": 128, "num_local_experts": 4
    },
    "t5": {"architectures": ["T5ForConditionalGeneration"], "d_model": 64, "num_layers": 3},
    "gemma2": {"architectures": ["Gemma2ForCausalLM"], "intermediate_size": 128, "head_dim": 16},
}  # fmt: skip
SIZES = {
    "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2**16,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("activations", ["keep", "auto"])
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_of_other_machines_change_no_answer(
    family: str, activations: Any, tmp_path: Path
) -> None:
    """They give the search a better first guess, whether needs grow on a line or a curve."""
    config = write(tmp_path, {"model_type": family, **SIZES, **FAMILIES[family]})
    workload = Workload(sequence=64, activations=activations)
    estimator = Estimator(config, workload)
    for memory in (48, 100):
        on = machine("rtx4090", device_memory=f"{memory}MiB")
        found = estimator.estimate(on)
        assert found == Estimator(config, workload).estimate(on)
        assert found.max_sequence


def test_memory_that_lacks_room_is_named(tmp_path: Path) -> None:
    huge = WIDE | {"intermediate_size": 2**21}
    (cell,) = cells(
        write(tmp_path, huge), Workload(sequence=64, activations="auto"), adapter_rank=8,
        methods=("LoRA",), devices=("rtx4090",), hosts=(512,),
    )  # fmt: skip
    assert (cell.lacks, cell.longest_sequence, shown(cell)) == ("device", 0, "no: device")


def test_the_models_are_of_their_published_sizes() -> None:
    for config in known_models():
        document = json.loads(config.read_text())
        assert document["_source"].startswith("config.json of the model")
    names = [name_of(config) for config in known_models()]
    assert sorted(names) == sorted(BILLIONS)
    text = PAGE.read_text(encoding="utf-8")
    for name, count in BILLIONS.items():
        assert f"## {name}\n\n{count:.1f}B parameters." in text


def test_the_pages_command_gives_a_row_of_it() -> None:
    """One cell of it: all of them take minutes."""
    text = PAGE.read_text(encoding="utf-8")
    (command,) = re.findall(r"```sh\n(castor estimate .*)\n```", text)
    words = shlex.split(command)
    assert words[:3] == ["castor", "estimate", "--table"]
    assert ROOT / words[words.index("--output") + 1] == PAGE
    workload = Workload(sequence=int(words[words.index("--seq") + 1]), activations="auto")
    (config,) = (path for path in known_models() if path.stem == "llama-3.1-8b")
    (cell,) = cells(
        config, workload, adapter_rank=16, methods=("full",), devices=("rtx4090",), hosts=(256,)
    )
    of_model = text.split(f"## {cell.model}\n")[1]
    (row,) = re.findall(r"^\| full \| 256 GiB \| ([^|]*) \|", of_model, re.M)[:1]
    assert row == shown(cell)
    made = page([cell], workload, 16, None, command)
    assert made.split("\n## ")[0] == text.split("\n## ")[0]


def test_a_table_is_printed_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(write(tmp_path, WIDE | {"hidden_size": 128, "num_attention_heads": 8}))
    asked = ("--table", config, "--seq", "64", "--nvme", "3GB/s", "--json")
    assert castor_estimate(monkeypatch, *asked) == 0
    first = capsys.readouterr().out
    assert len(json.loads(first)) == 3 * 4 * 3
    monkeypatch.setattr(Estimator, "simulate", None)
    assert castor_estimate(monkeypatch, *asked) == 0
    assert capsys.readouterr().out == first


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--table", "--preset", "h100"], "leave --preset out"),
        (["--table", "--nproc", "2"], "leave --nproc out"),
        (["--table", "--activations", "keep"], "leave --activations out"),
        ([], "0 configs are given"),
        (["a.json", "b.json"], "2 configs are given"),
        (["a.json", "--output", "page.md"], "--output is for the page of --table"),
    ],
)
def test_what_a_table_does_not_take_is_said(
    arguments: list[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert castor_estimate(monkeypatch, *arguments) == 2
    assert says in capsys.readouterr().err
