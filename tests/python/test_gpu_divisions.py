"""Models whose layers, experts, sequences and stages ranks on GPUs divide.

Their losses and weights are those of ranks on the CPU device, to the bit where the kernels are.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import gpu_division_cases
import simulated_gpu
from gpu_division_cases import ON_FOUR, ON_TWO, RINGS
from rank_processes import run, succeeded
from tensor_cases import LOSS

pytestmark = pytest.mark.slow

CPU = ""
SIMULATED = [f"simgpu:{seed}" for seed in simulated_gpu.SEEDS]
EXACT = [*((2, name) for name in ON_TWO), *((4, name) for name in ON_FOUR)]
Result = tuple[list[float], list[torch.Tensor], dict[str, Any]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Result]:
    """(device, number of ranks, case, rank) -> losses, weights and report."""

    @cache
    def directory(device: str, size: int) -> Path:
        path = tmp_path_factory.mktemp("divided")
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("CASTOR_TEST_DEVICE", raising=False)
            if device != CPU:
                patch.setenv("CASTOR_TEST_DEVICE", device)
            succeeded(run(gpu_division_cases.each, size, path, timeout=1200))
        return path

    def load(device: str, size: int, name: str, rank: int) -> Result:
        result: Result = torch.load(directory(device, size) / f"{name}.{rank}.pt")
        return result

    return load


@pytest.fixture(params=SIMULATED)
def simgpu(request: pytest.FixtureRequest) -> str:
    simulated_gpu.require()
    device: str = request.param
    return device


@pytest.mark.parametrize(("size", "name"), EXACT)
def test_losses_and_weights_have_the_bits_of_the_cpu_device(
    size: int, name: str, simgpu: str, trained: Callable[..., Result]
) -> None:
    for rank in range(size):
        losses, weights, report = trained(simgpu, size, name, rank)
        expected, expected_weights, on_cpu = trained(CPU, size, name, rank)
        assert losses == expected
        assert all(map(torch.equal, weights, expected_weights))
        assert report["gradient_norm"] == on_cpu["gradient_norm"]
        if "tight" in name:  # parameters came and went
            assert report["h2d_bytes"] > sum(weight.nbytes for weight in weights)


@pytest.mark.parametrize("name", RINGS)
def test_rings_compute_attention_otherwise_and_agree(
    name: str, simgpu: str, trained: Callable[..., Result]
) -> None:
    for rank in range(2):
        losses, weights, _ = trained(simgpu, 2, name, rank)
        expected, expected_weights, _ = trained(CPU, 2, name, rank)
        assert losses == pytest.approx(expected, rel=LOSS)
        for weight, of_cpu in zip(weights, expected_weights, strict=True):
            torch.testing.assert_close(weight, of_cpu, rtol=1e-3, atol=1e-4)
