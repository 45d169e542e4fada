"""A GPU's part of a session, simulated in host memory.

Simulation: tests/simulated_device, whose operators are the CPU's, run at once. GpuSimulation:
tests/simulated_gpu, where streams run all that a GPU's would.
"""

import functools
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import builds
import simulated_gpu
from castor.data import async_loader
from castor.plugins import gemini, torch_settings
from castor.runtime import device as device_module
from castor.runtime import engine
from helpers import Boosted, boost, exact_state

LINK_BYTES_PER_SECOND = 4 * 10**9


@functools.cache
def load_module() -> Any:
    """The module of the newest build, whose interface castor._C compares with its own.

    CASTOR_REQUIRE_SIMULATED_DEVICE=1 makes its absence a failure.
    """
    built = builds.require("simulated_device", "_simulated_device")
    spec = importlib.util.spec_from_file_location("_simulated_device", built)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Simulation:
    """Models boosted through it compute on simulated devices, one each."""

    def __init__(self, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self._module = module
        self._monkeypatch = monkeypatch
        self.device: Any = None
        """Of the model boosted last."""

    def boost(self, model: nn.Module, memory: int | str = 2**30, **settings: Any) -> Boosted:
        """As helpers.boost, on a simulated device."""
        self.device = self._module.SimulatedDevice(LINK_BYTES_PER_SECOND)
        with self._monkeypatch.context() as patch:
            patch.setattr(engine, "make_backend", lambda *_: self.device.capsule())
            return boost(model, memory, **settings)

    def counts(self) -> dict[str, int]:
        """What the device of the model boosted last has done."""
        counts: dict[str, int] = self.device.counts()
        return counts

    def refuse_allocation(self, n: int) -> int:
        """The device refuses the n-th of torch's allocations from now on; 0: none.

        Returns:
            Refusals so far that evicting answered.
        """
        refused: int = self._module.refuse_allocation(n)
        return refused

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What is allocated inside would be in host memory beside a GPU."""
        self._module.count_allocations(False)
        try:
            yield
        finally:
            self._module.count_allocations(True)

    def state(self, boosted: Boosted) -> list[torch.Tensor]:
        """Weights, masters and float32 moments."""
        with self.beside():
            return exact_state(boosted)


def compute_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on every plugin's device, and loader's, is the simulated GPU, whatever was given."""
    simulated_gpu.require()
    for module, chooser in (
        (gemini, "choose_device"),
        (async_loader, "choose_device"),
        (torch_settings, "choose_torch_device"),
    ):
        monkeypatch.setattr(module, chooser, lambda _: torch.device(simulated_gpu.NAME, 0))
    monkeypatch.setattr(device_module, "load_cuda", simulated_gpu.load_cuda)


def compute_as_asked() -> None:
    """In a process that a test has started: as CASTOR_TEST_DEVICE says, if it names this GPU.

    What else it may name is in helpers.plugin.
    """
    wanted = os.environ.get("CASTOR_TEST_DEVICE", "")
    if wanted.startswith("simgpu:"):
        compute_on_gpu(pytest.MonkeyPatch())
        simulated_gpu.require().gpu.delay(int(wanted.removeprefix("simgpu:")))


class GpuSimulation:
    """As Simulation, on the simulated GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._gpu = simulated_gpu.require().gpu
        self._before = self._gpu.counts()

    @property
    def device(self) -> Any:
        return self._gpu

    def boost(self, model: nn.Module, memory: int | str = 2**30, **settings: Any) -> Boosted:
        self._before = self._gpu.counts()
        with self._monkeypatch.context() as patch:
            compute_on_gpu(patch)
            return boost(model, memory, **settings)

    def counts(self) -> dict[str, int]:
        now = self._gpu.counts()
        return {name: now[name] - self._before[name] for name in now}

    def refuse_allocation(self, n: int) -> int:
        self._gpu.refuse_tensor(n)
        refusals: int = self._gpu.refusals()
        return refusals

    @contextmanager
    def beside(self) -> Iterator[None]:
        yield

    def state(self, boosted: Boosted) -> list[torch.Tensor]:
        return exact_state(boosted)
