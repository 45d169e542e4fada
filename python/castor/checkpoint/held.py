"""Weights and states of boosted models, as saves read them.

They are read past all that guards them, in the memory that the session keeps them in: an operator
of torch would wait for updates, which may wait for the save.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from castor.checkpoint.container import ComputedTensor
from castor.runtime.engine import Engine

Part = tuple[int, torch.Tensor]
"""What a rank keeps of a tensor: where it begins, in elements in row-major order, and those."""


@dataclass(frozen=True, kw_only=True)
class HeldTensor(ComputedTensor):
    """Weights or states of a boosted model's parameter."""

    engine: Engine
    index: int
    """Of the parameter."""
    part: Callable[[], Part]
    """Makes this rank's, without asking others."""


def held(
    engine: Engine,
    index: int,
    compute: Callable[[], torch.Tensor],
    part: Callable[[], Part],
    *,
    dtype: torch.dtype = torch.float32,
    shape: Sequence[int] | None = None,
) -> HeldTensor:
    """What is made of parameter `index`; `shape`: None for the parameter's."""
    shape = engine.params[index].shape if shape is None else shape
    return HeldTensor(
        dtype=dtype, shape=tuple(shape), compute=compute, part=part, engine=engine, index=index
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
    )


def part_of_weights(engine: Engine, index: int) -> Part:
    """Of the parameter's memory, whose order is that of its elements."""
    first, numel = engine.session.saved_piece(index)
    weights = engine.session.saved_weights(index)
    return first, weights.as_strided((numel,), (1,), weights.storage_offset() + first)
