"""Whole tensors of models of which each rank has parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from castor import _C
from castor.checkpoint.container import ComputedTensor, SavedTensor
from castor.runtime import shards
from castor.runtime.engine import Engine
from castor.runtime.model_parts import Described, ModelParts


def model_in_whole(
    engine: Engine,
    tensors: Mapping[str, SavedTensor],
    param_of: Callable[[str], torch.Tensor | None],
) -> dict[str, SavedTensor]:
    """What a save writes: where this rank has a part or nothing, the whole, made in its turn.

    Args:
        engine: Of the model.
        tensors: This rank's, by key.
        param_of: The parameter of a key, if it is one.

    Returns:
        In the order of a model in one process; under all keys of what is tied.
    """
    parts = engine.parts
    if parts is None:
        return dict(tensors)
    own = _cut_in_whole(parts, tensors, param_of, "model")
    if parts.whole_model is None:
        return own
    found = own | _of_others(parts, parts.described("model"), "model")
    return {key: found[key] for key in parts.whole_model.tensors if key in found}


def optimizer_in_whole(
    engine: Engine,
    tensors: Mapping[str, SavedTensor],
    numbers: Mapping[str, dict[str, Any]],
    groups: Sequence[Sequence[str]],
    param_of: Callable[[str], torch.Tensor | None],
) -> tuple[dict[str, SavedTensor], dict[str, dict[str, Any]], Sequence[Sequence[str]]]:
    """As model_in_whole, of (tensors, other entries of the state, names by group)."""
    parts = engine.parts
    if parts is None:
        return dict(tensors), dict(numbers), groups
    own = _cut_in_whole(parts, tensors, param_of, "optimizer")
    if parts.whole_model is None:
        return own, dict(numbers), groups
    described = parts.described("optimizer")
    # What two ranks have is the first's, under the name that both know.
    found = _of_others(parts, described, "optimizer") | own
    others = {name: entry for rank in described for name, entry in rank.numbers.items()}
    others |= numbers
    groups = parts.whole_model.groups
    names = [name for group in groups for name in group]
    place = {name: i for i, name in enumerate(names)}
    keys = sorted(found, key=lambda key: place[key.rpartition(".")[0]])
    return (
        {key: found[key] for key in keys},
        {name: others[name] for name in names if name in others},
        groups,
    )


def shards_in_whole(
    model: nn.Module | None, tensors: Mapping[str, SavedTensor], kind: str
) -> dict[str, SavedTensor]:
    """As model_in_whole, where torch divides tensors; `kind`: where other ranks look keys up."""
    saved = dict(tensors)
    for key, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            compute = partial(shards.whole, model, f"{kind}:{key}", tensor)
            saved[key] = ComputedTensor(
                dtype=tensor.dtype, shape=tuple(tensor.shape), compute=compute
            )
    return saved


def _cut_in_whole(
    parts: ModelParts,
    tensors: Mapping[str, SavedTensor],
    param_of: Callable[[str], torch.Tensor | None],
    kind: str,
) -> dict[str, SavedTensor]:
    """Of what this rank has a part of, the whole; `kind`: where other ranks look keys up."""
    saved = dict(tensors)
    for key, tensor in tensors.items():
        param = param_of(key)
        shape = None if param is None else parts.whole_shape(param)
        if param is None or shape is None:
            continue
        if tuple(tensor.shape) != tuple(param.shape):
            if not of_blocks(kind, key):
                continue  # step counts are the same on every rank
            shape = shape_of_scales(shape)
        compute = partial(_whole, parts, f"{kind}:{key}", param, tensor)
        saved[key] = ComputedTensor(dtype=tensor.dtype, shape=shape, compute=compute)
    return saved


def of_blocks(kind: str, key: str) -> bool:
    """Whether a tensor has a row for each block of its parameter's moments."""
    return kind == "optimizer" and key.rpartition(".")[2] == "scales"


def shape_of_scales(shape: Sequence[int]) -> tuple[int, ...]:
    """Of the scales that moments of a shape have where they are rounded in blocks."""
    return -(-math.prod(shape) // _C.MOMENT_BLOCK), 2


def _of_others(
    parts: ModelParts, described: Sequence[Described], kind: str
) -> dict[str, SavedTensor]:
    """What ranks with other layers have, from rank 1 on."""
    found: dict[str, SavedTensor] = {}
    for rank, of_rank in enumerate(described, start=1):
        for key, (dtype, shape) in of_rank.tensors.items():
            like = torch.empty(shape, dtype=dtype, device="meta")
            compute = partial(parts.fetch, f"{kind}:{key}", rank, like)
            found.setdefault(key, ComputedTensor(dtype=dtype, shape=shape, compute=compute))
    return found


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
    """What this rank keeps of a tensor of the whole parameter, or of its blocks; else all."""
    parts = engine.parts
    shape = parts.whole_shape(param) if parts else None
    if parts is None or shape is None:
        return whole
    divided = tuple(whole.shape) in (shape, shape_of_scales(shape))
    return parts.own(param, whole) if divided else whole


def names_in_whole(engine: Engine) -> list[str]:
    """Names of the engine's parameters, as all of the model has them."""
    whole = engine.parts.whole_model if engine.parts else None
    return engine.names if whole is None else [whole.first_key(name) for name in engine.names]


def own_targets(
    engine: Engine, targets: dict[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, tuple[int, tuple[int, ...]]]]:
    """(what this rank has by all its keys in the whole model, the tensors of others there).

    Args:
        engine: Of the model.
        targets: What this rank has by its own keys.
    """
    whole = engine.parts.whole_model if engine.parts else None
    if whole is None:
        return targets, {}
    own = {key: targets[own_key] for key, own_key in whole.keys_like(targets).items()}
    return own, {key: tensor for key, tensor in whole.tensors.items() if key not in own}


def names_of_others(engine: Engine) -> set[str]:
    """Of parameters that the optimizer of the whole model trains, those that other ranks have."""
    whole = engine.parts.whole_model if engine.parts else None
    if whole is None:
        return set()
    return {name for group in whole.groups for name in group}.difference(names_in_whole(engine))
