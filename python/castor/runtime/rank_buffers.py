"""Buffers of a model that several ranks train: rank 0's become every rank's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import nn

from castor.runtime.ranks import Peers


class RankBuffers:
    """Shares a model's buffers as torch's DistributedDataParallel does.

    Holds the tensors, not the model. What forwards have written (a BatchNorm's statistics) is
    shared in the step behind them, where ranks meet anyway; what nobody writes costs nothing.
    """

    def __init__(self, model: nn.Module, ranks: Peers | None) -> None:
        """All ranks begin with rank 0's. Collective.

        Args:
            model: Of which the buffers are.
            ranks: Those that train it; None: this process is alone.
        """
        self._ranks = ranks
        self._modules: list[list[torch.Tensor]] = []
        """Buffers of each module that has some."""
        if ranks:
            for buffer in model.buffers():
                ranks.share(buffer)
            own = names_of_own(model)
            for prefix, module in model.named_modules():
                named = module.named_buffers(prefix, recurse=False)
                if buffers := [tensor for name, tensor in named if name not in own]:
                    self._modules.append(buffers)
        self._versions = self._now()

    def leave(self) -> None:
        """From now on somebody else shares them."""
        self._modules, self._versions = [], []

    def written(self) -> list[int]:
        """Numbers of modules of whose buffers some have been written here since the last time."""
        before, self._versions = self._versions, self._now()
        return [number for number, now in enumerate(self._versions) if now != before[number]]

    def share(self, numbers: Collection[int]) -> None:
        """Rank 0's of these modules become every rank's. Collective."""
        buffers = [buffer for number in sorted(numbers) for buffer in self._modules[number]]
        if buffers and self._ranks:
            share_together(buffers, self._ranks.group.broadcast, torch.device("cpu"))

    def _now(self) -> list[list[int]]:
        # Of a BatchNorm it is the count of batches that shows: its means are written unseen.
        return [[buffer._version for buffer in buffers] for buffers in self._modules]


def names_of_own(module: nn.Module) -> set[str]:
    """Returns the names of buffers that DistributedDataParallel is told to leave to each rank."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


@torch.no_grad()
def share_together(
    tensors: Sequence[torch.Tensor],
    broadcast: Callable[[torch.Tensor], object],
    device: torch.device,
) -> None:
    """One rank's values become every rank's, in one message.

    In place, unseen by autograd, for which a forward may have kept them.

    Args:
        tensors: Of any types.
        broadcast: Of bytes: what one rank gives becomes every rank's.
        device: Where these have to be.
    """
    values = [tensor.data for tensor in tensors]
    parts = [value.reshape(-1).view(torch.uint8) for value in values]
    together = torch.cat([part.to(device) for part in parts])
    broadcast(together)
    shared = together.split([part.numel() for part in parts])
    for value, part in zip(values, shared, strict=True):
        value.copy_(part.clone().view(value.dtype).view(value.shape))
