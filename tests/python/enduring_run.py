"""A run on NVMe that meets faults and goes on as its user would: again, or from a checkpoint."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import castor
from castor.runtime.engine import engine_of
from helpers import boost, copies
from zoo import tower, tower_batch

STEPS = 3


def settings_of(precision: str, overlap: str) -> dict[str, Any]:
    """All states on NVMe, in chunks so small that each transfer is a few KiB."""
    return {
        "precision": precision,
        "overlap": overlap,
        "chunk_bytes": 8192 if precision == "fp32" else 2048,
        "nvme_offload_fraction": 1.0,
        "optim_state_format": "split_int8" if precision == "bf16" else "fp32",
        "nonfinite": "ignore" if overlap == "backward" else "raise",
        "enable_gradient_accumulation": overlap != "backward",
    }


def weights_too(settings: dict[str, Any]) -> dict[str, Any]:
    """The same with parameters and gradients on NVMe: the host has room for the windows alone."""
    layer = 48 * 56 * (4 if settings["precision"] == "fp32" else 2)
    return settings | {
        "size": {"width": 48, "depth": 20 if settings["precision"] == "fp32" else 36},
        "host_memory": 6 * (layer + 8192) + 3 * layer + 24576,
    }


class EnduringRun:
    """Three steps with a checkpoint after the first.

    `what_happened` lists the errors met, and what helped: "again" or "load".
    """

    def __init__(
        self,
        scratch: Path,
        checkpoints: Path,
        *,
        edits: bool = False,
        size: dict[str, int] | None = None,
        **settings: Any,
    ) -> None:
        """`edits`: weights are changed by hand before each step, which reaches their masters."""
        self.edits = edits
        self.size = size or {"width": 32, "depth": 5}
        self.run = boost(tower(**self.size), nvme_path=scratch, **settings)
        self.checkpoints = checkpoints
        self.what_happened: list[str] = []
        self.first = checkpoints / "first"
        """A checkpoint of step 0, of any run with the same settings."""

    def train(self, first: int = 0) -> None:
        """The steps from `first` on, and once more those that an error cost."""
        step = first
        while step < STEPS:
            loaded = self._loading(lambda step=step: self._step(step))
            step = step + 1 if loaded is None else loaded

    def _step(self, step: int) -> None:
        booster, model, optimizer = self.run
        optimizer.zero_grad()
        booster.backward(model(**self._batch(step)), optimizer)
        if self.edits:
            with torch.no_grad():
                for param in model.parameters():
                    param.view(-1)[:3] *= 0.5
        self._again(optimizer.step)
        if step == 0:
            self._again(lambda: booster.save(self.checkpoints, model, optimizer))

    def _batch(self, step: int) -> dict[str, torch.Tensor]:
        return tower_batch(step, width=self.size["width"])

    def state(self) -> list[torch.Tensor]:
        """Weights, moments and masters of the end; reading them may be what meets the fault."""
        while True:
            found: list[torch.Tensor] = []
            loaded = self._loading(lambda found=found: self._again(lambda: self._read(found)))
            if loaded is None:
                return found
            self.train(loaded)

    def _read(self, found: list[torch.Tensor]) -> None:
        found.clear()
        session = engine_of(self.run.model).session
        states = self.run.optimizer.state_dict()["state"].values()
        masters = [session.master(i) for i in range(len(list(self.run.model.parameters())))]
        found += copies(self.run.model.parameters())
        found += copies(entry[key] for entry in states for key in ("exp_avg", "exp_avg_sq"))
        found += copies(master for master in masters if master is not None)

    def _again(self, call: Callable[[], object]) -> None:
        """What failed and left the run whole is called again: once, the fault is one."""
        try:
            call()
        except castor.IoError as error:
            self._note(error)
            if not self._whole():
                raise
            self.what_happened[-1] += ", again"
            call()

    def _loading(self, call: Callable[[], object]) -> int | None:
        """The step of the checkpoint that had to be loaded after an error."""
        try:
            call()
        except (castor.IoError, castor.UsageError) as error:  # UsageError: it came out elsewhere
            if not self.what_happened or ", " in self.what_happened[-1]:
                self._note(error)
        else:
            return None
        self.what_happened[-1] += ", load"
        if not self._whole():  # it is when what was read for a save came back damaged, twice
            self._check_nothing_goes_on()
        return self._load()

    def _load(self) -> int:
        booster, model, optimizer = self.run
        newest = booster.latest(self.checkpoints) or self.first
        return booster.load(newest, model, optimizer).step

    def _note(self, error: castor.Error) -> None:
        words = str(error)
        if isinstance(error, castor.UsageError):
            assert "load the last checkpoint" in words or "load a checkpoint" in words, error
            assert not self._whole(), error
        else:
            assert ".scratch" in words, error
        if isinstance(error, castor.CorruptionError):
            assert "of chunk" in words, error
        self.what_happened.append(type(error).__name__)

    def _whole(self) -> bool:
        return bool(engine_of(self.run.model).session.consistent)

    def _check_nothing_goes_on(self) -> None:
        booster, model, optimizer = self.run
        before = set(self.checkpoints.rglob("*"))
        for call in (
            lambda: model(**self._batch(0)),
            optimizer.step,
            optimizer.state_dict,
            model.state_dict,
            lambda: booster.save(self.checkpoints, model, optimizer, step=9),
            lambda: booster.save_model(model, self.checkpoints / "model"),
            lambda: booster.save_optimizer(optimizer, self.checkpoints / "optimizer"),
        ):
            with pytest.raises(castor.UsageError, match=r"load (the last|a) checkpoint"):
                call()
        assert set(self.checkpoints.rglob("*")) == before
