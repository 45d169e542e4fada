"""Models whose layers, experts, sequences and stages ranks on GPUs divide.

Their losses and weights are those of ranks on the CPU device, to the bit where the kernels are.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import gpu_parallel_cases
import pipeline_cases
import simulated_gpu
import tensor_cases
from gpu_parallel_cases import COMPARED, ON_A_REAL_ONE, ON_FOUR, RINGS, SAVED
from rank_processes import run, succeeded
from tensor_cases import LOSS

pytestmark = pytest.mark.slow

CPU = ""
SIMULATED = [f"simgpu:{seed}" for seed in simulated_gpu.SEEDS]
THROUGH_HOST = "through the host"
"""Ending of a device's name: ranks exchange tensors through host memory."""
EXACT = [*((2, name) for name in COMPARED), *((4, name) for name in ON_FOUR)]
Result = tuple[list[float], list[torch.Tensor], dict[str, Any]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Result]:
    """(device, number of ranks, case, rank, all cases) -> losses, weights and report."""

    @cache
    def directory(device: str, size: int, cases: tuple[str, ...]) -> Path:
        path = tmp_path_factory.mktemp("divided")
        with pytest.MonkeyPatch.context() as patch:
            _on(device, patch)
            patch.setenv("CASES", "|".join(cases))
            succeeded(run(gpu_parallel_cases.each, size, path, timeout=1200))
        return path

    def load(device: str, size: int, name: str, rank: int, cases: tuple[str, ...] = ()) -> Result:
        result: Result = torch.load(directory(device, size, cases) / f"{name}.{rank}.pt")
        return result

    return load


@pytest.fixture(
    params=[*SIMULATED, *(pytest.param(f"{of}, {THROUGH_HOST}", marks=pytest.mark.whole)
                          for of in SIMULATED)]
)  # fmt: skip
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


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("seed", SIMULATED)
def test_a_backends_sums_of_activations_are_near(
    seed: str, size: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Four ranks are two replicas, of which the backend adds the gradients up too."""
    simulated_gpu.require()
    monkeypatch.setenv("CASTOR_TEST_DEVICE", seed)
    succeeded(run(gpu_parallel_cases.reductions, size, tmp_path, timeout=1200))
    for rank in range(size):
        found = json.loads((tmp_path / f"reductions{rank}.json").read_text())
        for name, (ordered, backend) in found.items():
            near = 2e-2 if "bf16" in name else 1e-5
            assert backend == pytest.approx(ordered, rel=near), name


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


@pytest.mark.cuda
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("name", ON_A_REAL_ONE)
def test_losses_are_those_of_the_cpu_device_on_a_real_gpu(
    name: str, trained: Callable[..., Result]
) -> None:
    """Which is every rank's, and has other kernels."""
    for rank in range(2):
        losses, _, _ = trained("cuda", 2, name, rank, ON_A_REAL_ONE)
        expected, _, _ = trained(CPU, 2, name, rank, ON_A_REAL_ONE)
        assert losses == pytest.approx(expected, rel=1e-4)


def test_what_gpus_write_the_cpu_device_goes_on_with(
    simgpu: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And files are those that ranks on the CPU device write, to the byte."""
    files = {}
    for device in (CPU, simgpu):
        _on(device, monkeypatch)
        files[device] = tmp_path / f"on {device}"
        files[device].mkdir()
        succeeded(run(gpu_parallel_cases.saves, 2, files[device]))
        written = files[device].rglob("*.safetensors")
        assert len(list(written)) == 3 * len(SAVED)
    for path in files[CPU].rglob("*.safetensors"):
        assert (files[simgpu] / path.relative_to(files[CPU])).read_bytes() == path.read_bytes()
    _on(CPU, monkeypatch)
    succeeded(run(gpu_parallel_cases.loads, 2, files[simgpu]))
    for name in SAVED:
        for rank in range(2):
            loaded = json.loads((files[simgpu] / f"{name} loaded{rank}.json").read_text())
            assert loaded == json.loads((files[CPU] / f"{name} later{rank}.json").read_text())


@pytest.mark.parametrize(
    ("kind", "phase"),
    [
        ("tp_size", "forward"),
        *(pytest.param(kind, "backward", marks=pytest.mark.whole)
          for kind in ("ring_attn", "split_gather", "pp_size")),
        pytest.param("pp_size", "forward", marks=pytest.mark.whole),
        ("pp_size", "weights"),
    ],
)  # fmt: skip
def test_a_rank_that_is_killed_is_named(
    kind: str, phase: str, simgpu: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _on(simgpu, monkeypatch)
    monkeypatch.setenv("KIND", kind)
    monkeypatch.setenv("PHASE", phase)
    staged = kind == "pp_size"
    scenario = pipeline_cases.one_dies if staged else tensor_cases.one_dies
    first, second = run(scenario, 2, tmp_path, timeout=100)
    assert (first.code, second.code) == (0, -9), first.errors
    said = tmp_path / "one_dies0.json"
    assert "rank 1 (process" in json.loads(said.read_text())[0]


def _on(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are started from now on compute there."""
    device, _, link = device.partition(", ")
    for name in ("CASTOR_TEST_DEVICE", "CASTOR_DEVICE_LINK"):
        monkeypatch.delenv(name, raising=False)
    if device != CPU:
        monkeypatch.setenv("CASTOR_TEST_DEVICE", device)
    if link == THROUGH_HOST:
        monkeypatch.setenv("CASTOR_DEVICE_LINK", "host")


def test_the_host_waits_for_no_exchange(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It waits as often as in one process, but for numbers of rows that experts exchange."""
    simulated_gpu.require()
    _on(SIMULATED[0], monkeypatch)
    for size in (1, 2):
        succeeded(run(gpu_parallel_cases.host_waits, size, tmp_path))
    alone = json.loads((tmp_path / "one process0.json").read_text())
    for name, case in gpu_parallel_cases.WAITS.items():
        ranks = range(1 if name == "one process" else 2)
        for forward, backward in (
            json.loads((tmp_path / f"{name}{rank}.json").read_text()) for rank in ranks
        ):
            if "ep_size" in case.settings:
                assert forward > alone[0]
            else:
                assert forward <= alone[0], name
            if "tp_size" in case.settings:  # of others, gradients of replicas meet at its end
                assert backward <= alone[1], name


@pytest.mark.parametrize("device", [CPU, SIMULATED[0]])
@pytest.mark.parametrize("size", [2, 4])
def test_zero_stages_go_with_other_parallelism(
    size: int, device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if device != CPU:
        simulated_gpu.require()
    _on(device, monkeypatch)
    succeeded(run(gpu_parallel_cases.zero_stages, size, tmp_path, timeout=300))
