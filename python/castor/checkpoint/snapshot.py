"""Weights and states of boosted models, as saves read them.

A save reads the session's memory directly, past the guards of torch's operators. An operator would
wait for updates, and these may wait for the save.
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
from castor.runtime.model_shards import Runs, Segments

Shard = tuple[int, torch.Tensor]
"""A rank's shard of a tensor: (index of its first element in memory order, its elements)."""


@dataclass(frozen=True, kw_only=True)
class SnapshotTensor(ComputedTensor):
    """Weights or states of a boosted model's parameter."""

    engine: Engine
    index: int
    """Index of the parameter."""
    shard: Callable[[], Shard]
    """Function that makes this rank's shard of the tensor, without communication."""
    runs: Runs | Segments | None = None
    """Place of this rank's tensor in the full tensor that is saved; None: they are the same."""
    states: bool = True
    """Whether the tensor is made of optimizer states; if not, of weights alone."""
    in_order_of_memory: bool = False
    """Whether the elements follow the parameter's memory, as scales of its blocks do, instead of
    row-major order."""

    def own(self) -> Iterator[tuple[int, memoryview]]:
        """Yields (offset in bytes, bytes) of what this rank writes, in row-major order.

        Offsets count from the beginning of this rank's tensor. A piece is valid until the next one
        is asked for.
        """
        for first, shard in self._in_row_major(*self.shard()):
            at = first * self.element_size()
            for piece in pieces(shard):
                yield at, piece
                at += len(piece)

    def _in_row_major(self, first: int, shard: torch.Tensor) -> Iterator[Shard]:
        """Yields a shard in memory order as runs of elements in row-major order."""
        param = self.engine.params[self.index]
        if self.engine.ranks is None or param.is_contiguous() or self.in_order_of_memory:
            yield first, shard
            return
        numbers = torch.empty_strided(param.shape, param.stride(), dtype=torch.int64)
        numbers.copy_(torch.arange(param.numel()).view(param.shape))
        own, order = numbers.as_strided((shard.numel(),), (1,), first).sort()
        ends = ((own.diff() != 1).nonzero().flatten() + 1).tolist()
        runs = shard.reshape(-1)[order].tensor_split(ends)
        for begin, run in zip([0, *ends], runs, strict=True):
            if run.numel() > 0:
                yield int(own[begin]), run


def snapshot(
    engine: Engine,
    index: int,
    compute: Callable[[], torch.Tensor],
    shard: Callable[[], Shard],
    *,
    dtype: torch.dtype = torch.float32,
    shape: Sequence[int] | None = None,
    states: bool = True,
) -> SnapshotTensor:
    """Makes a tensor that is computed from one of the engine's parameters or its states.

    Args:
        engine: Engine of the parameter.
        index: Index of the parameter.
        compute: Makes the full tensor, which a process without other ranks writes.
        shard: Makes this rank's shard, where there are several ranks: see SnapshotTensor.
        dtype: Type of the elements.
        shape: Shape of the tensor, whose elements then follow the parameter's memory; None: the
            parameter's shape.
        states: See SnapshotTensor.
    """
    return SnapshotTensor(
        dtype=dtype,
        shape=tuple(engine.params[index].shape if shape is None else shape),
        compute=compute,
        shard=(lambda: (0, compute())) if engine.ranks is None else shard,
        engine=engine,
        index=index,
        states=states,
        in_order_of_memory=shape is not None,
    )


def snapshot_weights(engine: Engine, param: nn.Parameter) -> SnapshotTensor:
    """Returns a parameter's weights in their working dtype, read when they are written."""
    index = engine.index_of[param]
    return snapshot(
        engine,
        index,
        partial(engine.session.saved_weights, index),
        partial(shard_of_weights, engine, index),
        dtype=param.dtype,
        states=False,
    )


def shard_of_weights(engine: Engine, index: int) -> Shard:
    """Returns this rank's shard of the parameter's weights, in memory order."""
    first, _ = engine.session.saved_piece(index)
    return first, engine.session.saved_weights_of_piece(index)
