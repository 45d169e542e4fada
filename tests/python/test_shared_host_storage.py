"""Host storage of parameters that the ranks of a machine keep once."""

from pathlib import Path
from typing import Any

import pytest
import torch

import shared_host_storage_cases
from rank_processes import kept, run, succeeded
from shared_host_storage_cases import EVENTFUL

PAGE = 4096


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(variant, link, rank) -> what it has seen."""
    return kept(shared_host_storage_cases.events, 2, tmp_path_factory, timeout=600)


def same(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert first["weights"].keys() == second["weights"].keys()
    for event, weights in first["weights"].items():
        assert all(map(torch.equal, weights, second["weights"][event])), event
    assert first["losses"] == second["losses"]


@pytest.mark.parametrize("name", EVENTFUL)
def test_what_others_write_is_there_once_and_the_same_as_without_shared_host_storage(
    name: str, seen: Any
) -> None:
    """Edits in place, through .data and in a forward, loads: on ranks with unequal budgets."""
    for rank in range(2):
        same(seen(name, "auto", rank), seen(name, "auto", 0))
        same(seen(name, "auto", rank), seen(name, "group", rank))


@pytest.mark.parametrize("name", [name for name in EVENTFUL if name != "split"])
def test_what_others_write_is_what_one_process_has(name: str, seen: Any, tmp_path: Path) -> None:
    same(seen(name, "auto", 0), shared_host_storage_cases.eventful(name, (0, 1), tmp_path))


@pytest.mark.parametrize("name", EVENTFUL)
def test_no_rank_keeps_copies(name: str, seen: Any) -> None:
    """But of frozen weights that it has written: layer 3's, which no update brings together."""
    for rank in range(2):
        found = seen(name, "auto", rank)
        assert found["copies"][:2] == [0, 0]
        assert max(found["copies"]) <= shared_host_storage_cases.LAYER + 2 * PAGE


def test_ranks_pay_their_shares_of_host_storage(seen: Any) -> None:
    found = seen("tight", "auto", 0)
    report, apart = found["report"], seen("tight", "group", 0)["report"]
    stored = found["parameter bytes"] + found["gradient bytes"]
    assert stored <= report["rank_shared_bytes"] <= stored + 16 * PAGE
    assert apart["rank_shared_bytes"] == 0
    saved = apart["host_bytes"] - report["host_bytes"]
    assert saved == pytest.approx(stored / 2, abs=16 * PAGE)


def test_ranks_that_place_chunks_differently_say_that_they_share_no_host_storage(seen: Any) -> None:
    report = seen("unlike", "auto", 0)["report"]
    assert report["rank_shared_bytes"] == 0
    assert report["rank_link"].endswith(
        ", but not host storage: the ranks place chunks differently"
    )


def test_gradients_that_wait_for_other_ranks_are_few_and_paid_for(tmp_path: Path) -> None:
    """Rank 1 is slow in backward, and the host has no room for all gradients of a rank."""
    for output in succeeded(run(shared_host_storage_cases.staged, 2, tmp_path)):
        most_copies, after, layers, all_gradients = map(int, output.split())
        assert most_copies <= 6 * shared_host_storage_cases.WIDE_LAYER < all_gradients
        assert layers > 8
        assert after == 0


def test_states_make_room_on_nvme_for_nothing_that_host_storage_has_paid_for(
    tmp_path: Path,
) -> None:
    """The gradients' storage counted twice: the host seemed to have no room for parameters."""
    for output in succeeded(run(shared_host_storage_cases.states_on_nvme, 2, tmp_path)):
        stored, same = output.split()
        assert (
            0
            < int(stored)
            <= shared_host_storage_cases.DEEP * shared_host_storage_cases.WIDE_LAYER * 1.01
        )
        assert same == "True"


def test_gradients_that_a_loop_writes_itself_are_paid_for(tmp_path: Path) -> None:
    """clip_grad_norm_ writes them: copies, until a backward pass that finds them unseen."""
    for output in succeeded(run(shared_host_storage_cases.clips, 2, tmp_path)):
        paid, copied, left = map(int, output.split())
        assert (
            paid
            == copied
            == shared_host_storage_cases.DEEP * 2 * shared_host_storage_cases.WIDE_LAYER // 2
        )
        assert left <= 2 * shared_host_storage_cases.WIDE_LAYER


def test_gradients_that_a_loop_writes_itself_without_room_are_named(tmp_path: Path) -> None:
    for output in succeeded(run(shared_host_storage_cases.clips_without_room, 2, tmp_path)):
        assert "out of host memory" in output


def test_a_step_that_clips_without_room_scales_no_gradient(tmp_path: Path) -> None:
    """Where an optimizer of several reads p.grad, gradients are scaled in place."""
    for output in succeeded(run(shared_host_storage_cases.steps_without_room, 2, tmp_path)):
        said, left = output.splitlines()
        assert "a rank has gradients of its own until all ranks have theirs" in said
        assert left == "True 0"


def test_parameters_outlive_castor(tmp_path: Path) -> None:
    for output in succeeded(run(shared_host_storage_cases.outlives, 2, tmp_path)):
        assert output.split() == ["True", "True", "True"]


@pytest.mark.parametrize(
    ("link", "size", "nodes", "sharing"),
    [("auto", 2, 1, 2), ("group", 2, 1, 1), pytest.param("node", 4, 2, 2, marks=pytest.mark.whole)],
)
def test_activations_are_planned_with_what_ranks_share(
    link: str, size: int, nodes: int, sharing: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Weights and gradients of a machine count once for its ranks, each its share of them."""
    monkeypatch.setenv("CASTOR_RANK_LINK", link)
    scenario = shared_host_storage_cases.plans_activations
    for output in succeeded(run(scenario, size, tmp_path, nodes=nodes)):
        found, shared, saved = map(int, output.split())
        assert found == sharing
        # A rank as one that shares nothing pays for all; shared storage is of whole pages.
        others = shared * (sharing - 1) / sharing
        if nodes == 1:
            assert saved == pytest.approx(others, rel=0.1, abs=PAGE)
        else:  # whose window for sums between machines is larger
            assert 0 < saved < others
