"""Which cells of large grids a run has: CI a part, and CASTOR_WHOLE_GRID=1 (`make whole`) all.

A test of families x settings repeats one property over every pair. CI runs, of each test function,
cells in which every value of every parameter is there. What is taken from some() and steps(), and
what is marked `whole`, is chosen by hand. Cells that a command line names run in any case.
"""

import os
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

WHOLE = os.environ.get("CASTOR_WHOLE_GRID") == "1"

Cell = frozenset[tuple[str, str]]
"""The values of a cell, by their parameters' names."""


def some(grid: Any, *chosen: Any) -> Any:
    """A grid (a dictionary, or a sequence), or in CI what is chosen of it, in its order.

    Raises:
        KeyError: What is chosen is not there.
    """
    if unknown := [key for key in chosen if key not in grid]:
        raise KeyError(f"the grid has no {unknown}")
    if WHOLE:
        return grid
    if isinstance(grid, dict):
        return {key: value for key, value in grid.items() if key in chosen}
    return type(grid)(key for key in grid if key in chosen)


def cover(cells: Sequence[Cell]) -> list[int]:
    """Places of few cells that have every value of all; the first ones where there is a choice."""
    missing = set().union(*cells)
    chosen = []
    while missing:
        best = max(range(len(cells)), key=lambda place: len(cells[place] & missing))
        chosen.append(best)
        missing -= cells[best]
    return sorted(chosen)


def left_out(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """What CI does not run. Tests for a GPU are left to the machine that has one."""
    functions: dict[str, list[tuple[pytest.Item, Cell]]] = {}
    out = set()
    for item in items:
        if item.get_closest_marker("whole"):
            out.add(item)
        elif (spec := getattr(item, "callspec", None)) and not item.get_closest_marker("cuda"):
            cell = frozenset((name, repr(value)) for name, value in spec.params.items())
            functions.setdefault(item.nodeid.partition("[")[0], []).append((item, cell))
    for cells in functions.values():
        kept = cover([cell for _, cell in cells])
        out |= {item for place, (item, _) in enumerate(cells) if place not in kept}
    return out


def steps(whole: int) -> int:
    """How many of a run's steps, or of many things alike, are tried: in CI two fifths of them."""
    return whole if WHOLE else max(4, 2 * whole // 5)
