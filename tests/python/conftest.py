"""Shared set-up of the Python tests: offline, seeded, quiet."""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Generator, Iterator
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from simulated import GpuSimulation, Simulation

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Inductor's workers each import torch, for a few kernels in all.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import transformers

import builds
import grids
import simulated_gpu
from accelerator import ACCELERATORS, Accelerator, of_name

transformers.logging.set_verbosity_error()
# One thread: a second changes nothing on these sizes, and sums are then the same on any machine.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test starts from the same random state."""
    random.seed(0)
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


def pytest_assertrepr_compare(op: str, left: object, right: object) -> list[str] | None:
    """Names files whose bytes differ. pytest's own comparison of megabytes takes minutes."""
    if isinstance(left, bytes) and isinstance(right, bytes):
        left, right = {"": left}, {"": right}
    if op != "==" or not isinstance(left, dict) or not isinstance(right, dict):
        return None
    if not all(isinstance(value, bytes) for value in (*left.values(), *right.values())):
        return None
    said = [f"bytes {op} bytes"]
    for name in sorted(left.keys() | right.keys(), key=str):
        one, other = left.get(name), right.get(name)
        if one is None or other is None:
            said.append(f"{name} is on the {'right' if one is None else 'left'} only")
        elif one != other:
            pairs = enumerate(zip(one, other, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
            said.append(
                f"{name} differs from byte {at}: {one[at : at + 40]!r} of {len(one)} bytes, "
                f"{other[at : at + 40]!r} of {len(other)}"
            )
    return said


def pytest_configure() -> None:
    """Adds the simulated GPU to torch before a backward starts autograd's threads."""
    if builds.WANTED is not None:
        from castor._loader import extension_path

        if not extension_path().is_relative_to(builds.WANTED):
            pytest.exit(f"{extension_path()} is not of CASTOR_TEST_BUILD={builds.WANTED}", 4)
    if simulated_gpu.library() is not None:
        simulated_gpu.install()


_FEW_MODULES = 100
_num_frozen = 0
"""Modules that there were when what imports had made was frozen."""


def _freeze() -> None:
    """Freezes what imports have made: a collection takes 0.3 s with it, and none without.

    Tests and boost() collect to see what nobody holds any more. That is made after this.
    """
    global _num_frozen
    gc.collect()
    gc.freeze()
    _num_frozen = len(sys.modules)


def pytest_collection_finish() -> None:
    """Freezes what collecting the tests has imported."""
    _freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, None, None]:
    """Freezes what tests have imported, such as torch's compiler, and what is left of a file's."""
    yield
    over = nextitem is None or nextitem.path != item.path
    if over or len(sys.modules) - _num_frozen > _FEW_MODULES:
        _freeze()


def pytest_unconfigure() -> None:
    """Lets the interpreter free at its end what was frozen."""
    gc.unfreeze()


def _is_of_ranks(value: object) -> bool:
    """Whether a module that holds `value` starts ranks; run_python starts one process."""
    if getattr(value, "__name__", "") in ("run_python", "held_port"):
        return False
    return "rank_processes" in (getattr(value, "__module__", ""), getattr(value, "__name__", ""))


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks tests that start ranks, and leaves out what grids.py says, where no test is named."""
    for item in items:
        module = getattr(item, "module", None)
        if module and any(_is_of_ranks(value) for value in vars(module).values()):
            item.add_marker("ranks")
    if grids.WHOLE or any("::" in argument for argument in config.args):
        return
    if out := grids.left_out(items):
        config.hook.pytest_deselected(items=[item for item in items if item in out])
        items[:] = [item for item in items if item not in out]


@pytest.fixture(params=["device", *(f"gpu, seed {seed}" for seed in simulated_gpu.SEEDS)])
def simulated(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Simulation | GpuSimulation]:
    """Boosts models on devices of tests/simulated_device, or on that of tests/simulated_gpu."""
    from simulated import GpuSimulation, Simulation, load_module

    if request.param == "device":
        yield Simulation(load_module(), monkeypatch)
        return
    simulation = GpuSimulation(monkeypatch)
    simulation.device.delay(int(request.param.rsplit(" ", 1)[1]))
    yield simulation
    simulated_gpu.rest()


@pytest.fixture
def same_kernels() -> Iterator[None]:
    """Products without oneDNN: for bf16 it takes memory of its own, on some processors only."""
    enabled = torch.backends.mkldnn.set_flags(_enabled=False)[0]
    yield
    torch.backends.mkldnn.set_flags(_enabled=enabled)


@pytest.fixture(params=ACCELERATORS)
def gpu(request: pytest.FixtureRequest) -> Iterator[Accelerator]:
    """A GPU, real or simulated."""
    yield from of_name(request.param, request)


@pytest.fixture(autouse=True)
def _on_another_device(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """CASTOR_TEST_DEVICE: every model computes on another device than the CPU.

    "simulated": one of tests/simulated_device; "simgpu:1": that of tests/simulated_gpu, with delays
    of seed 1. Tests marked cpu_device are skipped.
    """
    wanted = os.environ.get("CASTOR_TEST_DEVICE")
    if wanted is not None and (marker := request.node.get_closest_marker("cpu_device")):
        pytest.skip(f"of the CPU device alone: {marker.args[0]}")
    if wanted == "simulated":
        from castor.runtime import engine
        from simulated import LINK_BYTES_PER_SECOND, load_module

        module = load_module()
        monkeypatch.setattr(
            engine,
            "make_backend",
            lambda *_: module.SimulatedDevice(LINK_BYTES_PER_SECOND).capsule(),
        )
    elif wanted is not None and wanted.startswith("simgpu:"):
        from simulated import compute_on_gpu
        from simulated_gpu import require

        compute_on_gpu(monkeypatch)
        require().gpu.delay(int(wanted.removeprefix("simgpu:")))
        yield
        simulated_gpu.rest()
        return
    elif wanted is not None:
        pytest.fail(f"CASTOR_TEST_DEVICE is {wanted!r}; there are 'simulated' and 'simgpu:SEED'")
    yield
