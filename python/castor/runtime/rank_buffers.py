"""Shares rank 0's buffers with all ranks that train a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import nn

from castor.runtime.rank_group import RankGroup


class RankBuffers:
    """The buffers of a model, shared as torch's DistributedDataParallel does.

    It holds the tensors, not the model. Buffers that forwards have written, such as a BatchNorm's
    statistics, are shared in the next step, where ranks wait for each other anyway. Other buffers
    cost nothing.
    """

    def __init__(self, model: nn.Module, ranks: RankGroup | None) -> None:
        """Gives all ranks rank 0's buffers. Collective.

        Args:
            model: Model with the buffers.
            ranks: Ranks that train it; None: this process is alone.
        """
        self._ranks = ranks
        self._modules: list[list[torch.Tensor]] = []
        """Buffers of each module that has any."""
        if ranks:
            for buffer in model.buffers():
                ranks.broadcast(buffer)
            own = names_of_own(model)
            for prefix, module in model.named_modules():
                named = module.named_buffers(prefix, recurse=False)
                if buffers := [tensor for name, tensor in named if name not in own]:
                    self._modules.append(buffers)
        self._versions = self._now()

    def leave(self) -> None:
        """Stops sharing buffers: another class shares them from now on."""
        self._modules, self._versions = [], []

    def written(self) -> list[int]:
        """Returns the numbers of modules with a buffer written on this rank since the last call."""
        before, self._versions = self._versions, self._now()
        return [number for number, now in enumerate(self._versions) if now != before[number]]

    def broadcast(self, numbers: Collection[int]) -> None:
        """Gives every rank rank 0's buffers of these modules. Collective."""
        buffers = [buffer for number in sorted(numbers) for buffer in self._modules[number]]
        if buffers and self._ranks:
            broadcast_flat(buffers, self._ranks.group.broadcast, torch.device("cpu"))

    def _now(self) -> list[list[int]]:
        # A BatchNorm shows by its count of batches: writes to its means change no version.
        return [[buffer._version for buffer in buffers] for buffers in self._modules]


def names_of_own(module: nn.Module) -> set[str]:
    """Returns the names of buffers that DistributedDataParallel is told to leave to each rank."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


@torch.no_grad()
def broadcast_flat(
    tensors: Sequence[torch.Tensor],
    broadcast: Callable[[torch.Tensor], object],
    device: torch.device,
) -> None:
    """Gives every rank one rank's values, in one message. Collective.

    Writes in place without a version count, as a forward may have saved the tensors for backward.

    Args:
        tensors: Tensors of any types.
        broadcast: Broadcasts a tensor of bytes from one rank to all.
        device: Device that `broadcast` needs its bytes on.
    """
    values = [tensor.data for tensor in tensors]
    parts = [value.reshape(-1).view(torch.uint8) for value in values]
    together = torch.cat([part.to(device) for part in parts])
    broadcast(together)
    shared = together.split([part.numel() for part in parts])
    for value, part in zip(values, shared, strict=True):
        value.copy_(part.clone().view(value.dtype).view(value.shape))
