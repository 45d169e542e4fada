"""Finds the tensor-parallel regions of a plan, from its names and styles alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

COLUMNS = frozenset({"colwise", "packed_colwise", "colwise_shared"})
"""Styles of layers whose outputs stay divided ..."""
GATHERED_COLUMNS = frozenset({"colwise_gather_output", "colwise_rep"})
"""... or come to all ranks."""
ROWS = frozenset({"rowwise", "rowwise_split_input", "rowwise_rep"})
"""Styles of layers whose outputs are sums."""
OF_HEADS = frozenset({"divided", "heads_of", "set"})
"""Styles of modules that count heads; they say nothing of parameters."""

Kinds = Mapping[str, set[str]]
"""Styles by name, without their arguments."""


def kinds_of(plan: Mapping[str, Sequence[str]]) -> dict[str, set[str]]:
    """Returns the kinds of modules in a plan; see castor.distributed.tensor_plan."""
    return {name: {style.partition(":")[0] for style in given} for name, given in plan.items()}


def upwards(name: str) -> Iterator[str]:
    """A name, its parent's, and so on."""
    parts = name.split(".")
    return (".".join(parts[:upto]) for upto in range(len(parts), 0, -1))


def region_of(above: Sequence[str], kinds: Kinds) -> str | None:
    """The module around a layer that counts heads, or its parent; None: there is none.

    Args:
        above: Names of the modules around it, from its parent on.
        kinds: Of the plan.
    """
    counting = (one for one in above if OF_HEADS & kinds.get(one, set()))
    return next(counting, above[0] if above else None)
