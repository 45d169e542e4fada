"""Profiles each block in a step that recomputes, and predicts other decisions."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

Decided = Literal["keep", "recompute", "offload"]
StepPosition = Callable[[], tuple[int, int]]
"""Function that returns the number of events of the step so far, and the non-model bytes now."""


Events = list[tuple[int, int, int, int]]
"""Events of a step, as _C takes them: kind, module or chunk, non-model bytes, nanoseconds."""
Span = tuple[int, int, int, int, int, int, int, int, int, int]
"""Argument of _C.keep_activations for one pass through a block; see BlockRun.span."""


@dataclass
class BlockRun:
    """One pass through a block: its first forward, and the second one that backward runs.

    The first of several second forwards counts. A later one belongs to another backward pass over
    the same graph.
    """

    block: int
    """Number of the block, in the model's order."""
    position: StepPosition
    """Function that tells the current event and non-model bytes."""
    forward: list[tuple[int, int]] = field(default_factory=list)
    """Event numbers and non-model bytes at which the first forward began and ended."""
    again: list[tuple[int, int]] = field(default_factory=list)
    """Event numbers and non-model bytes at which the second forward began and ended."""
    input_bytes: int = 0
    """Bytes of the first forward's inputs that backward needs again."""
    copies: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    """Copies of the block's outputs, made to compare those of its two forwards once."""
    copied_bytes: int = 0
    """Bytes of the copies at the time they were made."""
    failed: bool = False
    """Whether one of the forwards has raised an exception."""

    def copied(self, tensors: Sequence[torch.Tensor]) -> None:
        """Notes the copies of the block's outputs."""
        self.copies = [weakref.ref(tensor) for tensor in tensors]
        self.copied_bytes = self.held_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of the copies that still exist; a pass that is never completed drops them too."""
        return sum(tensor.nbytes for ref in self.copies if (tensor := ref()) is not None)

    def begin(self, *, again: bool) -> None:
        """Notes the begin of the first forward, or of the second one (`again`)."""
        if again and not self.again:
            self.again.append(self.position())
        elif not again:
            self.forward.append(self.position())

    def end(self, *, again: bool) -> None:
        """Notes the end of the first forward, or of the second one, which may stop early."""
        if again and len(self.again) == 1:
            self.again.append(self.position())
        elif not again:
            self.forward.append(self.position())

    @property
    def complete(self) -> bool:
        """Whether backward has run the second forward."""
        return len(self.forward) == len(self.again) == 2

    @property
    def kept_bytes(self) -> int:
        """Bytes that the second forward left for backward."""
        return max(0, self.again[1][1] - self.again[0][1])

    def second_forward(self) -> slice:
        """Returns the events whose computing the step is spared where the block is not recomputed.

        What follows the last event of the second forward belongs to backward.
        """
        begin = self.again[0][0]
        return slice(begin, max(self.again[1][0] - 1, begin))

    def span(self, away: tuple[int, int] = (0, 0)) -> Span:
        """Returns the span for _C.keep_activations: a kept block, but offloaded during `away`."""
        (begin, base), (end, _) = self.forward
        (again_begin, again_base), (again_end, _) = self.again
        kept = (base, again_base, self.kept_bytes)
        return (begin, end, again_begin, again_end, *kept, *away, self.input_bytes)


class Tiles:
    """Number of pieces that MLPs run in, which "auto" may raise between steps."""

    def __init__(self) -> None:
        self.number = 1

    @contextmanager
    def at(self, number: int) -> Iterator[None]:
        """Has MLPs run in `number` pieces: a second forward runs in those of the first one."""
        before, self.number = self.number, number
        try:
            yield
        finally:
            self.number = before


class Decisions(Protocol):
    """Policy that decides at each forward of a block."""

    tiles: Tiles
    """Number of pieces that MLPs run in."""

    def recomputes(self, block: int) -> bool:
        """Whether the current decision for a block is to recompute it."""
        ...

    def decide(self, block: int, inputs: Iterable[Any]) -> Decided:
        """Returns the decision for the activations of a forward of a block with such inputs."""
        ...

    def offloading(self) -> AbstractContextManager[None]:
        """Returns the context in which the forward of an offloaded block runs."""
        ...

    @property
    def may_run_again(self) -> bool:
        """Whether a kept block may still be recomputed when its forward has begun."""
        ...

    def fell_short(self, tier: str) -> None:
        """Notes that a kept or offloaded block has found no room in a tier and is recomputed."""
        ...

    def open(self, block: int) -> BlockRun:
        """Opens the profile of a pass through a block that is recomputed."""
        ...


class BlockProfile:
    """Profile of the step under way: its passes through blocks."""

    def __init__(self, position: StepPosition) -> None:
        self._position = position
        self._runs: list[BlockRun] = []

    def open(self, block: int) -> BlockRun:
        """Opens the profile of a pass through a block."""
        run = BlockRun(block, self._now)
        self._runs.append(run)
        return run

    def _now(self) -> tuple[int, int]:
        event, nonmodel_bytes = self._position()
        return event, nonmodel_bytes - sum(run.held_bytes for run in self._runs)

    def take(self) -> list[BlockRun]:
        """Returns the passes whose second forward has run, and begins the next step.

        Returns:
            The passes; empty if a forward has failed, since the step then took more than usual.
        """
        runs, self._runs = self._runs, []
        if any(run.failed for run in runs):
            return []
        return [run for run in runs if run.complete]


def without_copies(events: Events, runs: Iterable[BlockRun]) -> Events:
    """Returns a profile's events without the bytes of the copies of outputs."""
    found = list(events)
    for run in runs:
        if run.copied_bytes:
            for i in range(run.forward[1][0], run.again[1][0] - 1):
                kind, number, nonmodel_bytes, time_ns = found[i]
                found[i] = (kind, number, nonmodel_bytes - run.copied_bytes, time_ns)
    return found


@dataclass(frozen=True)
class Link:
    """Link that offloaded activations cross."""

    bytes_per_second: float
    """Bytes per second in each direction."""
    overlapped: bool
    """Whether copies run beside computing; otherwise computing waits for them."""
    host_room: float = math.inf
    """Bytes of activations that host memory has room for; others go to NVMe."""
    nvme_bytes_per_second: float = 1e9
    """Bytes per second of NVMe, which a step waits for."""


@dataclass(frozen=True)
class Spans:
    """Arguments of _C.keep_activations for the decisions on all blocks."""

    spans: list[Span]
    """Spans of the blocks that are kept or offloaded."""
    seconds: list[float]
    """Seconds of computing by event, with the waits for the link."""
    host_bytes: int
    """Peak bytes of activations in host memory."""
    nvme_bytes: int = 0
    """Peak bytes of activations on NVMe."""


def spans_of(
    runs: Sequence[BlockRun], decisions: Sequence[Decided], link: Link, seconds: list[float]
) -> Spans:
    """Returns the spans of blocks that decisions keep or offload.

    Activations move as in ActivationOffload. A block's activations begin to leave when the forward
    of the next offloaded block begins. If copies run beside computing, they have left when the
    offloaded block after that begins, and are back when backward comes to the next offloaded one.
    Activations that go to NVMe are waited for, and return when backward asks for them.

    Args:
        runs: Passes of a profile.
        decisions: Decision on each block, by number.
        link: The link that offloaded activations cross.
        seconds: Seconds of computing, by event of the profile.
    """
    spans = [run.span() for run in runs if decisions[run.block] == "keep"]
    moved = sorted(
        (run for run in runs if decisions[run.block] == "offload"), key=lambda r: r.forward[0]
    )
    if not moved:
        return Spans(spans, seconds, 0)
    runs_on = list(seconds)  # without the second forwards of blocks that are not recomputed
    for run in runs:
        if decisions[run.block] != "recompute":
            again = run.second_forward()
            runs_on[again] = [0.0] * (again.stop - again.start)
    seconds, host_bytes, nvme_bytes = list(seconds), 0, 0
    lag = 2 if link.overlapped else 1
    for i, run in enumerate(moved):
        back = max(run.again[0][0] - 1, 0)  # the event that asks for the second forward
        leaves = moved[i + lag].forward[0][0] if i + lag < len(moved) else back
        if leaves >= back:  # the last blocks of a pass stay on the device
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
        if link.overlapped and on_host:
            ahead = moved[i + 1]
            begins = max(ahead.again[0][0] - 1, 0)
            returns = min(begins, back)
            out = max(0.0, out - sum(runs_on[ahead.forward[0][0] : leaves]))
            into = max(0.0, into - sum(runs_on[begins:back]))
        seconds[leaves] += out
        seconds[back] += into
        spans.append(run.span((leaves, max(returns, leaves))))
    return Spans(spans, seconds, host_bytes, nvme_bytes)
