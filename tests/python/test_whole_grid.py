"""Families x ways to divide them: plain PyTorch's losses, in half of a rank's part, and with NVMe.

The whole grid takes minutes: CASTOR_WHOLE_GRID=1 runs it. Without, a few cells.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

import grid_cases
import grids
from grid_cases import CASES, WAYS
from rank_processes import found
from tensor_cases import LOSS

SOME = {"tp 2": ["falcon"], "sp 2, ring_attn": ["gemma2"], "tp 2 x pp 2": ["t5"]}
"""What no other test runs in little memory."""
ASKED = {way: list(families) for way, (_, _, families) in WAYS.items()} if grids.WHOLE else SOME


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Any]:
    """Of a way and a family; ranks run some families, and end."""

    @cache
    def of_some(way: str, names: tuple[str, ...]) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("WAY", way)
            patch.setenv("FAMILIES", " ".join(names))
            return found(grid_cases.grid, WAYS[way][0], tmp_path_factory.mktemp("grid"))

    def of(way: str, name: str) -> Any:
        first = ASKED[way].index(name) // 4 * 4
        return of_some(way, tuple(ASKED[way][first : first + 4]))[name]

    return of


@pytest.mark.parametrize(("way", "name"), [(way, name) for way in ASKED for name in ASKED[way]])
def test_a_family_trains_as_plain_pytorch_in_little_memory(
    way: str, name: str, cells: Callable[[str, str], Any]
) -> None:
    cell = cells(way, name)
    assert cell["raised"] == []
    assert cell["ample"] == pytest.approx(grid_cases.expected(CASES[name], way), rel=LOSS)
    assert cell["tight"] == cell["nvme"] == cell["ample"]
    for budget, whole, *peaks in zip(
        *(cell[key] for key in ("tight budgets", "whole", "tight peaks", "nvme peaks")),
        strict=True,
    ):
        assert max(peaks) <= budget < whole
    assert min(cell["nvme bytes on NVMe"]) > 0 == max(cell["tight bytes on NVMe"])
