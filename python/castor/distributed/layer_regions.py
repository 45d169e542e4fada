"""Finds the tensor-parallel regions of a plan, from its names and styles alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

COLUMNS = frozenset({"colwise", "packed_colwise", "colwise_shared"})
"""Styles of layers whose outputs stay sharded (column-parallel)."""
GATHERED_COLUMNS = frozenset({"colwise_gather_output", "colwise_rep"})
"""Styles of column-parallel layers whose outputs are all-gathered."""
ROWS = frozenset({"rowwise", "rowwise_split_input", "rowwise_rep"})
"""Styles of layers whose outputs are summed over the ranks (row-parallel)."""
OF_HEADS = frozenset({"sharded", "heads_of", "set"})
"""Styles of modules that count heads. They say nothing about parameters."""

Kinds = Mapping[str, set[str]]
"""Styles by name, without their arguments."""


def kinds_of(plan: Mapping[str, Sequence[str]]) -> dict[str, set[str]]:
    """Returns a plan's styles without their arguments; see castor.distributed.tensor_plan."""
    return {name: {style.partition(":")[0] for style in given} for name, given in plan.items()}


def upwards(name: str) -> Iterator[str]:
    """Returns a module's name, its parent's name, and so on up to the outermost."""
    parts = name.split(".")
    return (".".join(parts[:upto]) for upto in range(len(parts), 0, -1))


def region_of(above: Sequence[str], kinds: Kinds) -> str | None:
    """Returns the tensor-parallel region of a layer; None: no module is around it.

    The region is the innermost module around the layer that counts heads, or else its parent.

    Args:
        above: Names of the modules around the layer, from its parent on.
        kinds: Styles of the plan; see kinds_of.
    """
    counting = (one for one in above if OF_HEADS & kinds.get(one, set()))
    return next(counting, above[0] if above else None)
