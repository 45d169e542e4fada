"""Shared set-up of the Python tests: offline, seeded, quiet."""

from __future__ import annotations

import os
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from simulated import Simulation

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import transformers

transformers.logging.set_verbosity_error()
# One thread: a second changes nothing on these sizes, and sums are then the same on any machine.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test starts from the same random state."""
    torch.manual_seed(0)


@pytest.fixture
def cuda() -> ModuleType:
    """castor._cuda, where there is a GPU; CASTOR_REQUIRE_CUDA=1 makes its absence a failure."""
    from castor._loader import BUILD_INFO, load_cuda

    problem = ""
    if not torch.cuda.is_available():
        problem = "torch finds no CUDA device"
    elif BUILD_INFO.cuda == "none":
        problem = "castor was built without castor._cuda"
    if problem and os.environ.get("CASTOR_REQUIRE_CUDA") == "1":
        pytest.fail(f"{problem} (CASTOR_REQUIRE_CUDA is 1)")
    if problem:
        pytest.skip(problem)
    return load_cuda()


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Simulation:
    """Boosts models on devices of tests/simulated_device."""
    from simulated import Simulation, load_module

    return Simulation(load_module(), monkeypatch)


@pytest.fixture(autouse=True)
def _on_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """CASTOR_TEST_DEVICE=simulated: every model computes on a device of tests/simulated_device."""
    wanted = os.environ.get("CASTOR_TEST_DEVICE")
    if wanted == "simulated":
        from castor.runtime import engine
        from simulated import LINK_BYTES_PER_SECOND, load_module

        module = load_module()
        monkeypatch.setattr(
            engine,
            "make_backend",
            lambda _: module.SimulatedDevice(LINK_BYTES_PER_SECOND).capsule(),
        )
    elif wanted is not None:
        pytest.fail(f"CASTOR_TEST_DEVICE is {wanted!r}; there is 'simulated'")
