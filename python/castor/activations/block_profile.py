"""Profiles each block in a step that recomputes, and predicts other decisions."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

Decided = Literal["keep", "recompute", "offload"]
Moment = Callable[[], tuple[int, int]]
"""Gives the moments of the step so far, and the non-model bytes now."""


Events = list[tuple[int, int, int, int]]
"""Events of a step, as _C takes them: kind, module or chunk, non-model bytes, nanoseconds."""
Span = tuple[int, int, int, int, int, int, int, int, int, int]


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
    """Events at which the first forward began and ended."""
    again: list[tuple[int, int]] = field(default_factory=list)
    """Events at which the second forward began and ended."""
    seconds: float = 0.0
    """Seconds of the second forward, until it stopped."""
    input_bytes: int = 0
    """Bytes of the first forward's inputs that backward needs again."""
    copies: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    """Copies of its outputs, which no other step has."""
    copied_bytes: int = 0
    """Bytes of the copies, when they were made."""
    failed: bool = False
    """Whether one of its forwards has raised."""

    def copied(self, tensors: Sequence[torch.Tensor]) -> None:
        """Its outputs have been copied."""
        self.copies = [weakref.ref(tensor) for tensor in tensors]
        self.copied_bytes = self.held_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of the copies that are still there: a pass that nobody ends drops them, too."""
        return sum(tensor.nbytes for ref in self.copies if (tensor := ref()) is not None)

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
        """Bytes that the second forward left for backward."""
        return max(0, self.again[1][1] - self.again[0][1])

    def span(self, away: tuple[int, int] = (0, 0)) -> Span:
        """Returns the span for _C.keep_activations: kept, except while it is offloaded."""
        (begin, base), (end, _) = self.forward
        (again_begin, again_base), (again_end, _) = self.again
        kept = (base, again_base, self.kept_bytes)
        return (begin, end, again_begin, again_end, *kept, *away, self.input_bytes)


class Tiles:
    """In how many pieces MLPs run: a number that "auto" may raise between steps."""

    def __init__(self) -> None:
        self.number = 1

    @contextmanager
    def at(self, number: int) -> Iterator[None]:
        """In it MLPs run in that many: a second forward runs in those of the first."""
        before, self.number = self.number, number
        try:
            yield
        finally:
            self.number = before


class Decisions(Protocol):
    """Decides at each forward of a block."""

    tiles: Tiles

    def recomputes(self, block: int) -> bool:
        """Whether backward runs the block again, as far as was decided."""
        ...

    def decide(self, block: int, inputs: Iterable[Any]) -> Decided:
        """Returns the decision for the activations of a forward of a block with such inputs."""
        ...

    def offloading(self) -> AbstractContextManager[None]:
        """In which a forward of a block runs that was decided to be offloaded."""
        ...

    @property
    def may_run_again(self) -> bool:
        """Whether a block that was to be kept may be recomputed when its forward has begun."""
        ...

    def fell_short(self, tier: str) -> None:
        """A block that was to be kept or offloaded has found no room in a tier: is recomputed."""
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
        run = BlockRun(block, self._now)
        self._runs.append(run)
        return run

    def _now(self) -> tuple[int, int]:
        moments, nonmodel_bytes = self._moment()
        return moments, nonmodel_bytes - sum(run.held_bytes for run in self._runs)

    def take(self) -> list[BlockRun]:
        """The passes that backward came to; the next step's follow.

        Returns:
            None of them where a forward has failed: the step shows more than a step takes.
        """
        runs, self._runs = self._runs, []
        if any(run.failed for run in runs):
            return []
        return [run for run in runs if run.complete]


def without_copies(events: Events, runs: Iterable[BlockRun]) -> Events:
    """A profile's events as they are without the copies of outputs, for as long as these stand."""
    found = list(events)
    for run in runs:
        if run.copied_bytes:
            for i in range(run.forward[1][0], run.again[1][0] - 1):
                kind, number, nonmodel_bytes, time_ns = found[i]
                found[i] = (kind, number, nonmodel_bytes - run.copied_bytes, time_ns)
    return found


@dataclass(frozen=True)
class Link:
    """The link that offloaded activations cross."""

    bytes_per_second: float
    """In each direction."""
    beside: bool
    """Whether copies run beside the compute; else it waits for them."""
    host_room: float = math.inf
    """Bytes of activations that have room in host memory; what has none goes on to NVMe."""
    nvme_bytes_per_second: float = 1e9
    """Bandwidth of NVMe, which a step waits for."""


@dataclass(frozen=True)
class Spans:
    """Arguments of _C.keep_activations for a decision."""

    spans: list[Span]
    seconds: list[float]
    """Seconds of computing by event, with the waits for the link."""
    host_bytes: int
    """Most bytes of activations that are in host memory at once."""
    nvme_bytes: int = 0
    """... on NVMe."""


def spans_of(
    runs: Sequence[BlockRun], decisions: Sequence[Decided], link: Link, seconds: list[float]
) -> Spans:
    """The spans of decisions.

    Args:
        runs: Of a profile.
        decisions: Of each block, by number.
        link: What offloaded activations go over.
        seconds: Of computing, by moment of the profile.

    Returns:
        As ActivationOffload has it: a block's activations leave when the next offloaded one begins,
        and where copies run beside the compute, they are gone when the one after it begins, and
        back when backward comes to the next one. What the host has no room for is waited for, and
        returns when backward asks.
    """
    spans = [run.span() for run in runs if decisions[run.block] == "keep"]
    moved = sorted(
        (run for run in runs if decisions[run.block] == "offload"), key=lambda r: r.forward[0]
    )
    if not moved:
        return Spans(spans, seconds, 0)
    runs_on = list(seconds)  # without the second forwards that there will not be
    for run in runs:
        if decisions[run.block] != "recompute":
            begin, end = run.again[0][0], max(run.again[1][0] - 1, run.again[0][0])
            runs_on[begin:end] = [0.0] * (end - begin)
    seconds, host_bytes, nvme_bytes = list(seconds), 0, 0
    lag = 2 if link.beside else 1
    for i, run in enumerate(moved):
        back = max(run.again[0][0] - 1, 0)  # that moment asks for the second forward
        leaves = moved[i + lag].forward[0][0] if i + lag < len(moved) else back
        if leaves >= back:  # the last ones of a pass stay
            spans.append(run.span())
            continue
        num_bytes = run.kept_bytes + run.input_bytes
        on_host = host_bytes + num_bytes <= link.host_room
        if on_host:
            host_bytes += num_bytes
        else:
            nvme_bytes += num_bytes
        speed = link.bytes_per_second
        out = into = num_bytes / (speed if on_host else min(speed, link.nvme_bytes_per_second))
        returns = back
        if link.beside and on_host:
            ahead = moved[i + 1]
            begins = max(ahead.again[0][0] - 1, 0)
            returns = min(begins, back)
            out = max(0.0, out - sum(runs_on[ahead.forward[0][0] : leaves]))
            into = max(0.0, into - sum(runs_on[begins:back]))
        seconds[leaves] += out
        seconds[back] += into
        spans.append(run.span((leaves, max(returns, leaves))))
    return Spans(spans, seconds, host_bytes, nvme_bytes)
