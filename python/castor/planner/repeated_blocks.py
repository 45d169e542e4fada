"""Derives the events of a stage of alike blocks from those of four recorded blocks.

The first three blocks of a stage and the last one run. Each block in between repeats the events of
the third one, with the kept bytes of the blocks before it added. It is checked that the third block
does what the second one does. Gradients are recorded parameter by parameter, and gathered into
chunks afterwards, since a chunk may hold parameters of two blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from castor.config import Precision
from castor.config.event_names import GRAD_READY
from castor.distributed.stages import Place, PlaceholderBlock
from castor.estimate.metatrace import TraceEvent
from castor.estimate.simulator import lay_out
from castor.runtime.spec import ModelSpec

_FEWEST = 5
"""Number of blocks from which on one need not run."""
_SECOND, _THIRD = 1, 2
_SMALLEST_CHUNK = 64
"""Bytes of a chunk that holds one parameter only (kParamAlignment in csrc/core/chunk_layout.h)."""


class NotRepeated(Exception):  # noqa: N818 - an answer: all of them have to run
    """Raised if blocks do not all run alike, one after the other: all of them have to run."""


def repeats(block: nn.Module, later: nn.Module, distance: int) -> bool:
    """Whether two blocks compute the same but for parameter values, judged by their attributes.

    Args:
        block: A block.
        later: Another block.
        distance: Number of blocks from the one to the other. Integer attributes, such as a layer's
            index, may differ by it.
    """
    mine, theirs = list(block.named_modules()), list(later.named_modules())
    return len(mine) == len(theirs) and all(
        name == other and _same_module(one, two, distance)
        for (name, one), (other, two) in zip(mine, theirs, strict=True)
    )


def _same_module(one: nn.Module, two: nn.Module, distance: int) -> bool:
    mine, theirs = vars(one), vars(two)
    return (
        type(one) is type(two)
        and mine.keys() == theirs.keys()
        and all(_same(value, theirs[name], distance) for name, value in mine.items())
    )


def _same(mine: Any, theirs: Any, distance: int) -> bool:
    if type(mine) is not type(theirs):
        return False
    if isinstance(mine, torch.Tensor):
        described = [(of.shape, of.dtype, of.requires_grad) for of in (mine, theirs)]
        return described[0] == described[1]
    if isinstance(mine, dict):  # modules among its values are compared by themselves
        return _same(list(mine.values()), list(theirs.values()), distance)
    if isinstance(mine, list | tuple):
        pairs = zip(mine, theirs, strict=False)
        return len(mine) == len(theirs) and all(_same(*pair, distance) for pair in pairs)
    if isinstance(mine, bool | float | str | torch.dtype):
        return bool(mine == theirs)
    if isinstance(mine, int):
        return bool(mine == theirs or theirs - mine == distance)
    return True


class RepeatedBlocks:
    """Blocks of a stage, whose inner blocks are alike."""

    def __init__(
        self, places: Sequence[Place], spec: ModelSpec, precision: Precision, chunks: Sequence[int]
    ) -> None:
        """Takes the blocks; nothing runs yet.

        Args:
            places: Places of the stage's blocks, in order.
            spec: The model's structure as castor sees it, with all blocks in their places.
            precision: Precision of parameters.
            chunks: The chunk of each parameter in training.

        Raises:
            NotRepeated: Blocks share modules or parameters.
        """
        # The optimizer states are not read: this format and rule allow the smallest chunks.
        self.each = lay_out(spec, precision, "fp32", "adam", chunk_bytes=_SMALLEST_CHUNK)
        """Simulator with a chunk for each parameter."""
        self._skipped = places[_THIRD + 1 : -1]
        self._param_of = {chunk: param for param, chunk in enumerate(self.each.chunks)}
        assert len(self._param_of) == len(spec.params)
        self._chunks = chunks
        module_at = {owner.module: position for position, owner in enumerate(spec.modules)}
        param_at = {param: position for position, param in enumerate(spec.params)}
        self._modules = [_positions(place.module.modules(), module_at) for place in places]
        self._params = [_positions(place.module.parameters(), param_at) for place in places]
        self._block_of: dict[tuple[bool, int], int] = {
            (is_param, position): block
            for is_param, rows in ((False, self._modules), (True, self._params))
            for block, row in enumerate(rows)
            for position in row
        }
        if len(self._block_of) < sum(map(len, (*self._modules, *self._params))):
            raise NotRepeated

    @staticmethod
    def of_stage(places: Sequence[Place], stage: int) -> list[Place]:
        """Returns the places of a stage's blocks; empty if all of them have to run."""
        blocks = [p for p in places if p.stage == stage and type(p.other) is PlaceholderBlock]
        pairs = pairwise(blocks[_SECOND:-1])  # the end blocks may have collectives of their own
        if len(blocks) >= _FEWEST and all(repeats(a.module, b.module, 1) for a, b in pairs):
            return blocks
        return []

    @contextmanager
    def shortened(self) -> Iterator[None]:
        """Replaces the blocks that need not run by placeholders, which return their input."""
        for place in self._skipped:
            place.put(place.other)
        try:
            yield
        finally:
            for place in self._skipped:
                place.put(place.module)

    def full_trace(
        self, trace: Sequence[TraceEvent], forward: int, backward: int
    ) -> tuple[list[TraceEvent], list[int], list[int]]:
        """Returns the events of all blocks.

        Args:
            trace: The recorded events.
            forward: Number of recorded events of the forward.
            backward: Number of recorded events up to the end of the backward, without a deferred
                backward of weights.

        Returns:
            The events, the same two numbers for them, and the bytes to add to those recorded at
            the end of forward and of backward.

        Raises:
            NotRepeated: The third block does not do what the second one does.
        """
        told = _Told(self._chunks)
        ends: list[int] = []
        beside: list[int] = []
        left = 0
        for begin, end in ((0, forward), (forward, backward), (backward, len(trace))):
            part = trace[begin:end]
            third = self._third(part)
            extra = len(self._skipped) * (third.of_each if third else 0)
            if begin == backward > forward and part:
                # Bytes that only the gradients of inputs needed go when all of these are there.
                # The others go block by block, in the backward of weights.
                left = beside[-1] = -extra
            self._tell_part(part, third, left, told)
            left += extra
            ends.append(len(told.trace))
            beside.append(left)
        return told.trace, ends[:2], beside[:2]

    def _third(self, part: Sequence[TraceEvent]) -> _Third | None:
        """Returns the third block's events in a part of a pass; None: no block runs in it."""
        blocks = [self._block(event) for event in part]
        runs = [b for i, b in enumerate(blocks) if b is not None and blocks[i - 1 : i] != [b]]
        if not runs:
            return None
        last = len(self._modules) - 1
        in_order = [0, _SECOND, _THIRD, last]
        if runs not in (in_order, in_order[::-1]):
            raise NotRepeated
        begins = [blocks.index(block) for block in runs]
        of_runs = {block: range(*ends) for block, ends in zip(runs, pairwise(begins), strict=False)}
        _, of_each, again = (
            part[later].live_bytes - part[begin].live_bytes for begin, later in pairwise(begins)
        )
        second, third = of_runs[_SECOND], of_runs[_THIRD]
        forward = runs == in_order
        if not (
            of_each == again
            and all(blocks[i] == _THIRD for i in third)
            and self._same(
                [part[i] for i in second],
                [part[i] for i in third],
                of_each if forward else -of_each,
            )
        ):
            raise NotRepeated
        order = list(range(_THIRD, last))[:: 1 if forward else -1]
        return _Third(begin=third.start, end=third.stop, of_each=of_each, order=order)

    def _same(self, second: Sequence[TraceEvent], third: Sequence[TraceEvent], beside: int) -> bool:
        """Whether two blocks have the same events, the third with `beside` more bytes alive."""
        described = (
            [
                (one.kind, self._in(block, one), one.nonmodel_bytes - bytes_, one.work, one.sent)
                for one in trace
            ]
            for block, trace, bytes_ in ((_SECOND, second, 0), (_THIRD, third, beside))
        )
        return next(described) == next(described)

    def _tell_part(
        self, part: Sequence[TraceEvent], third: _Third | None, beside: int, told: _Told
    ) -> None:
        begin, end = (third.begin, third.end) if third else (len(part), len(part))
        for event in part[:begin]:
            self._tell(event, None, beside, told)
        if third is None:
            return
        for copy, block in enumerate(third.order):
            for event in part[begin:end]:
                self._tell(event, block, beside + copy * third.of_each, told)
        for event in part[end:]:
            self._tell(event, None, beside + len(self._skipped) * third.of_each, told)

    def _block(self, event: TraceEvent) -> int | None:
        return self._block_of.get((event.kind == GRAD_READY, self._at(event)))

    def _at(self, event: TraceEvent) -> int:
        """Returns the position of the module or the parameter of an event."""
        return self._param_of[event.position] if event.kind == GRAD_READY else event.position

    def _in(self, block: int, event: TraceEvent) -> int | None:
        """Returns an event's number among a block's own; None: it is another block's event."""
        row = (self._params if event.kind == GRAD_READY else self._modules)[block]
        return row.index(self._at(event)) if self._at(event) in row else None

    def _tell(self, event: TraceEvent, block: int | None, beside: int, told: _Told) -> None:
        """Adds a recorded event; with `block`, an event of the third block as one of that block."""
        is_param = event.kind == GRAD_READY
        at = self._at(event)
        if block is not None:
            of_third = self._in(_THIRD, event)
            assert of_third is not None
            at = (self._params if is_param else self._modules)[block][of_third]
        again = TraceEvent(
            event.kind, at, event.nonmodel_bytes + beside, event.live_bytes + beside,
            event.work, event.sent,
        )  # fmt: skip
        (told.gradient if is_param else told.trace.append)(again)


@dataclass(frozen=True, kw_only=True)
class _Third:
    """Events of the third block in a part of a pass."""

    begin: int
    """Number of its first event."""
    end: int
    """Number behind its last event."""
    of_each: int
    """Bytes that a block adds; below 0: that it frees."""
    order: list[int]
    """Blocks that have the third one's events, in the order in which they run."""


class _Told:
    """Events as in training: a gradient event for each chunk whose gradients are complete."""

    def __init__(self, chunks: Sequence[int]) -> None:
        self.trace: list[TraceEvent] = []
        self._chunks = chunks
        self._params: dict[int, set[int]] = {}
        for param, chunk in enumerate(chunks):
            self._params.setdefault(chunk, set()).add(param)
        self._missing = {chunk: set(params) for chunk, params in self._params.items()}

    def gradient(self, event: TraceEvent) -> None:
        """Adds the event of a parameter's gradient; merges it unless it completes the chunk."""
        chunk = self._chunks[event.position]
        missing = self._missing[chunk]
        missing.discard(event.position)
        if not missing:
            missing |= self._params[chunk]
            event.position = chunk
            self.trace.append(event)
        elif self.trace:
            before = self.trace[-1]
            before.nonmodel_bytes = max(before.nonmodel_bytes, event.nonmodel_bytes)
            before.work = [*before.work, *event.work]
            before.sent = [*before.sent, *event.sent]


def _positions(of: Any, known: dict[Any, int]) -> list[int]:
    return [known[one] for one in of if one in known]
