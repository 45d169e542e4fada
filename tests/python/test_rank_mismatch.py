"""Ranks with parts of one model whose steps differ are told so, before one is taken."""

from typing import Any

import pytest

import rank_mismatch_cases
from rank_processes import found_by_each


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return found_by_each(rank_mismatch_cases.apart, 2, tmp_path_factory.mktemp("apart"))


@pytest.mark.parametrize("max_norm", [0.0, 0.5])
@pytest.mark.parametrize("way", [*rank_mismatch_cases.WAYS, "pp_size"])
def test_a_learning_rate_of_one_ranks_own_is_named(way: str, max_norm: float, heard: Any) -> None:
    for of_rank in heard:
        differ, alike = of_rank[f"{way} {max_norm}"]
        different = "rank 0 and rank 1 differ in param_groups[0]['lr']: 0.001 and 0.002"
        assert differ.startswith(f"UsageError: {different}")
        assert alike == "nothing"
