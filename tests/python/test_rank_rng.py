"""Dropout of what ranks have parts of: each rank drops its own heads and hidden units."""

from pathlib import Path
from typing import Any

import pytest

import rank_rng_cases
from rank_processes import found


@pytest.fixture(scope="module")
def masks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return found(rank_rng_cases.masks, 2, tmp_path_factory.mktemp("masks"))


@pytest.mark.parametrize(
    ("name", "mlps"), [("gpt2", 0), ("bert", 0), ("bloom", 0), ("gptj", 0), ("t5", 4)]
)
def test_each_rank_drops_its_own_parts_and_all_drop_the_same_of_the_rest(
    name: str, mlps: int, masks: Any
) -> None:
    """Attention weights have four dimensions; T5's MLPs drop hidden units."""
    of_family = masks[name]
    dimensions = [len(shape) for shape in of_family["apart"]]
    assert dimensions.count(4) > 0
    assert dimensions.count(3) == mlps
    assert {len(shape) for shape in of_family["alike"]} == {3}
    assert of_family["same state"]


def test_ranks_agree_and_blocks_that_run_again_drop_the_same(tmp_path: Path) -> None:
    for name, of_family in found(rank_rng_cases.trained, 2, tmp_path).items():
        assert of_family["equal"], name
        assert of_family["losses"][-1] < 2 * of_family["losses"][0], name
