"""Every I/O operation of a run fails once: the same bits in the end, or an error first."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import castor
import grids
from enduring_run import EnduringRun, settings_of, weights_too
from faulty_disk import FaultyDisk
from helpers import equal

FAULTS = ("EIO", "ENOSPC", "EINTR", "short", "flip")


class Sweep:
    """Runs with one fault each, compared with one that met none."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        self._settings = settings
        self._directory = directory
        self._disk = FaultyDisk(monkeypatch)
        self._scratch = directory / "nvme"
        self._scratch.mkdir()
        before = self._count("reads", "writes")
        run = self._start("count")
        run.run.booster.save(run.first, run.run.model, run.run.optimizer)
        self._first = run.first
        run.train()
        self._expected = run.state()
        assert run.what_happened == []
        self.num_operations = self._count("reads", "writes") - before
        self.outcomes: Counter[str] = Counter()

    def meet(self, fault: str) -> None:
        before = self._count("faults")
        run = self._start(fault)
        run.first = self._first
        run.train()
        for mine, theirs in zip(run.state(), self._expected, strict=True):
            assert equal(mine, theirs), run.what_happened
        if self._count("faults") > before:  # beside backward not every run has as many operations
            self.outcomes["; ".join(run.what_happened) or "no error"] += 1
        del run
        assert list(self._scratch.iterdir()) == []

    def _start(self, fault: str) -> EnduringRun:
        checkpoints = self._directory / fault.replace(":", "-")
        checkpoints.mkdir()
        self._disk.set(fault)
        try:
            return EnduringRun(self._scratch, checkpoints, **self._settings)
        except castor.IoError as error:
            if "build the model anew" not in str(error):
                raise
        self._disk.set("count")
        run = EnduringRun(self._scratch, checkpoints, **self._settings)
        run.what_happened.append("IoError in boost, anew")
        return run

    def _count(self, *what: str) -> int:
        counts = self._disk.counts()
        return sum(counts[kind] for kind in what)


@pytest.mark.parametrize("fault", FAULTS)
def test_any_operation_of_a_run_may_fail(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = Sweep(tmp_path, monkeypatch, **settings_of("fp32", "none"))
    assert sweep.num_operations >= 40
    stride = 1 if grids.WHOLE or fault in ("EIO", "flip") else 3
    for operation in range(1, sweep.num_operations + 1, stride):
        sweep.meet(f"any:{operation}:{fault}")
    check_outcomes(fault, sweep)


@pytest.mark.parametrize("overlap", ["none", "forward", "backward"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_operations_may_fail_beside_backward_and_the_next_forward(
    precision: str, overlap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = Sweep(tmp_path, monkeypatch, **settings_of(precision, overlap))
    stride = sweep.num_operations // grids.steps(23)
    for position, fault in enumerate(("EIO", "flip")):
        for operation in range(1 + position, sweep.num_operations + 1, stride):
            sweep.meet(f"any:{operation}:{fault}")
        check_outcomes(fault, sweep)
        sweep.outcomes.clear()


@pytest.mark.parametrize("overlap", ["none", "forward"])
def test_edited_masters_may_fail_to_be_written(
    overlap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of("bf16", overlap) | {"optim_state_format": "split", "edits": True}
    sweep = Sweep(tmp_path, monkeypatch, **settings)
    for operation in range(1, sweep.num_operations + 1, sweep.num_operations // grids.steps(40)):
        sweep.meet(f"any:{operation}:EIO")
    check_outcomes("EIO", sweep)


@pytest.mark.parametrize(
    "overlap", [pytest.param("none", marks=pytest.mark.whole), "forward", "backward"]
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_transfers_of_parameters_and_gradients_may_fail(
    precision: str, overlap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = Sweep(tmp_path, monkeypatch, **weights_too(settings_of(precision, overlap)))
    for position, fault in enumerate(FAULTS):
        stride = sweep.num_operations // grids.steps(17 if fault in ("EIO", "flip") else 5)
        for operation in range(1 + position, sweep.num_operations + 1, stride):
            sweep.meet(f"any:{operation}:{fault}")
        # What was read ahead and not needed in the end may have failed.
        check_outcomes(fault, sweep, harmless=True)
        sweep.outcomes.clear()


def check_outcomes(fault: str, sweep: Sweep, *, harmless: bool = False) -> None:
    """That the sweep met what it should have: interrupted and short transfers are not noticed."""
    if fault in ("EINTR", "short"):
        assert set(sweep.outcomes) == {"no error"}
    else:
        assert any("load" in outcome for outcome in sweep.outcomes)
        assert harmless or any("again" in outcome for outcome in sweep.outcomes)
        assert harmless or fault == "flip" or "no error" not in sweep.outcomes
