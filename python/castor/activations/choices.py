"""Searches the decisions over a model's blocks for those of the fastest step that fits."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from castor.activations.agreement import Agreement
from castor.activations.block_profile import Decided, Events

_GRID = 8
"""Numbers of kept blocks that are tried first, evenly spread, before those beside the best."""
_FEW = 8
"""So many blocks are decided one by one."""
_OTHERS: tuple[tuple[Decided, ...], ...] = (
    ("recompute",),
    ("offload",),
    ("offload", "recompute"),
    ("offload", "keep"),
    ("keep", "offload"),
)
"""Decisions for the blocks before the kept ones, in turn."""

Decisions = tuple[Decided, ...]
"""Decisions of the blocks, by number."""


@dataclass(frozen=True)
class Choice:
    """Decisions, and the step that the simulator predicts with them."""

    decisions: Decisions
    events: Events
    seconds: float
    spare_bytes: int
    """Bytes of the device budget that the step leaves; below 0: it does not fit."""

    @property
    def fits(self) -> bool:
        """Whether it does."""
        return self.spare_bytes >= 0

    @property
    def kept(self) -> int:
        """Blocks that are."""
        return self.decisions.count("keep")

    @property
    def rank(self) -> tuple[float, ...]:
        """The less, the better: what fits by time, and of equals what keeps the most."""
        return (0, self.seconds, -self.kept) if self.fits else (1, -self.spare_bytes)


def search(choice: Callable[[Decisions], Choice], num_blocks: int, most_kept: int) -> Choice:
    """The fastest choice that is found to fit; where none does, all blocks are recomputed.

    The last blocks are kept first: their activations live the shortest. Step times are not convex
    in their number: freed memory holds chunks, and whole ones. So a grid comes first, then numbers
    ever closer to the best; for each of the ways that the others may go. A link that is slower than
    the computing wants offloaded blocks among others, irregularly: few blocks are changed one by
    one, and exchanged, as long as that helps.

    Args:
        choice: Of decisions.
        num_blocks: Of the model.
        most_kept: Blocks that may be.
    """
    tried: dict[Decisions, Choice] = {}

    def tries(decisions: Decisions) -> Choice:
        if decisions.count("keep") > most_kept:
            return Choice(decisions, [], math.inf, -sys.maxsize)
        if decisions not in tried:
            tried[decisions] = choice(decisions)
        return tried[decisions]

    for others in _OTHERS:
        best = _number_kept(lambda kept, o=others: tries(_ordered(o, kept, num_blocks)), most_kept)  # type: ignore[misc]
        while 0 < num_blocks <= _FEW:
            near = _best(map(tries, _beside(best.decisions)))
            if near.rank >= best.rank:
                break
            best = near
    found = _best(tried.values())
    return found if found.fits else tries(_ordered(("recompute",), 0, num_blocks))


def best_for_all(
    choice: Callable[[Decisions], Choice],
    own: Choice,
    all_recomputed: Decisions,
    agreement: Agreement,
) -> Choice:
    """Returns the ranks' choice that fits on all, and that takes the slowest rank the least time.

    Collective.

    Args:
        choice: Of decisions, on this rank.
        own: What this rank has found.
        all_recomputed: Where nothing fits on all.
        agreement: Of the ranks.
    """
    found = agreement.of_all("the choice of which blocks run again", own.decisions)
    proposed = sorted({*found, all_recomputed})
    choices = [choice(decisions) for decisions in proposed]
    ranks = agreement.of_all("the comparison of these choices", [one.rank for one in choices])
    worst = [max(of_all) for of_all in zip(*ranks, strict=True)]
    chosen = min(range(len(proposed)), key=lambda i: worst[i])
    fits = worst[chosen][0] == 0
    return choices[chosen if fits else proposed.index(all_recomputed)]


def _best(choices: Iterable[Choice]) -> Choice:
    return min(choices, key=lambda choice: choice.rank)


def _ordered(others: tuple[Decided, ...], kept: int, num_blocks: int) -> Decisions:
    first = itertools.islice(itertools.cycle(others), num_blocks - kept)
    return (*first, *["keep"] * kept)  # type: ignore[arg-type]


def _number_kept(choice: Callable[[int], Choice], most: int) -> Choice:
    tried = {kept: choice(kept) for kept in {round(most * i / _GRID) for i in range(_GRID + 1)}}
    distance = -(-most // _GRID)
    while distance > 1:
        distance = -(-distance // 2)
        middle = min(tried, key=lambda kept: tried[kept].rank)
        for kept in (middle - distance, middle + distance):
            if 0 <= kept <= most and kept not in tried:
                tried[kept] = choice(kept)
    return _best(tried.values())


def _beside(decisions: Decisions) -> Iterator[Decisions]:
    """Decisions that differ in one block, or in the order of two."""
    for i, old in enumerate(decisions):
        for new in ("keep", "recompute", "offload"):
            if new != old:
                yield (*decisions[:i], new, *decisions[i + 1 :])
        for j in range(i):
            if decisions[j] != old:
                yield (
                    *decisions[:j],
                    old,
                    *decisions[j + 1 : i],
                    decisions[j],
                    *decisions[i + 1 :],
                )
