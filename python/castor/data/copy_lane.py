"""Copies batches to a GPU while it computes."""

from __future__ import annotations

from typing import Any

import torch

from castor.data.batches import each_tensor


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
