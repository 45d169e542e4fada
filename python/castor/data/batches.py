"""Functions on the batches of data loaders: tensors in mappings, lists and tuples."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence


def each_tensor(batch: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Returns the batch with `function` applied to each tensor; other objects stay as they are."""
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return _like(batch, {name: each_tensor(one, function) for name, one in batch.items()})
    if isinstance(batch, list | tuple) and not isinstance(batch, PackedSequence):
        return _sequence_like(batch, [each_tensor(one, function) for one in batch])
    return batch


def with_fields(batch: Any, fields: Mapping[str, Any]) -> Any:
    """Returns the batch with some fields replaced; fields of lists and tuples are '0', '1', ..."""
    if isinstance(batch, Mapping):
        return _like(batch, {**batch, **fields})
    return _sequence_like(batch, [fields.get(str(i), one) for i, one in enumerate(batch)])


def _like(batch: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """Makes a mapping of the batch's class and attributes (transformers' BatchEncoding)."""
    if isinstance(batch, MutableMapping):
        made = copy.copy(batch)
        made.update(values)
        return made
    return values


def _sequence_like(batch: list[Any] | tuple[Any, ...], values: list[Any]) -> Any:
    if hasattr(batch, "_fields"):
        return type(batch)(*values)
    return type(batch)(values)
