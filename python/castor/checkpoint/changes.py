"""The changes that a conversion makes to a checkpoint: tied keys, and the dtype of weights."""

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
    """Returns the contents with more keys tied to weights.

    Args:
        contents: Checkpoint, which may have a tensor under both keys.
        pairs: Ties as "KEY=OTHER", where OTHER is the key of a weight.

    Raises:
        CheckpointError: There is no weight OTHER, or KEY and OTHER are two different tensors.
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
    """Returns the tensor, computed if it has to be."""
    return tensor if isinstance(tensor, torch.Tensor) else tensor.compute()


def in_dtype(contents: Contents, dtype: torch.dtype, source: Path) -> Contents:
    """Returns the contents with floating-point weights in another dtype, as module.to(dtype) does.

    With a 16-bit dtype, float32 weights stay float32 if most weights, by elements, are 16-bit: such
    a model keeps them in float32 on purpose. Masters are the exact values of weights:

    - Weights that become float32 take their masters' values, and the masters are dropped.
    - 16-bit weights keep their masters in the optimizer's states. Float32 weights that are rounded
      become masters there.

    Weights are rounded as optimizer updates round.

    Args:
        contents: Checkpoint to change.
        dtype: New dtype of the weights.
        source: Path of the checkpoint, for errors.

    Raises:
        CheckpointError: A weight has an 8-bit dtype, or a master has no weight.
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
    """Returns the keys of float32 weights in a mostly 16-bit model; empty for any other model."""
    floats = [tensor for tensor in weights.values() if tensor.dtype.is_floating_point]
    halves = sum(math.prod(tensor.shape) for tensor in floats if tensor.dtype.itemsize == 2)
    if 2 * halves <= sum(math.prod(tensor.shape) for tensor in floats):
        return set()
    return {key for key, tensor in weights.items() if tensor.dtype == torch.float32}


def by_parameter(state: OptimizerState) -> dict[str, dict[str, SavedTensor]]:
    """Returns an optimizer's tensors by parameter and entry."""
    found: dict[str, dict[str, SavedTensor]] = {}
    for key, tensor in state.tensors.items():
        name, _, entry = key.rpartition(".")
        found.setdefault(name, {})[entry] = tensor
    return found


def _with_masters(
    state: OptimizerState, contents: Contents, exact: dict[str, SavedTensor], dtype: torch.dtype
) -> OptimizerState:
    """Returns the states with masters for the parameters whose weights are not float32.

    Args:
        state: State of an optimizer.
        contents: Checkpoint with the converted weights.
        exact: The most exact values of each weight: its master, or the weight before conversion.
        dtype: Dtype for parameters that are no weights of the checkpoint.
    """
    tensors: dict[str, SavedTensor] = {}
    groups = state.description["groups"]
    rule = rule_like([decode(group["options"]) for group in groups])
    stateless = rule is not None and not rule.entries  # its parameters have masters all the same
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
    """Checks that states fit the model's parameters: names given for positions may be wrong.

    Raises:
        CheckpointError: A state has no weight, or another shape than its weight.
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
