"""Copies between device memory and host memory, through which ranks send tensors.

Copies are in order with the calling thread's stream. A tensor that is in host memory already is
returned as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import distributed

_OF_THE_HOST = ("cpu", "meta")
"""Device types that need no copy; meta: a simulated model."""


def on_host(x: torch.Tensor) -> torch.Tensor:
    """Returns the values of a tensor in host memory, complete: a pinned copy if it is on a device.

    Args:
        x: Contiguous tensor.
    """
    if x.device.type in _OF_THE_HOST:
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x.detach())


def moved(x: torch.Tensor, sent_from: torch.device) -> torch.Tensor:
    """Returns a contiguous tensor's values on the device that a process group sends from."""
    if x.device == sent_from:
        return x
    return on_host(x) if sent_from.type in _OF_THE_HOST else x.to(sent_from)


def exchange(
    operation: Callable[..., Any], tensor: torch.Tensor, group: distributed.ProcessGroup, peer: int
) -> None:
    """Sends a tensor to a rank of the group, or receives one (distributed.isend, irecv).

    As a batch: NCCL sends alone over a communicator of the two ranks, which it makes then.

    Args:
        operation: distributed.isend or distributed.irecv.
        tensor: Tensor to send, or to receive into, on the device of the group.
        group: Process group.
        peer: Number of the other rank in the group.
    """
    message = distributed.P2POp(operation, tensor, group=group, group_peer=peer)
    for work in distributed.batch_isend_irecv([message]):
        work.wait()


def from_host(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns the values on a device, ready for later work on its current stream."""
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
    sent_from: torch.device,
) -> torch.Tensor:
    """Broadcasts one rank's tensor. Collective.

    Args:
        own: The values on the rank that has them; None on the others.
        shape: Shape of the values.
        dtype: Type of the values.
        group: Process group that sends memory of `sent_from`.
        source: Number, in the group, of the rank that has the values.
        device: Device on which the other ranks want the values.
        sent_from: The same device, or the CPU: the values then go through the host.
    """
    if own is None:
        sent = torch.empty(tuple(shape), dtype=dtype, device=sent_from)
    else:
        own = own.contiguous()
        sent = moved(own, sent_from)
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
        # Blocking: autograd does not know which of this thread's streams the copy runs on.
        return grad.to(ctx.device)


class _FromHost(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, values: torch.Tensor, device: torch.device) -> torch.Tensor:
        return from_host(values, device)

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return on_host(grad.contiguous()), None
