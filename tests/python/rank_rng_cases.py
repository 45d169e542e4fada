"""What test_rank_rng.py runs on several ranks: `python rank_rng_cases.py NAME DIRECTORY`."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn

import as_rank
import grids
from tensor_cases import FAMILIES, boost, of_all, train, write
from zoo import Case

DROPPING = grids.some(
    ("gpt2", "bert", "t5", "opt", "bloom", "gptj", "falcon", "llama", "gpt_neox", "vit"),
    "gpt2", "t5", "llama",
)  # fmt: skip
"""Families with dropout within heads, or of hidden units."""


def dropping(case: Case, attention: str | None = None) -> Case:
    """The case with much dropout wherever its model has any."""

    def build() -> nn.Module:
        model: Any = case.model()
        if attention:
            model.set_attn_implementation(attention)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.3
            for name, value in vars(module).items():
                if "drop" in name and name != "layerdrop" and isinstance(value, float):
                    setattr(module, name, 0.3)
        return model

    return replace(case, name=f"{case.name} with dropout", build=build)


@contextmanager
def dropped() -> Iterator[list[torch.Tensor]]:
    """In it the masks that are drawn, in order."""
    drop, found = nn.functional.dropout, list[torch.Tensor]()

    def dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, *_: Any) -> torch.Tensor:
        mask = drop(torch.ones_like(x), p, training)
        found.append(mask)
        return x * mask

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.functional, "dropout", dropout)
        yield found


def masks(directory: Path) -> None:
    """Shapes of what both ranks drop alike, or not; whether they draw the same afterwards."""
    found: dict[str, Any] = {}
    for name in ("gpt2", "bert", "bloom", "gptj", "t5"):
        case = dropping(FAMILIES[name], "eager")
        boosted = boost(case, 2)
        boosted.model.train()
        with dropped() as drawn:
            boosted.model(**case.batch(0))
        first, second = of_all([mask.tolist() for mask in drawn])
        alike = [one == other for one, other in zip(first, second, strict=True)]
        shapes = [list(mask.shape) for mask in drawn]
        states = of_all(torch.get_rng_state().tolist())
        found[name] = {
            "alike": [shape for shape, same in zip(shapes, alike, strict=True) if same],
            "apart": [shape for shape, same in zip(shapes, alike, strict=True) if not same],
            "same state": states[0] == states[1],
        }
    write(directory, "masks", found)


def trained(directory: Path) -> None:
    """Ranks agree on losses, blocks that run again draw the same, and so does another run."""
    found: dict[str, Any] = {}
    for name in DROPPING:
        case = dropping(FAMILIES[name])
        plain, *others = (_losses(case, **how) for how in (
            {}, {}, {"activations": "recompute"}, {"activations": "offload"},
            {"overlap": "forward"},
        ))  # fmt: skip
        found[name] = {"equal": all(losses == plain for losses in others), "losses": plain}
    write(directory, "trained", found)


def _losses(case: Case, **settings: Any) -> list[float]:
    torch.manual_seed(distributed.get_rank())  # boost shares rank 0's
    losses = train(case, boost(case, 2, **settings), 0, 4)
    assert of_all(losses) == [losses, losses]
    states = of_all(torch.get_rng_state().tolist())
    assert states[0] == states[1]
    return losses


if __name__ == "__main__":
    as_rank.run(globals())
