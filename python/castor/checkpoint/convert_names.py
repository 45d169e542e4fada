"""Names of weights in conversions: the model's own, except in the `hf` layout.

Weights in the `hf` layout have the names that save_pretrained gives them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from castor.checkpoint.container import ComputedTensor, SavedTensor, read_headers
from castor.checkpoint.contents import Contents
from castor.checkpoint.hub_names import (
    HubNames,
    in_names_of_files,
    keys_of_files,
    transforms_from,
)
from castor.checkpoint.manifest import PART_MANIFEST
from castor.checkpoint.model import kept_keys, weight_files
from castor.checkpoint.model_load import from_files
from castor.errors import CheckpointError
from castor.lazy import value_of
from castor.runtime.weight_conversions import FileLayout, file_layout

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
