"""Searches for the decisions on a model's blocks that give the fastest step that fits."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from castor.activations.block_profile import Decided, Events

# --- Decisions that must be the same on all ranks that compute a block together -------------------

Value = TypeVar("Value")


class Sharing(Protocol):
    """Group of ranks with collectives within blocks: castor.distributed's ModelParallelGroup."""

    def all_gather_places(self, place: str, value: Any) -> list[tuple[str, Any]]:
        """Returns the place and the value of every rank, in rank order. Collective.

        Raises:
            UsageError: The ranks are not all at that place; every rank raises it.
            Error: A rank is gone.
        """
        ...


class BlockRanks:
    """Exchanges values between the ranks that compute a block together.

    A block's second forward repeats the collectives of its first one. So either all of these ranks
    run it, or none.
    """

    def __init__(self, groups: Sequence[Sharing] = ()) -> None:
        """Takes the tensor-parallel and the context-parallel group, if there are any."""
        self._groups = groups

    @property
    def alone(self) -> bool:
        """Whether this rank computes blocks alone."""
        return not self._groups

    def all_gather(self, place: str, value: Value) -> list[Value]:
        """Returns the picklable values of all ranks, the same list on each. Collective.

        Args:
            place: Description of the place in the program, for the error of ranks that are at
                another one.
            value: This rank's value.
        """
        everyone = [value]
        for group in self._groups:
            everyone = [one for _, some in group.all_gather_places(place, everyone) for one in some]
        return everyone


# --- Searches for the decisions on a model's blocks that give the fastest step that fits ----------

_GRID = 8
"""Number of intervals of the first grid over the number of kept blocks."""
_FEW = 8
"""Number of blocks up to which decisions are also changed block by block."""
_OTHERS: tuple[tuple[Decided, ...], ...] = (
    ("recompute",),
    ("offload",),
    ("offload", "recompute"),
    ("offload", "keep"),
    ("keep", "offload"),
)
"""Patterns of decisions for the blocks before the kept ones; each repeats over these blocks."""

Decisions = tuple[Decided, ...]
"""Decisions on the blocks, by number."""


@dataclass(frozen=True)
class Choice:
    """Decisions, and the step that the simulator predicts with them."""

    decisions: Decisions
    """Decision on each block."""
    events: Events
    """Events of the predicted step."""
    seconds: float
    """Seconds of the predicted step."""
    spare_bytes: int
    """Bytes of the device budget that the step leaves; below 0: the step does not fit."""

    @property
    def fits(self) -> bool:
        """Whether the step fits the device budget."""
        return self.spare_bytes >= 0

    @property
    def kept(self) -> int:
        """Number of kept blocks."""
        return self.decisions.count("keep")

    @property
    def rank(self) -> tuple[float, ...]:
        """Sort key, least is best: fitting steps by time, then by kept blocks; others by bytes."""
        return (0, self.seconds, -self.kept) if self.fits else (1, -self.spare_bytes)


def search(choice: Callable[[Decisions], Choice], num_blocks: int, most_kept: int) -> Choice:
    """Returns the fastest choice found that fits; if none does, all blocks are recomputed.

    The last blocks are kept first, since their activations live shortest. Step times are not convex
    in the number of kept blocks, because freed memory holds full chunks. So the search tries a
    grid of numbers, then numbers ever closer to the best one. It does so for each pattern of
    decisions on the other blocks.

    A link that is slower than computing needs an irregular mix of offloaded and other blocks. With
    few blocks, single decisions are changed and pairs exchanged as long as that helps.

    Args:
        choice: Predicts the step of decisions.
        num_blocks: Number of the model's blocks.
        most_kept: Number of blocks that may be kept.
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
    block_ranks: BlockRanks,
) -> Choice:
    """Returns the ranks' choice that fits on all ranks and is fastest on the slowest one.

    Collective.

    Args:
        choice: Predicts the step of decisions on this rank.
        own: The choice that this rank has found.
        all_recomputed: The decisions if no choice fits on all ranks.
        block_ranks: The ranks.
    """
    found = block_ranks.all_gather("the choice of which blocks run again", own.decisions)
    proposed = sorted({*found, all_recomputed})
    choices = [choice(decisions) for decisions in proposed]
    ranks = block_ranks.all_gather("the comparison of these choices", [one.rank for one in choices])
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
    """Yields decisions that differ in one block, or in the order of two."""
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
