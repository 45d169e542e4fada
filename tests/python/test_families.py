"""Families whose divided layers have something of their own: equal, or refused by name."""

from typing import Any

import pytest

import family_cases
from family_cases import WAYS
from rank_processes import assert_said, found, found_by_each
from tensor_cases import LOSS


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return found(family_cases.families, 2, tmp_path_factory.mktemp("families"))


@pytest.mark.parametrize("way", WAYS)
def test_losses_and_parameters_that_see_parts_are_plain_pytorchs(way: str, trained: Any) -> None:
    losses, small = trained[way]
    expected, theirs = family_cases.plain(WAYS[way][0])
    assert losses == pytest.approx(expected, rel=LOSS)
    assert small == pytest.approx(theirs, rel=1e-6)
    assert bool(small) == (not way.startswith("jetmoe"))


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return found_by_each(family_cases.refused, 2, tmp_path_factory.mktemp("refused"))


@pytest.mark.parametrize(
    ("what", "kind", "part"),
    [
        ("parameter", "NotImplementedError", "'model.layers.0.self_attn.A' is a parameter beside"),
        ("kinds", "NotImplementedError", "experts.gate_up_proj' by 'colwise', and it has 96"),
        ("mask, all_to_all", "PlaceholderMaskError", "look into the attention mask themselves"),
        ("mask, all_gather", "PlaceholderMaskError", "look into the attention mask themselves"),
        ("mask, ring_attn", "PlaceholderMaskError", "look into the attention mask themselves"),
        ("own mask", "NotImplementedError", "a mask that transformers has not made"),
        ("norm", "UsageError", "the full parameter 'model.layers.0.self_attn.q_norm.weight'"),
        ("attention", "UsageError", "set to 'sdpa' after booster.boost"),
        ("router", "NotImplementedError", "its router loss needs all tokens"),
    ],
)
def test_what_plans_and_masks_do_not_say_is_named_on_every_rank(
    what: str, kind: str, part: str, refused: Any
) -> None:
    assert_said((of_rank[what] for of_rank in refused), kind, part)
