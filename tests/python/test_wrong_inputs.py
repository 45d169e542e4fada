"""Wrong inputs of the command line: one sentence with the remedy, before anything else happens."""

import json
import sys
from pathlib import Path

import pytest
import torch

from castor import cli

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
MACHINE = ("--preset", "rtx4090")
PLAN = {"layout": {"tp_size": 2}, "nodes": 1, "ranks_per_node": 2}

RUN = [
    # sizes
    (["--device-memory", "24"], "device_memory is '24', which has no unit; write '24GiB'"),
    (["--host-memory", "1.5"], "host_memory is '1.5', which has no unit; write '1.5GiB'"),
    (["--device-memory", "much"], "device_memory is 'much'; write a size such as"),
    (["--device-memory", "0GiB"], "device_memory is '0GiB'; it must be more than 0 bytes"),
    (["--set", "device_memory=24"], "device_memory is '24', which has no unit"),
    (["--set", "nvme_memory=2"], "nvme_memory is '2', which has no unit"),
    (["--set", "chunk_bytes=65536"], "or '65536B' if bytes are meant"),
    (["--config", "bytes.json"], "device_memory is 24, which has no unit; write '24GiB'"),
    # names
    (["--set", "devise_memory=2GiB"], "no argument 'devise_memory': did you mean 'device_memory'?"),
    (["--set", "device-memory=2GiB"], "did you mean 'device_memory'?"),
    (["--set", "colour=red"], "GeminiPlugin has no argument 'colour'"),
    (["--devise-memory", "2GiB"], "No such option: --devise-memory (Possible options: --device"),
    (["--config", "depth.json"], "GeminiPlugin has no argument 'depth'"),
    # values
    (["--precision", "bf61"], "precision is 'bf61'; choose one of 'fp32', 'bf16', 'fp16'"),
    (["--activations", "recompte"], "activations has 'recompte'; choose 'auto', 'keep'"),
    (["--device", "gpu"], "device is 'gpu'; choose 'cpu', 'cuda'"),
    (["--device", "mps"], "device='mps' is not supported; castor computes on 'cuda' and 'cpu'"),
    (["--nvme", "nowhere"], "there is no directory nowhere; make it"),
    (["--set", "precision"], "--set precision: give NAME=VALUE"),
    (["--set", "max_prefetch=two"], "max_prefetch is 'two'; give an int"),
    (["--set", "max_prefetch=-1"], "max_prefetch is -1; it must be at least 0"),
    (["--set", "gather_embeddings=yes"], "gather_embeddings is 'yes'; give True or False"),
    (["--set", "pin_memory=1", "--device", "cpu"], "pin_memory is 1; give True or False"),
    (["--set", "placement_policy=gpu"], "placement_policy is 'gpu'; choose one of"),
    (["--set", "trace_file=none.json"], "trace_file: there is no file none.json"),
    (["--set", "tp_size=2"], "tp_size=2 is not supported yet: use HybridParallelPlugin"),
    (["--set", "reduction=fast"], "reduction is 'fast'; choose one of 'ordered', 'backend'"),
    (["--set", "zero_stage=4"], "zero_stage is 4; choose one of 'auto', 1, 2, 3"),
    # what contradicts
    (["--set", "max_norm=1.0"], "leave max_norm out"),
    (["--set", "overlap=backward"], "pass enable_gradient_accumulation=False"),
    (["--set", "nvme_memory=2GiB"], "need nvme_path, a directory on the device"),
    (
        ["--device-memory", "1GiB", "--set", "device_memory=2GiB"],
        "device_memory is given twice, by --device-memory and by --set; give it once",
    ),
    (["--set", "seed=1", "--set", "seed=2"], "seed is given twice, by --set and by --set"),
    (["--plan", "plan.json", "--device-memory", "1GiB"], "give one of them"),
    (["--plan", "plan.json", "--nproc", "3"], "--nproc is 3, and plan.json is for 2; leave it out"),
    (["--plan", "odd.json"], "odd.json: its layout needs a multiple of 2 ranks, and it is for 3"),
    (["--plan", "text.json"], "text.json: tp is 'two'; give a whole number"),
    # files
    (["--config", "missing.json"], "missing.json: No such file or directory; give a file"),
    (["--config", "broken.json"], "broken.json is no JSON"),
    (["--config", "list.json"], "list.json holds a list: give names and values"),
    (["--plan", "missing.json"], "missing.json: No such file or directory; give a file"),
    (["--plan", "bytes.json"], "`castor plan CONFIG --output bytes.json` writes one"),
    (["--report", "report.txt"], "give a file that ends in .json, for the figures, or in .html"),
    (["--report", "none/report.json"], "none; make it"),
    # ranks
    (["--nproc", "0"], "--nproc is 0; give 1 or more"),
    (["--nproc", "two"], "Invalid value for '--nproc': "),
    (["--max-restarts", "-1"], "--max-restarts is -1; give 0 or more"),
    (["--nodes", "2"], "--nodes 2 needs --rendezvous HOST:PORT"),
    (["--rendezvous", "localhost:29500"], "--nodes is 1; give --nodes N as well"),
    (
        ["--nodes", "2", "--rendezvous", "localhost"],
        "--rendezvous localhost has no port; give HOST:PORT, such as localhost:29500",
    ),
    (
        ["--nodes", "2", "--rendezvous", "localhost:99999"],
        "the port is '99999'; give a number from 1 to 65535",
    ),
    (["--nodes", "2", "--rendezvous", ":29500"], "has no host; give HOST:PORT"),
    (
        ["--nodes", "2", "--rendezvous", "no.such.host.invalid:29500"],
        "does not know the host no.such.host.invalid",
    ),
]
TARGETS = [
    (["missing.py"], "there is no file missing.py; give a script, or -m and a module"),
    (["tran.py"], "did you mean 'train.py'?"),
    (["train.sh"], "train.sh is a shell script; castor run trains in the Python process"),
    (["program"], "program is a program of another language"),
    (["notebook.ipynb"], "`jupyter nbconvert --to script` makes a Python file of"),
    (["."], ". is a directory; give the training script in it"),
    (["-m", "no_such_module"], "there is no module no_such_module in this directory"),
    (["-m", "train.py"], "train.py is a file; leave -m out"),
    (["torchrun", "train.py"], "castor run --nproc N starts them too: give castor run"),
    (["-m", "castor", "evaluate", "model"], "sub-commands take such options themselves: put them"),
    ([], "Missing argument 'script'"),
]
ESTIMATE = [
    (["missing.json", *MACHINE], "missing.json: No such file or directory; give a file"),
    (["broken.json", *MACHINE], "broken.json is not JSON"),
    (["bytes.json", *MACHINE], "it has no 'model_type'"),
    (["llama.json"], "h100, h200, cpu"),
    (["llama.json", "--preset", "rtx4099"], "unknown preset 'rtx4099'; choose one of rtx3090"),
    (["llama.json", *MACHINE, "--device-memory", "24"], "device_memory is '24', which has no unit"),
    (["llama.json", *MACHINE, "--h2d", "25"], "h2d is '25'; write a bandwidth such as '25GB/s'"),
    (["llama.json", *MACHINE, "--flops", "fast"], "flops is 'fast'; write FLOP/s such as '70T'"),
    (["llama.json", *MACHINE, "--batch", "0"], "batch is 0; give an int of at least 1"),
    (["llama.json", *MACHINE, "--seq", "999"], "max_position_embeddings is 128; give at most that"),
    (["llama.json", *MACHINE, "--precision", "int8"], "precision is 'int8'; choose one of fp32"),
    (["llama.json", *MACHINE, "--format", "int8"], "state_format is 'int8'; choose one of fp32"),
    (["llama.json", *MACHINE, "--optimizer", "muon"], "optimizer is 'muon'; choose one of adam"),
    (["llama.json", *MACHINE, "--activations", "drop"], "activations is 'drop'; choose one of"),
    (["llama.json", *MACHINE, "--nvme-memory", "2TB"], "nvme_memory needs nvme, the bandwidth"),
    (["llama.json", *MACHINE, "--link", "300GB/s"], "give --nproc or --nodes as well"),
    (["llama.json", *MACHINE, "--nproc", "0"], "Invalid value for '--nproc': "),
    (["gpt-unheard-of", *MACHINE], "gpt-unheard-of"),
]
OTHERS = [
    ("plan", ["llama.json", "--batch", "8"], "Missing option '--cluster'"),
    ("plan", ["llama.json", "--cluster", "missing.yaml", "--batch", "8"], "missing.yaml: No such"),
    ("plan", ["llama.json", "--cluster", "list.json", "--batch", "8"], "list.json"),
    (
        "plan",
        ["llama.json", "--cluster", "bytes.json", "--batch", "x"],
        "Invalid value for '--batch': ",
    ),
    ("scaling", ["llama.json", "--cluster", "missing.yaml", "--batch", "8"], "missing.yaml: No"),
    ("convert", ["missing", "out", "--to", "hf"], "missing"),
    ("convert", ["checkpoint", "out", "--to", "gguf"], "gguf"),
    ("convert", ["checkpoint", "out", "--to", "hf", "--dtype", "int4"], "int4"),
    ("convert", ["checkpoint", "out", "--to", "hf", "--shard-size", "5"], "write '5GiB'"),
    ("convert", ["checkpoint", "out", "--to", "hf", "--tie", "head"], "head"),
    ("convert", ["checkpoint", "out"], "Missing option '--to'"),
    ("io-bench", ["nowhere"], "nowhere"),
    ("io-bench", [".", "--size", "24"], "--size is '24', which has no unit; write '24GiB'"),
    ("io-bench", [".", "--block", "4"], "block is '4', which has no unit"),
    ("io-bench", [".", "--engine", "spdk"], "spdk"),
    ("io-bench", [".", "--seconds", "0"], "seconds"),
    ("io-bench", [".", "--depth", "0"], "depth"),
    ("io-bench", [".", "--model-params", "18e9", "--format", "int3"], "int3"),
    ("doctor", ["--nvme", "nowhere"], "nowhere"),
    ("doctor", ["--nproc", "0"], "Invalid value for '--nproc': "),
    ("estimat", [], "No such command 'estimat'. Did you mean 'estimate'?"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a script that leaves a file, and files that are none of castor's."""
    (tmp_path / "train.py").write_text("open('ran', 'w').close()\n")
    (tmp_path / "train.sh").write_text("touch ran\n")
    (tmp_path / "program").write_text("#!/bin/sh\ntouch ran\n")
    (tmp_path / "notebook.ipynb").write_text("{}")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "bytes.json").write_text('{"device_memory": 24}')
    (tmp_path / "depth.json").write_text('{"device_memory": "1GiB", "depth": 2}')
    (tmp_path / "llama.json").write_text(json.dumps(LLAMA))
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    (tmp_path / "odd.json").write_text(json.dumps(PLAN | {"ranks_per_node": 3}))
    (tmp_path / "text.json").write_text(json.dumps(PLAN | {"layout": {"tp_size": "two"}}))
    (tmp_path / "checkpoint").mkdir()
    torch.save({"head": torch.zeros(2)}, tmp_path / "checkpoint" / "model.pt")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def named(value: list[str] | str) -> str:
    """The words of a case, for its id."""
    return " ".join([value] if isinstance(value, str) else value)[:50]


def refusal(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """What the command line says: one line on stderr, and a status other than 0."""
    monkeypatch.setattr(sys, "argv", ["castor", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    shown = capsys.readouterr()
    assert stop.value.code in (1, 2)
    assert shown.err.startswith("castor: error: ")
    assert shown.err.count("\n") == 1
    assert "Traceback" not in shown.err
    assert shown.out == ""
    return shown.err


@pytest.mark.parametrize(("options", "said"), RUN, ids=named)
def test_run_refuses_an_option(
    options: list[str],
    said: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert said in refusal(["run", *options, "train.py"], monkeypatch, capsys)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(("target", "said"), TARGETS, ids=named)
def test_run_refuses_what_it_cannot_start(
    target: list[str],
    said: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert said in refusal(["run", "--device-memory", "1GiB", *target], monkeypatch, capsys)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(("arguments", "said"), ESTIMATE, ids=named)
@pytest.mark.usefixtures("folder")
def test_estimate_refuses(
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert said in refusal(["estimate", *arguments], monkeypatch, capsys)


@pytest.mark.parametrize(("command", "arguments", "said"), OTHERS, ids=named)
@pytest.mark.usefixtures("folder")
def test_other_commands_refuse(
    command: str,
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert said in refusal([command, *arguments], monkeypatch, capsys)
