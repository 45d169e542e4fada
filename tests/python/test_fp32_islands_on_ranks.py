"""Parameters that stay float32 in a 16-bit model that several ranks train."""

from pathlib import Path
from typing import Any

import pytest
import torch

import island_rank_cases
from helpers import assert_equal, copies
from island_rank_cases import WAYS, islands, steps
from rank_processes import run, succeeded


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(directory, outcomes of both ranks)."""
    directory = tmp_path_factory.mktemp("islands")
    return directory, succeeded(run(island_rank_cases.on_two, 2, directory, timeout=300))


def found(trained: Any, way: str, rank: int) -> dict[str, Any]:
    result: dict[str, Any] = torch.load(trained[0] / f"{way}.{rank}.pt")
    return result


@pytest.mark.parametrize("way", WAYS)
def test_ranks_have_the_same_bits_and_resume_with_them(way: str, trained: Any) -> None:
    first, second = (found(trained, way, rank) for rank in range(2))
    for one in (first, second):
        assert_equal(one["weights"], first["weights"])
        assert_equal(one["resumed"], first["end"])
        assert one["again"] == one["losses"][4:]
    assert {weight.dtype for weight in first["weights"]} == {torch.float32, torch.bfloat16}


@pytest.mark.parametrize("state_format", ["fp32", "split", "split_int8"])
def test_what_ranks_share_changes_no_bit(state_format: str, trained: Any) -> None:
    of_format = [way for way in WAYS if way.startswith(f"{state_format},")]
    stages = [found(trained, way, 0)["stage"] for way in of_format]
    assert {1, 2, 3} <= set(stages)
    for way in of_format:
        assert_equal(found(trained, way, 0)["weights"], found(trained, of_format[0], 0)["weights"])


@pytest.mark.parametrize("state_format", ["fp32", "split_int8"])
def test_ranks_have_the_values_of_one_process(state_format: str, trained: Any) -> None:
    boosted = islands(optim_state_format=state_format)
    steps(boosted, range(2))
    weights = found(trained, f"{state_format}, auto, auto", 0)["weights"]
    for mine, theirs in zip(copies(boosted.model.parameters()), weights, strict=True):
        torch.testing.assert_close(mine, theirs, atol=6e-3, rtol=2e-2)


def test_ranks_that_keep_other_parameters_are_refused(trained: Any) -> None:
    for said in trained[1]:
        assert "keep_fp32" in said


def test_sharded_models_have_the_types_and_losses_of_full_ones(tmp_path: Path) -> None:
    succeeded(run(island_rank_cases.divided, 2, tmp_path, timeout=300))
    losses, types = island_rank_cases.alone()
    assert set(types.values()) == {torch.float32, torch.bfloat16}
    for name in ("layers", "experts"):
        for rank in range(2):
            theirs, of_rank = torch.load(tmp_path / f"{name}.{rank}.pt")
            assert of_rank == types
            assert theirs == pytest.approx(losses, rel=5e-3)
