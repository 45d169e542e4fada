"""What a step that recomputes blocks shows of each: its moments, its bytes, its time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

Moment = Callable[[], tuple[int, int]]
"""Gives the moments of the step so far, and the non-model bytes now."""


@dataclass
class BlockRun:
    """One pass through a block: its forward, and the one that backward runs again.

    `begin_again` and `end_again` count once: a second backward pass over the same graph is another
    one's.
    """

    block: int
    """Its number, in the model's order."""
    moment: Moment
    forward: list[tuple[int, int]] = field(default_factory=list)
    """Where it began and ended."""
    again: list[tuple[int, int]] = field(default_factory=list)
    """Where the second one did."""
    seconds: float = 0.0
    """Of the second one, until it stopped."""

    def begin(self, *, again: bool) -> None:
        """A forward begins."""
        if again and not self.again:
            self.again.append(self.moment())
            self.seconds -= time.perf_counter()
        elif not again:
            self.forward.append(self.moment())

    def end(self, *, again: bool) -> None:
        """It is over, or stopped early."""
        if again and len(self.again) == 1:
            self.seconds += time.perf_counter()
            self.again.append(self.moment())
        elif not again:
            self.forward.append(self.moment())

    @property
    def complete(self) -> bool:
        """Whether backward came to it."""
        return len(self.forward) == len(self.again) == 2

    @property
    def kept_bytes(self) -> int:
        """What the second forward left for backward."""
        return max(0, self.again[1][1] - self.again[0][1])

    def span(self) -> tuple[int, int, int, int, int, int, int]:
        """As _C.keep_activations takes it."""
        (begin, base), (end, _) = self.forward
        (again_begin, again_base), (again_end, _) = self.again
        return begin, end, again_begin, again_end, base, again_base, self.kept_bytes


class Decisions(Protocol):
    """What is asked at each forward of a block."""

    def recomputes(self, block: int) -> bool:
        """Whether backward runs the block again, as far as was decided."""
        ...

    def keeps(self, block: int, inputs: Iterable[Any]) -> bool:
        """Whether the forward of a block with such inputs keeps its activations."""
        ...

    def open(self, block: int) -> BlockRun:
        """A pass through a block that is not kept."""
        ...


class BlockProfile:
    """The passes through blocks of the step under way."""

    def __init__(self, moment: Moment) -> None:
        self._moment = moment
        self._runs: list[BlockRun] = []

    def open(self, block: int) -> BlockRun:
        """A pass that begins."""
        run = BlockRun(block, self._moment)
        self._runs.append(run)
        return run

    def take(self) -> list[BlockRun]:
        """Those that backward came to; the next step's follow."""
        complete = [run for run in self._runs if run.complete]
        self._runs = []
        return complete
