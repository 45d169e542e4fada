"""castor estimate as people meet it: real configs, folders, adapters, its status, its answers."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from castor import cli, cli_estimates
from castor.estimate import Estimator, Workload, machine
from castor.estimate_cache import Answer, AnswerCache
from castor.model_files import find_config

CONFIGS = Path(__file__).parent / "configs"
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MACHINE = ("--preset", "rtx4090", "--seq", "64")


@pytest.fixture(autouse=True)
def _no_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has been asked before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return path


def castor_estimate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str]:
    """Status and stdout of the command."""
    monkeypatch.setattr(sys, "argv", ["castor", "estimate", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    shown = capsys.readouterr()
    assert shown.err == ""
    assert isinstance(stop.value.code, int)
    return stop.value.code, shown.out


@pytest.mark.parametrize("name", ["gpt_oss_20b", "qwen3_next_80b", "glm_4_5", "deepseek_v3"])
def test_configs_as_published_are_estimated(name: str, tmp_path: Path) -> None:
    """Of fewer layers: one of each kind of the model's takes part in a step."""
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    config["num_hidden_layers"] = 4
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:4]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    estimator = Estimator(path, Workload(sequence=256))
    on = machine("h200", host_memory="4TiB")
    figures = estimator.simulate(estimator.step(1), on, margin_ratio=0.0, least=True)
    assert 0 < figures["smallest_budget_bytes"] < on.device_bytes
    assert figures["host_bytes"] >= 14 * estimator.num_parameters


def test_what_does_not_fit_has_a_status_and_options_that_fit(
    llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = (str(llama), *MACHINE, "--host-memory", "250KiB", "--format", "fp32")
    status, shown = castor_estimate(monkeypatch, capsys, *small)
    assert status == 1
    offered = re.findall(r"^it fits with (.*?)(?: \(of which.*)?$", shown, re.M)
    assert "--format split_int8" in offered
    for options in offered:
        status, shown = castor_estimate(monkeypatch, capsys, *small, *options.split())
        assert status == 0, shown


def test_an_answer_is_kept(
    llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = (str(llama), *MACHINE, "--json")
    first = castor_estimate(monkeypatch, capsys, *asked)
    assert json.loads(first[1])["fits"]

    def compute(*_: Any, **__: Any) -> bool:
        raise AssertionError

    monkeypatch.setattr(cli_estimates, "_estimate", compute)
    assert castor_estimate(monkeypatch, capsys, *asked) == first
    for other in (["--fresh"], ["--batch", "2"]):
        with pytest.raises(AssertionError):
            castor_estimate(monkeypatch, capsys, *asked, *other)
    llama.write_text(json.dumps(LLAMA | {"hidden_size": 64}))
    with pytest.raises(AssertionError):
        castor_estimate(monkeypatch, capsys, *asked)


def test_a_damaged_answer_is_computed_anew(llama: Path, tmp_path: Path) -> None:
    cache = AnswerCache([llama], {"batch": 1})
    assert cache.find() is None
    cache.keep(Answer(text="fits", status=0))
    assert cache.find() == Answer(text="fits", status=0)
    (file,) = (tmp_path / "cache").rglob("*.json")
    file.write_text("{")
    assert cache.find() is None


@pytest.mark.parametrize("command", ["['castor', '--help']", "['castor', 'estimate', '--help']"])
def test_help_imports_no_torch(command: str) -> None:
    code = (
        f"import sys\nsys.argv = {command}\n"
        "from castor import cli\n"
        "try:\n    cli.main()\n"
        "finally:\n    print('torch' in sys.modules, 'castor._C' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False False"


# --- adapters -----------------------------------------------------------------------------------


def estimated(path: Path, **workload: Any) -> Estimator:
    return Estimator(path, Workload(sequence=64, **workload))


def test_adapters_alone_have_gradients_and_states(llama: Path) -> None:
    rank, wide, deep = 4, 32, 64
    full, adapted, packed = (
        estimated(llama, **workload)
        for workload in (
            {},
            {"lora_rank": rank},
            {"lora_rank": rank, "four_bit_base": True},
        )
    )
    projections = 2 * [(wide, wide)] + 2 * [(wide, wide // 2)] + 3 * [(wide, deep)]
    in_adapters = 2 * rank * sum(a + b for a, b in projections)
    in_linear = 2 * sum(a * b for a, b in projections)
    on = machine("rtx4090")
    found = [one.estimate(on) for one in (full, adapted, packed)]
    assert found[0].trained_parameters == found[0].parameters == full.num_parameters
    for one in found[1:]:
        assert one.fits
        assert one.trained_parameters == in_adapters
        assert one.parameters == found[0].parameters + in_adapters
    expected = 2 * found[0].parameters + 14 * in_adapters
    assert found[1].host_bytes == pytest.approx(expected, rel=0.1)
    saved = found[1].host_bytes - found[2].host_bytes
    assert saved == pytest.approx(in_linear * (2 - 0.53), rel=0.15)
    assert found[2].flops > found[1].flops * 0.9


def test_experts_have_adapters_where_peft_gives_them_some(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    mixtral = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
    path.write_text(json.dumps(LLAMA | experts | mixtral))
    found = estimated(path, lora_rank=4).estimate(machine("rtx4090"))
    assert found.fits
    in_experts = 2 * 4 * 4 * (32 + 2 * 64 + 64 + 32)  # layers, experts, rank, two products
    assert found.trained_parameters >= in_experts


def test_adapters_are_options(
    llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, shown = castor_estimate(monkeypatch, capsys, str(llama), *MACHINE, "--qlora")
    assert status == 0
    assert "adapters of rank 16 train" in shown
    assert "4 bits for the weights under them" in shown


# --- where a config is --------------------------------------------------------------------------


def test_a_folder_and_a_name_of_the_cache_are_found(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_config(llama.parent) == llama
    snapshots = tmp_path / "hub" / "models--some--model" / "snapshots"
    for revision in ("old", "new"):
        (snapshots / revision).mkdir(parents=True)
        (snapshots / revision / "config.json").write_text("{}")
    (snapshots.parent / "refs").mkdir()
    (snapshots.parent / "refs" / "main").write_text("old")
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert find_config("some/model") == snapshots / "old" / "config.json"
    with pytest.raises(ValueError, match=r"has no model of that name; .*: hf download some/other"):
        find_config("some/other")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"has no config\.json"):
        find_config(tmp_path / "empty")
    with pytest.raises(FileNotFoundError):
        find_config("missing.json")
