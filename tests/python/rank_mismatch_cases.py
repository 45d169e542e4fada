"""What tests of ranks with parts of one model that step differently run; as tensor_cases.py."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import distributed

import as_rank
import pipeline_cases
from helpers import Boosted
from tensor_cases import FAMILIES, boost, said, write_own

CASE = FAMILIES["mixtral"]
WAYS: dict[str, dict[str, Any]] = {
    "tp_size": {"size": 2}, "ep_size": {"ep_size": 2},
    "split_gather": {"size": 2, "sequence_parallelism_mode": "split_gather"},
}  # fmt: skip


def backward(boosted: Boosted) -> None:
    """Of a batch that all have."""
    boosted.booster.backward(boosted.model(**CASE.batch(0)).loss, boosted.optimizer)


def backward_in_stages(boosted: Boosted) -> None:
    """Likewise."""
    whole = iter([pipeline_cases.batch(CASE, 0)])
    boosted.booster.execute_pipeline(whole, boosted.model, None, boosted.optimizer)


def other_rates(boosted: Boosted, back: Callable[[Boosted], None]) -> list[str]:
    """What a step says to rank 1's learning rate, and without it."""
    back(boosted)
    group = boosted.optimizer.param_groups[0]
    group["lr"] *= 1 + distributed.get_rank()
    differ = said(boosted.optimizer.step)
    group["lr"] /= 1 + distributed.get_rank()
    return [differ, said(boosted.optimizer.step)]


def apart(directory: Path) -> None:
    """Steps of ranks of which one has another learning rate."""
    found = {}
    for max_norm in (0.0, 0.5):
        for way, given in WAYS.items():
            boosted = boost(CASE, max_norm=max_norm, **given)  # type: ignore[arg-type]
            found[f"{way} {max_norm}"] = other_rates(boosted, backward)
        staged = pipeline_cases.boost(CASE, max_norm=max_norm)
        found[f"pp_size {max_norm}"] = other_rates(staged, backward_in_stages)
    write_own(directory, "apart", found)


if __name__ == "__main__":
    as_rank.run(globals())
