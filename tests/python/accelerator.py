"""A GPU, real or simulated, for tests that run on both."""

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import simulated_gpu
from castor._loader import load_cuda
from simulated import compute_on_gpu

ACCELERATORS = [
    pytest.param("cuda", marks=pytest.mark.cuda),
    *(f"simulated, seed {seed}" for seed in simulated_gpu.SEEDS),
]
ON_A_REAL_ONE = pytest.mark.parametrize("gpu", ACCELERATORS[:1], indirect=True)


@dataclass(frozen=True)
class Accelerator:
    device: torch.device
    torch: Any
    """torch.cuda, or what stands for it."""
    castor: Any
    """castor._cuda."""
    real: bool

    @property
    def width(self) -> int:
        """Of layers that are large there."""
        return 4096 if self.real else 128


def of_name(name: str, request: pytest.FixtureRequest) -> Iterator[Accelerator]:
    """One of ACCELERATORS, whose allocator holds nothing from before, sums in a fixed order."""
    gc.collect()
    if name == "cuda":
        request.getfixturevalue("cuda")
        torch.cuda.empty_cache()
        tf32 = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False
        yield Accelerator(torch.device("cuda", 0), torch.cuda, load_cuda(), real=True)
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.cuda.set_per_process_memory_fraction(1.0)
        return
    module = simulated_gpu.require()
    compute_on_gpu(request.getfixturevalue("monkeypatch"))
    module.empty_cache()
    module.gpu.delay(int(name.rsplit(" ", 1)[1]))
    device = torch.device(simulated_gpu.NAME, 0)
    yield Accelerator(device, module, simulated_gpu.load_cuda(), real=False)
    simulated_gpu.rest()
