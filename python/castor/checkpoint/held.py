"""Weights and states of boosted models, as saves read them.

They are read past all that guards them, in the memory that the session keeps them in: an operator
of torch would wait for updates, which may wait for the save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from castor.checkpoint.container import ComputedTensor
from castor.checkpoint.tensor_bytes import pieces
from castor.runtime.engine import Engine
from castor.runtime.model_parts import Runs, Segments

Part = tuple[int, torch.Tensor]
"""A rank's shard of a tensor: its begin, in elements in memory order, and the elements."""


@dataclass(frozen=True, kw_only=True)
class HeldTensor(ComputedTensor):
    """Weights or states of a boosted model's parameter."""

    engine: Engine
    index: int
    """Index of the parameter."""
    part: Callable[[], Part]
    """Makes what this rank keeps of its tensor, without asking others."""
    runs: Runs | Segments | None = None
    """Place of its tensor in the one that is saved; None: they are one."""
    states: bool = True
    """Whether it is made of the optimizer's states; else of weights alone."""
    in_order_of_memory: bool = False
    """Whether its elements are of the parameter's memory, as scales are of blocks of it."""

    def own(self) -> Iterator[tuple[int, memoryview]]:
        """(byte of this rank's tensor, bytes that are there) of what it writes, in row-major order.

        A piece is valid until the next one is asked for.
        """
        for first, part in self._in_row_major(*self.part()):
            at = first * self.element_size()
            for piece in pieces(part):
                yield at, piece
                at += len(piece)

    def _in_row_major(self, first: int, part: torch.Tensor) -> Iterator[Part]:
        """A part of memory, in runs of the parameter's elements in row-major order."""
        param = self.engine.params[self.index]
        if self.engine.ranks is None or param.is_contiguous() or self.in_order_of_memory:
            yield first, part
            return
        numbers = torch.empty_strided(param.shape, param.stride(), dtype=torch.int64)
        numbers.copy_(torch.arange(param.numel()).view(param.shape))
        own, order = numbers.as_strided((part.numel(),), (1,), first).sort()
        ends = ((own.diff() != 1).nonzero().flatten() + 1).tolist()
        runs = part.reshape(-1)[order].tensor_split(ends)
        for begin, run in zip([0, *ends], runs, strict=True):
            if run.numel() > 0:
                yield int(own[begin]), run


def held(
    engine: Engine,
    index: int,
    compute: Callable[[], torch.Tensor],
    part: Callable[[], Part],
    *,
    dtype: torch.dtype = torch.float32,
    shape: Sequence[int] | None = None,
    states: bool = True,
) -> HeldTensor:
    """Makes a tensor that is computed of parameter `index`.

    Args:
        engine: Whose parameter it is.
        index: Of the parameter.
        compute: Makes all of it; alone a rank keeps that.
        part: Of several ranks: see HeldTensor.
        dtype: Of its elements.
        shape: None for the parameter's; other tensors have the order of its memory.
        states: See HeldTensor.
    """
    return HeldTensor(
        dtype=dtype,
        shape=tuple(engine.params[index].shape if shape is None else shape),
        compute=compute,
        part=(lambda: (0, compute())) if engine.ranks is None else part,
        engine=engine,
        index=index,
        states=states,
        in_order_of_memory=shape is not None,
    )


def held_weights(engine: Engine, param: nn.Parameter) -> HeldTensor:
    """A parameter of the engine, in its working type."""
    index = engine.index_of[param]
    return held(
        engine,
        index,
        partial(engine.session.saved_weights, index),
        partial(part_of_weights, engine, index),
        dtype=param.dtype,
        states=False,
    )


def part_of_weights(engine: Engine, index: int) -> Part:
    """Returns this rank's shard of the parameter's memory, in the order of its elements."""
    first, _ = engine.session.saved_piece(index)
    return first, engine.session.saved_weights_of_piece(index)
