"""Whole tensors of models of which each rank has parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from castor.checkpoint.container import ComputedTensor, SavedTensor
from castor.runtime.engine import Engine
from castor.runtime.model_parts import ModelParts


def in_whole(
    engine: Engine,
    tensors: Mapping[str, SavedTensor],
    param_of: Callable[[str], torch.Tensor | None],
    kind: str,
) -> dict[str, SavedTensor]:
    """What a save writes: where this rank has a part, the whole, made when its turn comes.

    Args:
        engine: Of the model.
        tensors: This rank's, by key.
        param_of: The parameter that a key's tensor belongs to, if any.
        kind: "model" or "optimizer": in which the other ranks look the key up.
    """
    parts = engine.parts
    saved = dict(tensors)
    if parts is None:
        return saved
    for key, tensor in tensors.items():
        param = param_of(key)
        shape = None if param is None else parts.whole_shape(param)
        # Step counts have a shape of their own, and are the same on every rank.
        if param is None or shape is None or tuple(tensor.shape) != tuple(param.shape):
            continue
        compute = partial(_whole, parts, f"{kind}:{key}", param, tensor)
        saved[key] = ComputedTensor(dtype=tensor.dtype, shape=shape, compute=compute)
    return saved


def _whole(parts: ModelParts, key: str, param: torch.Tensor, tensor: SavedTensor) -> torch.Tensor:
    return parts.whole(key, param, values_of(tensor))


def values_of(tensor: SavedTensor) -> torch.Tensor:
    """In memory of the host."""
    if isinstance(tensor, ComputedTensor):
        return tensor.compute()
    return tensor.detach().cpu()


def whole_shape(engines: list[Engine], tensor: torch.Tensor) -> tuple[int, ...]:
    """Of a parameter or a buffer, whatever part of it this rank has."""
    for engine in engines:
        if engine.parts and (shape := engine.parts.whole_shape(tensor)) is not None:
            return shape
    return tuple(tensor.shape)


def own_part(engine: Engine, param: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """What this rank keeps of a tensor of the parameter's whole shape; any other as it is."""
    parts = engine.parts
    shape = parts.whole_shape(param) if parts else None
    if parts is None or shape is None or tuple(whole.shape) != shape:
        return whole
    return parts.own(param, whole)
