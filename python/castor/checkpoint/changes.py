"""The changes of a conversion to a checkpoint: tied keys, and the type of its weights."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from castor import _C
from castor.checkpoint.container import ComputedTensor, SavedTensor
from castor.checkpoint.contents import Contents
from castor.checkpoint.optimizer import OptimizerState
from castor.checkpoint.tensor_bytes import pieces
from castor.checkpoint.values import decode
from castor.errors import CheckpointError
from castor.runtime.rules import TENSORS, rule_like


def with_ties(contents: Contents, pairs: Iterable[str]) -> Contents:
    """More keys of the state_dict for a tensor.

    Args:
        contents: May have the tensor under both keys.
        pairs: "KEY=OTHER", where OTHER is the key of a weight.

    Raises:
        CheckpointError: There is no such weight, or they are two tensors.
    """
    weights, tied = dict(contents.weights), dict(contents.tied)
    for pair in pairs:
        alias, _, key = pair.partition("=")
        if key not in weights or not alias or alias == key:
            raise CheckpointError(
                f"--tie {pair}: give KEY=OTHER, where OTHER is a weight of the source"
                + ("" if key in weights else f"; it has no '{key}'")
            )
        own = weights.pop(alias, None)
        if own is not None and not _same(own, weights[key]):
            raise CheckpointError(
                f"--tie {pair}: '{alias}' and '{key}' differ in the source; they are two tensors"
            )
        tied[alias] = key
    return replace(contents, weights=weights, tied=tied)


def _same(a: SavedTensor, b: SavedTensor) -> bool:
    if a.dtype != b.dtype or tuple(a.shape) != tuple(b.shape):
        return False
    pairs = zip(pieces(values(a)), pieces(values(b)), strict=True)
    return all(mine == theirs for mine, theirs in pairs)


def values(tensor: SavedTensor) -> torch.Tensor:
    """The tensor, computed if it has to be."""
    return tensor if isinstance(tensor, torch.Tensor) else tensor.compute()


def in_dtype(contents: Contents, dtype: torch.dtype, source: Path) -> Contents:
    """Weights in another type, all that are floating point, as module.to(dtype) does.

    In 16 bits float32 weights stay as they are where most weights, by elements, are 16-bit: a model
    of them keeps these in float32. Masters are float32 weights: they become these, or stay in the
    states of 16-bit ones, where float32 weights that are rounded become masters. Rounding is that
    of the update.

    Raises:
        CheckpointError: Weights are of 8 bits, or a master has no weight.
    """
    weights, exact = dict(contents.weights), dict(contents.weights)
    for key, tensor in weights.items():
        if tensor.dtype.is_floating_point and tensor.element_size() == 1:
            raise CheckpointError(
                f"'{key}' of {source} is {tensor.dtype}: quantised weights mean what their scales "
                "say, and no other type is made of them; leave --dtype out"
            )
    for state in contents.optimizers:
        for name, entries in by_parameter(state).items():
            if "master" in entries:
                weight = contents.weight(name)
                if weight is None:
                    raise CheckpointError(f"{source} has a master of '{name}', which is no weight")
                exact[weight] = entries["master"]
    kept = set() if dtype == torch.float32 else _islands(weights)
    for key, tensor in exact.items():
        if tensor.dtype.is_floating_point and weights[key].dtype != dtype and key not in kept:
            weights[key] = _cast(tensor, dtype)
    converted = replace(contents, weights=weights)
    states = [_with_masters(state, converted, exact, dtype) for state in contents.optimizers]
    return replace(converted, optimizers=states)


def _islands(weights: dict[str, SavedTensor]) -> set[str]:
    """The float32 weights of a model that is mostly 16-bit."""
    floats = [tensor for tensor in weights.values() if tensor.dtype.is_floating_point]
    halves = sum(math.prod(tensor.shape) for tensor in floats if tensor.dtype.itemsize == 2)
    if 2 * halves <= sum(math.prod(tensor.shape) for tensor in floats):
        return set()
    return {key for key, tensor in weights.items() if tensor.dtype == torch.float32}


def by_parameter(state: OptimizerState) -> dict[str, dict[str, SavedTensor]]:
    """An optimizer's tensors by parameter and entry."""
    found: dict[str, dict[str, SavedTensor]] = {}
    for key, tensor in state.tensors.items():
        name, _, entry = key.rpartition(".")
        found.setdefault(name, {})[entry] = tensor
    return found


def _with_masters(
    state: OptimizerState, contents: Contents, exact: dict[str, SavedTensor], dtype: torch.dtype
) -> OptimizerState:
    """The states with masters where weights of `dtype` are less than those."""
    tensors: dict[str, SavedTensor] = {}
    groups = state.description["groups"]
    rule = rule_like([decode(group["options"]) for group in groups])
    stateless = rule is not None and not rule.entries  # it has masters all the same
    found = by_parameter(state)
    if stateless:
        found = {name: found.get(name, {}) for group in groups for name in group["params"]}
    for name, entries in found.items():
        master = entries.pop("master", None)
        weight = contents.weight(name)
        stepped = stateless or not TENSORS.isdisjoint(entries)
        if master is None and weight is not None and stepped:
            master = exact[weight]
        of_weight = dtype if weight is None else contents.weights[weight].dtype
        if master is not None and master.dtype == torch.float32 != of_weight:
            entries["master"] = master
        tensors |= {f"{name}.{entry}": tensor for entry, tensor in entries.items()}
    return replace(state, tensors=tensors)


def _cast(tensor: SavedTensor, dtype: torch.dtype) -> SavedTensor:
    if tensor.dtype == dtype:
        return tensor

    def compute() -> torch.Tensor:
        exact = values(tensor)
        if exact.dtype != torch.float32:
            return exact.to(dtype)
        rounded = torch.empty(exact.shape, dtype=dtype)
        _C.round_to_param(rounded, exact.contiguous())
        return rounded

    return ComputedTensor(dtype=dtype, shape=tuple(tensor.shape), compute=compute)


def check_states(contents: Contents, source: Path) -> None:
    """States are of the model's parameters: positions may have got wrong names.

    Raises:
        CheckpointError: One is not.
    """
    if not contents.weights:
        return
    for state in contents.optimizers:
        for key, tensor in state.tensors.items():
            name, _, entry = key.rpartition(".")
            if entry not in TENSORS:
                continue
            weight = contents.weight(name)
            shape = None if weight is None else tuple(contents.weights[weight].shape)
            if tuple(tensor.shape) != shape:
                raise CheckpointError(
                    f"the optimizer in {source} has '{entry}' of shape {tuple(tensor.shape)} for "
                    f"'{name}', "
                    + ("which the model lacks" if shape is None else f"whose shape is {shape}")
                    + "; the names are not those of its parameters, in its order"
                )
