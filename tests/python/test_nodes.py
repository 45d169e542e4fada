"""Ranks of several machines, of which those of a machine share its memory.

One machine stands in for them (rank_processes.start): what crosses goes through gloo all the same.
"""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import node_cases
import rank_cases
import shared_host_storage_cases
from node_cases import ON_THREE, SAME_AS_GROUP, SAME_AS_ONE, STEPS
from rank_processes import found_by_each, kept, run, succeeded

SIZE = 4
NODES = 2
LINK = "gloo between 2 machines, and memory that the 2 ranks of each share"
PAGE = 4096


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(case, rank) -> weights, losses and report."""
    return kept(node_cases.trained, SIZE, tmp_path_factory, timeout=900, nodes=NODES)


@pytest.mark.parametrize("name", SAME_AS_ONE)
def test_weights_have_the_bits_of_one_process(name: str, trained: Any) -> None:
    expected, _, _ = rank_cases.train(SAME_AS_ONE[name], range(SIZE), steps=STEPS)
    for rank in range(SIZE):
        weights, _, report = trained(name, rank)
        assert all(map(torch.equal, weights, expected))
        assert (report["rank_link"], report["zero_stage"]) == (LINK, 1)
        assert report["rank_shared_bytes"] > 0


@pytest.mark.parametrize("name", SAME_AS_GROUP)
def test_weights_have_the_bits_of_ranks_that_share_nothing(name: str, trained: Any) -> None:
    for rank in range(SIZE):
        weights, losses, report = trained(name, rank)
        expected, expected_losses, apart = trained(f"{name}.group", rank)
        assert all(map(torch.equal, weights, expected))
        assert losses == expected_losses
        assert report["rank_shared_bytes"] > 0 == apart["rank_shared_bytes"]
        assert apart["rank_link"] == "gloo (as asked for)"


@pytest.mark.parametrize(("size", "nodes"), [(6, 3), (6, 2)])
def test_three_machines_and_three_ranks_of_one_compute_as_one_process(
    size: int, nodes: int, tmp_path: Path
) -> None:
    """A sixth is no power of two: every rank has the same bits."""
    succeeded(run(node_cases.on_three_nodes, size, tmp_path, nodes=nodes))
    for name in ON_THREE:
        expected, _, _ = rank_cases.train(ON_THREE[name], range(size), steps=STEPS)
        first, _, _ = torch.load(tmp_path / f"{name}.0.pt")
        for weight, reference in zip(first, expected, strict=True):
            assert (weight - reference).norm() <= 1e-3 * reference.norm()
        for rank in range(1, size):
            weights, _, report = torch.load(tmp_path / f"{name}.{rank}.pt")
            assert all(map(torch.equal, weights, first))
            assert f"gloo between {nodes} machines" in report["rank_link"]


def test_what_crosses_are_sums_and_means_of_gradients_and_updated_shards(tmp_path: Path) -> None:
    """To the byte, of B bytes of weights: B/2 of gradients a rank and step and B/4 of weights."""
    for reports, chunks in found_by_each(node_cases.sent, SIZE, tmp_path, nodes=NODES):
        used = sum(chunks)
        for before, after in itertools.pairwise(reports):
            crossed = after["rank_crossed_bytes"] - before["rank_crossed_bytes"]
            sent = after["rank_sent_bytes"] - before["rank_sent_bytes"]
            assert crossed == used // 2 + used // 4
            assert sent - crossed == used // 2  # of gradients, within the machine
        stored = 2 * sum(-(-size // PAGE) * PAGE for size in chunks)  # of weights and of gradients
        assert reports[-1]["rank_shared_bytes"] == stored


def test_host_storage_is_in_memory_once_a_machine(tmp_path: Path) -> None:
    for output in succeeded(run(shared_host_storage_cases.memory, SIZE, tmp_path, nodes=NODES)):
        resident, shared, _ = map(int, output.split())
        assert 48 << 20 < shared < 52 << 20
        assert resident == pytest.approx(NODES * shared, abs=1 << 19)


def test_stages_that_cut_do_so_over_all_ranks(tmp_path: Path) -> None:
    for output in succeeded(run(node_cases.stages, SIZE, tmp_path, nodes=NODES)):
        lines = [line.split(" ", 1) for line in output.splitlines()]
        assert len({weights for weights, _ in lines}) == 1
        assert [rest for _, rest in lines] == [
            f"1 True {LINK}",
            f"1 True {LINK}",
            f"2 False {LINK}, but not host storage: zero_stage=2 shards it over all ranks",
            f"3 False {LINK}, but not host storage: zero_stage=3 shards it over all ranks",
        ]


@pytest.mark.parametrize(("size", "link"), [(8, LINK), (4, "gloo (ranks run on several machines)")])
def test_tensor_parallel_ranks_share_what_each_machine_has_of_a_shard(
    size: int, link: str, tmp_path: Path
) -> None:
    """Of 4 ranks that train each half of the layers two are on each machine, or of 2 one."""
    succeeded(run(node_cases.divided, size, tmp_path, nodes=NODES))
    for rank in range(size):
        weights, found, shared = torch.load(tmp_path / f"node.{rank}.pt")
        expected, _, _ = torch.load(tmp_path / f"auto.{rank}.pt")
        assert all(map(torch.equal, weights, expected))
        assert (found, shared > 0) == (link, size == 8)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ranks of two machines have saved, and where they went from there."""
    path = tmp_path_factory.mktemp("saved")
    for output in succeeded(run(rank_cases.saves, SIZE, path, nodes=NODES)):
        assert "IoError" in output
    return path


def test_a_checkpoint_goes_on_bitwise_on_machines_and_on_one(saved: Path) -> None:
    expected = torch.load(saved / "weights.0.pt")
    for nodes in (NODES, 1):
        assert succeeded(run(rank_cases.loads, SIZE, saved, nodes=nodes)) == ["3\n"] * SIZE
        for rank in range(SIZE):
            assert all(map(torch.equal, torch.load(saved / f"loaded.{rank}.pt"), expected))


@pytest.mark.parametrize(
    ("phase", "overlap"), [("forward", "none"), ("backward", "none"), ("backward", "forward")]
)
def test_all_hear_of_a_rank_that_is_killed(
    phase: str, overlap: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Those of its machine by name; on the other machine its peer, and so the rest."""
    monkeypatch.setenv("PHASE", phase)
    monkeypatch.setenv("OVERLAP", overlap)
    monkeypatch.setenv("KILLED", "3")
    *others, killed = run(node_cases.some_die, SIZE, tmp_path, timeout=60, nodes=NODES)
    assert killed.code == -9
    for rank, output in enumerate(succeeded(others)):
        assert f"rank {rank} of {SIZE} lost the others: rank " in output
    assert re.search(r"rank 3 \(process \d+\) has ended", others[2].output)


def test_who_was_killed_on_a_ranks_own_machine_is_named_before_those_of_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever a rank hears of first: others may be gone because of that one."""
    for name, value in (("PHASE", "forward"), ("OVERLAP", "none"), ("KILLED", "0 3")):
        monkeypatch.setenv(name, value)
    _, second, third, _ = run(node_cases.some_die, SIZE, tmp_path, timeout=60, nodes=NODES)
    assert re.search(r"rank 0 \(process \d+\) has ended", second.output)
    assert re.search(r"rank 3 \(process \d+\) has ended", third.output)
