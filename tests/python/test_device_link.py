"""Ranks send tensors from device to device: bits of the host's sums, no wait, lost ranks named."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import device_link_cases
import simulated_gpu
from rank_processes import Rank, finish, run, start, succeeded

SIMULATED = [f"simgpu:{seed}" for seed in simulated_gpu.SEEDS]


@pytest.fixture(params=SIMULATED)
def simgpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated_gpu.require()
    monkeypatch.setenv("CASTOR_TEST_DEVICE", request.param)


@pytest.mark.usefixtures("simgpu")
@pytest.mark.smoke
@pytest.mark.parametrize("size", [2, 4])
def test_collectives_have_the_bits_of_the_hosts(size: int, tmp_path: Path) -> None:
    succeeded(run(device_link_cases.same_bits, size, tmp_path))


@pytest.mark.usefixtures("simgpu")
@pytest.mark.parametrize("size", [2, 4])
def test_the_backends_own_sums_are_near(size: int, tmp_path: Path) -> None:
    succeeded(run(device_link_cases.backend_adds, size, tmp_path))


@pytest.mark.usefixtures("simgpu")
def test_a_sum_that_is_begun_goes_beside_what_is_computed(tmp_path: Path) -> None:
    succeeded(run(device_link_cases.goes_beside, 2, tmp_path))


@pytest.mark.usefixtures("simgpu")
def test_the_host_does_not_wait(tmp_path: Path) -> None:
    succeeded(run(device_link_cases.host_goes_on, 2, tmp_path))


@pytest.mark.usefixtures("simgpu")
@pytest.mark.parametrize(
    ("how", "said", "seconds"),
    [("killed", "has ended", 30), ("leaves", "has let go of the model", 30),
     pytest.param("stopped", "is stopped", 40, marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_rank_that_is_lost_is_named_and_what_waits_for_it_ends(
    how: str, said: str, seconds: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOW", how)
    ranks = start(device_link_cases.one_ends, 2, tmp_path)
    outcome = _first(ranks, timeout=60)
    assert outcome == 0
    waited, error = _read(tmp_path / "one_ends.json")
    assert waited < seconds
    assert "rank 1 (process" in error
    assert said in error


@pytest.mark.usefixtures("simgpu")
def test_a_group_of_one_rank(tmp_path: Path) -> None:
    succeeded(run(device_link_cases.alone, 1, tmp_path))


@pytest.mark.cuda
@pytest.mark.usefixtures("cuda")
def test_a_group_of_one_rank_over_nccl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """NCCL itself, which wants a GPU for each rank."""
    monkeypatch.setenv("CASTOR_TEST_DEVICE", "cuda")
    (said,) = succeeded(run(device_link_cases.alone, 1, tmp_path))
    assert said.startswith("nccl: ")


@pytest.mark.usefixtures("simgpu")
def test_ranks_on_one_gpu_exchange_through_the_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """NCCL refuses two ranks on one GPU."""
    monkeypatch.setenv("CASTOR_SIMULATED_GPU_ID", "the same")
    succeeded(run(device_link_cases.leaves_out, 2, tmp_path))
    assert _read(tmp_path / "leaves_out.json") is None


@pytest.mark.usefixtures("simgpu")
def test_the_environment_may_ask_for_the_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CASTOR_DEVICE_LINK", "host")
    succeeded(run(device_link_cases.leaves_out, 2, tmp_path))
    assert _read(tmp_path / "leaves_out.json") is None
    monkeypatch.setenv("CASTOR_DEVICE_LINK", "nvlink")
    for outcome in run(device_link_cases.leaves_out, 2, tmp_path):
        assert "CASTOR_DEVICE_LINK is 'nvlink' on all ranks" in outcome.errors


def _first(ranks: list[Rank], *, timeout: float) -> int:
    """Exit status of rank 0; the other is ended then."""
    try:
        return ranks[0].wait(timeout)
    finally:
        for rank in ranks:
            if not rank.over():
                os.kill(rank.pid, signal.SIGKILL)
        finish(ranks)


def _read(path: Path) -> Any:
    return json.loads(path.read_text())
