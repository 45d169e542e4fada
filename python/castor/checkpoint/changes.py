"""The changes that a conversion makes to a checkpoint: names, tied keys, the dtype of weights."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from castor import _C
from castor.checkpoint.container import ComputedTensor, SavedTensor, pieces, read_headers, values_of
from castor.checkpoint.contents import Contents
from castor.checkpoint.documents import decode
from castor.checkpoint.hub_names import (
    HubNames,
    in_names_of_files,
    keys_of_files,
    transforms_from,
)
from castor.checkpoint.manifest import PART_MANIFEST
from castor.checkpoint.model import kept_keys, weight_files
from castor.checkpoint.model_load import from_files
from castor.checkpoint.optimizer import OptimizerState
from castor.errors import CheckpointError
from castor.lazy import value_of
from castor.runtime.rules import TENSORS, rule_like
from castor.runtime.weight_conversions import FileLayout, file_layout

# --- Names of weights in conversions: the model's own, except in the `hf` layout ------------------

# Weights in the `hf` layout have the names that save_pretrained gives them.

BuildModel = Callable[[Path], nn.Module | None]
"""Function that builds the model of a config.json on the meta device; it returns None where
transformers knows no such model."""


def hub_names_in(contents: Contents, build: BuildModel | None) -> HubNames | None:
    """Returns the layout in which save_pretrained would write a checkpoint's model.

    Args:
        contents: Checkpoint whose weights have the model's names.
        build: See BuildModel; None: where the checkpoint does not tell the names, they stay as
            they are.

    Returns:
        The layout, or None where the model is not transformers'.

    Raises:
        CheckpointError: The names in files differ from the model's, and cannot be found.
    """
    record = contents.hub
    if record is not None and record["transforms"] is None:
        return HubNames(model=None, layout=layout_of_record(record))
    model = _model(contents, build)
    if model is None:
        if record is None:
            return None
        raise CheckpointError(
            "the model's files have other names than its parameters, which transformers makes of "
            "its config.json, and that is not there, or transformers cannot build a model of it"
        )
    layout = file_layout(model) if record is None else layout_of_record(record)
    return None if layout is None else HubNames(model=model, layout=layout)


def layout_of_record(record: dict[str, Any]) -> FileLayout:
    """Returns the layout that a manifest records: see read_hub."""
    return FileLayout(
        transforms=transforms_from(record["transforms"]),
        num_parameters=record["num_parameters"],
        left_out=record["left_out"],
    )


def _model(contents: Contents, build: BuildModel | None) -> nn.Module | None:
    config = next((path for path in contents.files if path.name == "config.json"), None)
    if config is None or build is None:
        return None
    try:
        document = json.loads(config.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{config} is damaged: {error}") from error
    if not isinstance(document, dict) or not isinstance(document.get("model_type"), str):
        return None
    try:
        return build(config)
    except (ValueError, ModuleNotFoundError) as error:
        raise CheckpointError(
            f"the names of this model's weights differ between its files and the model, perhaps, "
            f"and it cannot be built to find out: {error}"
        ) from error


def in_order(contents: Contents, names: HubNames | None) -> Contents:
    """Orders the weights as the model's state dict does, as far as its order is known."""
    order: list[str] = [] if contents.hub is None else contents.hub["order"]
    if not order and names is not None and names.model is not None:
        order = [*names.model.state_dict()]
    place = {key: i for i, key in enumerate(order)}
    keys = sorted(contents.weights, key=lambda key: place.get(key, len(place)))
    return replace(contents, weights={key: contents.weights[key] for key in keys})


def in_names_of_model(
    contents: Contents, source: Path, build: BuildModel | None, *, needed: bool
) -> tuple[Contents, bool]:
    """Renames the weights of a Hugging Face model to the model's own names.

    Where these differ from the names in files, from_pretrained reads the weights into a lazy model,
    tensor by tensor.

    Args:
        contents: Contents of `source`.
        source: Directory of the model.
        build: See BuildModel.
        needed: Whether the names must be the model's.

    Returns:
        The contents, and whether their names are known to be the model's.

    Raises:
        CheckpointError: The names are needed and cannot be found, or from_pretrained fails.
    """
    record = contents.hub
    if record is not None and (record["names"] == "model" or record["transforms"] is None):
        return contents, True
    try:
        model = _model(contents, build)
    except CheckpointError:
        if needed:
            raise
        return contents, False
    layout = None if model is None else file_layout(model)
    if model is None or layout is None:
        return contents, False
    state = model.state_dict(keep_vars=True)
    numbers = {key: id(tensor) for key, tensor in state.items()}
    kept = kept_keys(model, numbers)
    key_kept = {numbers[key]: key for key in kept}
    tied = {key: key_kept[number] for key, number in numbers.items() if key not in kept}
    plan = HubNames(model=model, layout=layout).plan_of_files(
        {key: tuple(one.shape) for key, one in state.items()}, tied
    )
    stored = contents.weights
    sealed = (source / PART_MANIFEST).exists()
    if in_names_of_files(stored, plan, numbers, sealed=sealed, record=record):
        contents = _read_by_transformers(contents, source, model, state, kept)
    own = {key: one for key, one in tied.items() if one in contents.weights}
    own = {key: one for key, one in own.items() if key not in contents.weights}
    known = all(name in numbers for name in contents.weights)
    return replace(contents, tied=contents.tied or own), known


def _read_by_transformers(
    contents: Contents,
    source: Path,
    model: nn.Module,
    state: dict[str, torch.Tensor],
    kept: set[str],
) -> Contents:
    stored = read_headers(weight_files(source))
    try:
        tensors, info = from_files(model, source, stored)
    except Exception as error:
        raise CheckpointError(
            f"{type(model).__name__}.from_pretrained cannot read {source}: {error}"
        ) from error
    wrong = {*info["missing_keys"], *(entry[0] for entry in info["mismatched_keys"])}
    key_of = keys_of_files(model, stored, state)
    lacking = wrong.intersection(key for name, key in key_of.items() if name in stored)
    if lacking:
        raise CheckpointError(
            f"{source} lacks tensors, or they have other shapes, of what a {type(model).__name__} "
            f"has as '{min(lacking)}'; booster.load_model names them"
        )
    dtype_of = {key_of[name]: entry.dtype for name, entry in stored.items()}
    weights: dict[str, SavedTensor] = {
        key: _read(tensors[key], dtype_of.get(key, tensors[key].dtype))
        for key in state
        if key in kept and key in tensors and key not in wrong
    }
    weights |= {name: one for name, one in contents.weights.items() if key_of[name] not in state}
    hub = contents.hub
    if hub is not None:
        hub = {**hub, "names": "model", "order": list(weights)}
    return replace(contents, weights=weights, hub=hub)


def _read(tensor: torch.Tensor, dtype: torch.dtype) -> ComputedTensor:
    return ComputedTensor(
        dtype=dtype, shape=tuple(tensor.shape), compute=partial(_value, tensor, dtype)
    )


def _value(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return value_of(tensor).detach().to(dtype)


# --- The changes that a conversion makes to a checkpoint: tied keys, and the dtype of weights -----


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
    pairs = zip(pieces(values_of(a)), pieces(values_of(b)), strict=True)
    return all(mine == theirs for mine, theirs in pairs)


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
        exact = values_of(tensor)
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
