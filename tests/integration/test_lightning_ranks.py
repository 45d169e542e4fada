"""Lightning's Trainer and Fabric on two ranks, on castor and without it: `make integration`."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from close import assert_weights_close

pytest.importorskip("lightning")

HERE = Path(__file__).parent
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
BUDGET = ("--set", "device=cpu", "--device-memory", "160KiB", "--set", "host_memory=64MiB")
CASTOR_RUN = ("-m", "castor", "run", *BUDGET)


def run(directory: Path, launcher: tuple[str, ...], script: str, *arguments: str) -> str:
    directory.mkdir()
    command = (*launcher, str(HERE / script), str(directory), *arguments)
    done = subprocess.run(
        [sys.executable, *command], cwd=directory, capture_output=True, text=True, timeout=600
    )
    return done.stdout if done.returncode == 0 else pytest.fail(done.stderr[-6000:])


def trained(directory: Path, rank: int) -> tuple[dict[str, Any], list[dict[str, torch.Tensor]]]:
    found = json.loads((directory / f"found{rank}.json").read_text())
    return found, torch.load(directory / f"states{rank}.pt")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ranks") / "plain"
    run(directory, TORCHRUN, "lightning_ranks.py")
    return directory


@pytest.mark.parametrize("how", ["castor run", "strategy"])
def test_a_trainer_computes_what_ddp_does_and_goes_on(
    how: str, plain: Path, tmp_path: Path
) -> None:
    own = how == "strategy"
    launcher = TORCHRUN if own else (*CASTOR_RUN, "--nproc", "2")
    run(tmp_path / "own", launcher, "lightning_ranks.py", *(["own"] if own else []))
    for rank in range(2):
        (found, states), (expected, theirs) = (
            trained(path, rank) for path in (tmp_path / "own", plain)
        )
        assert (expected["strategy"], found["strategy"]) == ("DDPStrategy", "_RanksStrategy")
        assert found["samplers"] == expected["samplers"] == "DistributedSampler"
        assert found["world"] == 2
        for name in ("losses", "resumed"):
            assert found[name] == pytest.approx(expected[name], rel=1e-5)
        assert found["seen"] == pytest.approx(expected["seen"], rel=1e-5)
        assert found["tested"][0] == pytest.approx(expected["tested"][0], rel=1e-5)
        assert_weights_close(states[0], theirs[0])
        assert found["resumed"] == found["losses"][-len(found["resumed"]) :]  # to the bit
        assert all(map(torch.equal, states[0].values(), states[1].values()))
    names = {path.name for path in (tmp_path / "own").iterdir()}
    assert {"epoch=1.ckpt", "epoch=1.ckpt.castor_optimizer.8", "last.ckpt"} <= names
    assert ("castor.json" in names) == (not own)


def test_a_module_that_steps_by_itself_has_the_buffers_that_ddp_leaves_it(tmp_path: Path) -> None:
    run(tmp_path / "plain", TORCHRUN, "lightning_manual.py")
    run(tmp_path / "own", (*CASTOR_RUN, "--nproc", "2"), "lightning_manual.py")
    means = []
    for rank in range(2):
        (found, states), (expected, theirs) = (
            trained(tmp_path / name, rank) for name in ("own", "plain")
        )
        for name in ("losses", "norms", "seen"):
            assert found[name] == pytest.approx(expected[name], rel=1e-5), name
        assert_weights_close(states[0], theirs[0])
        means.append(states[0]["body.1.running_mean"])
    assert not torch.equal(*means)  # Lightning has DDP share no more


def test_fabric_computes_what_ddp_does(tmp_path: Path) -> None:
    run(tmp_path / "plain", TORCHRUN, "fabric_ranks.py")
    run(tmp_path / "own", (*CASTOR_RUN, "--nproc", "2"), "fabric_ranks.py")
    for rank in range(2):
        found, expected = (
            torch.load(tmp_path / name / f"found{rank}.pt") for name in ("own", "plain")
        )
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert_weights_close(found["state"], expected["state"])


def test_one_process_for_two_devices_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    done = subprocess.run(
        [sys.executable, *CASTOR_RUN, str(HERE / "lightning_ranks.py"), str(tmp_path / "own")],
        cwd=tmp_path, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 1
    assert "strategy='ddp', and castor run trains it with castor's" in done.stderr
