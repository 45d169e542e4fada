"""Pads batches to a few lengths, so that shapes repeat."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.nn import functional

from castor.data.batches import with_fields
from castor.errors import UsageError

PADS: Mapping[str, int] = {
    "input_ids": 0,
    "attention_mask": 0,
    "token_type_ids": 0,
    "labels": -100,
    "decoder_input_ids": 0,
    "decoder_attention_mask": 0,
}
"""Default padding values of tensors of shape [batch, length], by name."""
_LENGTH = 1
"""Dimension that is padded."""


class Buckets:
    """Lengths to which tensors of a batch are padded at their end; see AsyncLoader.

    Args:
        lengths: Lengths in ascending order.
        pad_values: Padding values by name of a tensor; None: the tensor stays as it is.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: There are no lengths, or they do not ascend.
    """

    def __init__(self, lengths: Any, pad_values: Mapping[str, float | None] | None) -> None:
        if isinstance(lengths, str) or not isinstance(lengths, Iterable):
            raise TypeError(f"buckets is {lengths!r}; give lengths, such as [128, 256, 512]")
        self.lengths = list(lengths)
        for length in self.lengths:
            if isinstance(length, bool) or not isinstance(length, int):
                raise TypeError(f"buckets has {length!r}; give lengths, such as [128, 256, 512]")
        before = [0, *self.lengths]
        if not self.lengths or any(b <= a for a, b in zip(before, self.lengths, strict=False)):
            raise ValueError(
                f"buckets is {self.lengths}; give lengths, each larger than the one before"
            )
        self._given = _check_pad_values(pad_values)

    def pad(self, batch: Any) -> Any:
        """Returns the batch with its tensors padded; a tensor that needs no padding is not copied.

        Raises:
            UsageError: A tensor is longer than the largest bucket. Or no tensor of the batch has a
                padding value, or one without is as long as one that has it.
        """
        padded: dict[Any, torch.Tensor] = {}
        before: dict[int, str] = {}
        for name, tensor in _tensors(batch):
            value = self._value(name, tensor)
            if value is not None:
                before.setdefault(tensor.shape[_LENGTH], name)
                padded[name] = self._padded(name, tensor, value)
        if not padded:
            raise UsageError(
                f"buckets pad tensors by name, and pad_values names none of this batch, a "
                f"{type(batch).__name__} with {[name for name, _ in _tensors(batch)]}: give "
                "pad_values={name: value}; the tensors of a tuple are '0', '1', ..."
            )
        for name, tensor in _tensors(batch):
            like = next((before[size] for size in tensor.shape[1:] if size in before), None)
            if name not in padded and name not in self._given and like is not None:
                raise UsageError(
                    f"'{name}', {list(tensor.shape)}, is as long as '{like}', which buckets pad, "
                    f"and nothing says what to pad it with: give pad_values={{'{name}': value}}, "
                    "or None to leave it as it is"
                )
        return with_fields(batch, padded)

    def _value(self, name: str, tensor: torch.Tensor) -> float | None:
        if tensor.dim() <= _LENGTH:
            return None
        if name in self._given:
            return self._given[name]
        return PADS.get(name) if tensor.dim() == _LENGTH + 1 else None

    def _padded(self, name: str, tensor: torch.Tensor, value: float) -> torch.Tensor:
        length = tensor.shape[_LENGTH]
        found = bisect_left(self.lengths, length)
        if found == len(self.lengths):
            raise UsageError(
                f"'{name}', {list(tensor.shape)}, is longer than the largest bucket, "
                f"{self.lengths[-1]}: give a larger one, or truncate samples in the dataset"
            )
        beyond = self.lengths[found] - length
        if beyond == 0:
            return tensor
        return functional.pad(
            tensor, (0, 0) * (tensor.dim() - _LENGTH - 1) + (0, beyond), value=value
        )


def _check_pad_values(given: Any) -> Mapping[str, float | None]:
    """Returns the padding values by name; empty if None was given."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(f"pad_values is a {type(given).__name__}; give names and values")
    for name, value in given.items():
        if not isinstance(name, str) or not isinstance(value, int | float | None):
            raise TypeError(f"pad_values has {name!r}: {value!r}; give names and numbers, or None")
    return dict(given)


def _tensors(batch: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor) of a batch; names in lists and tuples are "0", "1", and so on."""
    fields: Iterable[tuple[Any, Any]] = ()
    if isinstance(batch, Mapping):
        fields = batch.items()
    elif isinstance(batch, list | tuple):
        fields = ((str(i), value) for i, value in enumerate(batch))
    for name, value in fields:
        if isinstance(value, torch.Tensor):
            yield name, value
