"""What forwards write besides gradients: on ranks it is rank 0's after each step, as in DDP."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import rank_buffer_cases
from rank_buffer_cases import KINDS, OWN, PLUGINS
from rank_processes import kept

SIZE = 2


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    return kept(rank_buffer_cases.buffers, SIZE, tmp_path_factory, timeout=240)


@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize("kind", KINDS)
def test_losses_evaluations_and_buffers_are_those_of_ddp(
    kind: str, plugin: str, found: Callable[..., Any]
) -> None:
    for rank in range(SIZE):
        mine, theirs = (found(name, rank)[kind] for name in (plugin, "plain"))
        for name in ("losses", "evaluated"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-5)
        for own, expected in zip(mine["buffers"], theirs["buffers"], strict=True):
            assert own.keys() == expected.keys()
            for name, value in expected.items():
                assert own[name].dtype == value.dtype
                assert torch.allclose(own[name].double(), value.double(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_one_ranks_on_all_but_those_that_are_to_be_each_ones_own(
    kind: str, found: Callable[..., Any]
) -> None:
    first, second = (found("castor", rank)[kind]["buffers"][-1] for rank in range(SIZE))
    unlike = {name for name, value in first.items() if not torch.equal(value, second[name])}
    assert unlike == ({OWN} if kind == "own" else set())
