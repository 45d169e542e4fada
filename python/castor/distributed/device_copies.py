"""Between memory of a device and that of the host, through which ranks send tensors.

In order with the calling thread's stream. What the host addresses is given back as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import distributed

_OF_THE_HOST = ("cpu", "meta")
"""meta: a simulated model."""


def on_host(x: torch.Tensor) -> torch.Tensor:
    """The values of a tensor, complete: a page-locked copy of one that lies on a device.

    Args:
        x: Contiguous.
    """
    if x.device.type in _OF_THE_HOST:
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x.detach())


def from_host(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The values on a device, for what its stream is given from now on."""
    if values.device == device:
        return values
    return values.to(device, non_blocking=values.is_pinned())


def broadcast(
    own: torch.Tensor | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    group: distributed.ProcessGroup,
    source: int,
    device: torch.device,
) -> torch.Tensor:
    """Broadcasts one rank's tensor. Collective.

    Args:
        own: The values, where this rank has them; else None.
        shape: Of them.
        dtype: Likewise.
        group: That goes through memory of the host.
        source: Who has them, by its number in the group.
        device: Where the others want them.
    """
    sent = torch.empty(tuple(shape), dtype=dtype) if own is None else on_host(own.contiguous())
    distributed.broadcast(sent, group=group, group_src=source)
    return from_host(sent, device) if own is None else own


def taken_to_host(x: torch.Tensor) -> torch.Tensor:
    """Copies to the host as on_host does; the gradient comes from host memory."""
    return x if x.device.type in _OF_THE_HOST else cast("Any", _ToHost).apply(x)


def brought_from_host(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies to the device as from_host does; the gradient goes to host memory."""
    return values if values.device == device else cast("Any", _FromHost).apply(values, device)


class _ToHost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.device = x.device
        return on_host(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        # Complete when it returns: autograd does not know on which of this thread's streams it is.
        return grad.to(ctx.device)


class _FromHost(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, values: torch.Tensor, device: torch.device) -> torch.Tensor:
        return from_host(values, device)

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return on_host(grad.contiguous()), None
