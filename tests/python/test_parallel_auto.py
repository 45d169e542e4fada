"""activations="auto" where ranks divide layers, experts, sequences and stages."""

from pathlib import Path
from typing import Any

import pytest

import parallel_cases
from parallel_cases import APART, AUTO, BUDGETS
from rank_processes import found, found_by_each, of_sizes
from tensor_cases import LOSS


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return of_sizes(parallel_cases.auto, tmp_path_factory)


@pytest.mark.parametrize("name", AUTO)
def test_losses_are_plain_pytorchs(name: str, divided: Any) -> None:
    losses, expected = divided(AUTO[name].ranks)[name]
    assert losses == pytest.approx(expected, rel=LOSS)


@pytest.mark.parametrize("setting", BUDGETS)
@pytest.mark.parametrize("name", AUTO)
def test_ranks_that_share_blocks_decide_the_same(name: str, setting: str, divided: Any) -> None:
    way = AUTO[name]
    everyone = divided(way.ranks)[f"{name}, {setting}"]
    for rank, figures in enumerate(everyone):
        assert figures == everyone[rank - rank % way.sharing]
        blocks, recomputed, offloaded = figures
        assert recomputed + offloaded <= blocks
        if setting in ("ample", "lazy", "ample by default"):
            assert recomputed == offloaded == 0


def test_where_room_is_scarce_some_rank_keeps_fewer_blocks(divided: Any) -> None:
    everyone = [divided(way.ranks)[f"{name}, least"] for name, way in AUTO.items()]
    assert any(recomputed + offloaded for of in everyone for _, recomputed, offloaded in of)


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return found(parallel_cases.auto_apart, 2, tmp_path_factory.mktemp("apart"))


@pytest.mark.parametrize("name", APART)
def test_the_rank_with_the_least_room_decides(name: str, apart: Any) -> None:
    first, second = apart[f"{name}, budgets"]
    assert first == second
    assert sum(first[1:]) > 0
    assert apart[f"{name}, before"] == [[first[0], 0, 0]] * 2


@pytest.mark.parametrize("name", APART)
def test_a_rank_that_runs_short_has_all_recompute(name: str, apart: Any) -> None:
    first, second = apart[f"{name}, held"]
    assert first == second == 1  # the step left its plan, and went on


@pytest.mark.parametrize("name", APART)
def test_a_larger_batch_of_one_rank_is_a_profile_of_all(name: str, apart: Any) -> None:
    first, second = apart[f"{name}, larger"]
    assert first == second
    blocks = first[0][0]
    # Recomputed where it comes, and the next step is the profile.
    assert [recomputed for _, recomputed, _ in first] == [blocks, 0, 0]


def test_replicas_decide_by_themselves(tmp_path: Path) -> None:
    decided = found(parallel_cases.auto_copies, 4, tmp_path)
    for first, too, second, as_well in decided.values():
        assert first == too == [2, 0, 0]
        assert second == as_well == [2, 2, 0]


def test_an_allocation_that_fails_within_a_block_is_an_error(tmp_path: Path) -> None:
    """Another rank has gone on into exchanges that a second forward would make again."""
    first, second = found_by_each(parallel_cases.auto_fails, 2, tmp_path)
    assert second.startswith("OutOfMemoryError")
    assert first.startswith("Error: rank 0 of 2 lost the others: rank 1 (process")
