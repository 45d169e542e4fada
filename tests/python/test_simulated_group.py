"""simnccl, the simulated GPU's process group: it computes as gloo does, and behaves as NCCL."""

from pathlib import Path

import pytest

import simulated_group_cases as cases
from rank_processes import run, succeeded
from simulated_gpu import ID, SEEDS, require


@pytest.fixture(params=SEEDS, autouse=True)
def _delays(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks have a simulated GPU each, whose streams dawdle."""
    require()
    monkeypatch.setenv("CASTOR_TEST_DEVICE", f"simgpu:{request.param}")


@pytest.mark.smoke
@pytest.mark.parametrize("size", [2, 4])
def test_operations_give_what_gloo_gives_on_the_cpu(size: int, tmp_path: Path) -> None:
    succeeded(run(cases.values, size, tmp_path))


def test_a_ring_of_messages_in_one_batch_does_not_hang(tmp_path: Path) -> None:
    succeeded(run(cases.ring, 4, tmp_path))


def test_streams_wait_and_the_host_does_not(tmp_path: Path) -> None:
    succeeded(run(cases.waits, 2, tmp_path))


def test_memory_and_bytes_of_a_communicator_are_counted(tmp_path: Path) -> None:
    succeeded(run(cases.memory_and_counts, 2, tmp_path))


def test_a_stream_hangs_until_abort_where_a_peer_has_ended(tmp_path: Path) -> None:
    succeeded(run(cases.peer_ends, 2, tmp_path, timeout=60))


def test_abort_ends_what_a_peer_does_not_take_part_in(tmp_path: Path) -> None:
    succeeded(run(cases.peer_never_comes, 2, tmp_path, timeout=60))


def test_two_ranks_on_one_device_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ID, "GPU-7")
    for output in succeeded(run(cases.shares_a_device, 2, tmp_path, timeout=60)):
        uuid, refusal = output.splitlines()
        assert uuid == "GPU-7"
        assert "ranks 0 and 1 are on one GPU (GPU-7)" in refusal
