"""Functions on the batches of data loaders, and their copies to a GPU while it computes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

# --- Functions on the batches of data loaders: tensors in mappings, lists and tuples --------------


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


# --- Copies batches to a GPU while it computes ----------------------------------------------------


class CopyLane:
    """A separate stream that copies tensors from page-locked memory to a GPU.

    The copies' memory comes from the stream's pool in torch's allocator. `receive` makes the
    current stream wait for the copies. It also tells the allocator that the current stream uses
    the memory, which is then not reused before that stream has finished its work so far.

    Args:
        device: GPU, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._gpu: Any = torch.get_device_module(device)
        with self._gpu.device(device):
            self._stream = self._gpu.Stream()

    def send(self, batch: Any) -> tuple[Any, Any]:
        """Starts the copies of strided tensors on the host; any thread may call it.

        Returns:
            The batch on the GPU, and the event that `receive` needs.
        """
        with self._gpu.device(self._device), self._gpu.stream(self._stream):
            sent = each_tensor(batch, self._copy)
            arrived = self._gpu.Event()
            arrived.record(self._stream)
        return sent, arrived

    def receive(self, batch: Any, arrived: Any) -> None:
        """Makes the calling thread's current stream wait for a batch that `send` returned."""
        stream = self._gpu.current_stream(self._device)
        stream.wait_event(arrived)

        def used(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device == self._device:
                tensor.record_stream(stream)
            return tensor

        each_tensor(batch, used)

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return tensor
        # Torch keeps the page-locked memory until the copy out of it is over.
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        return pinned.to(self._device, non_blocking=True)
