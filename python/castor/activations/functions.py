"""What autograd sees of a head that leaves its logits for later, and of the loss over them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from castor.activations.deferred import DeferredLogits, Uncomputed
from castor.activations.divided_loss import DividedLoss, OwnColumns
from castor.activations.lazy_logits import Head, LazyLogits, Source
from castor.activations.tiled_loss import (
    ALL_ROWS,
    DeferredGradient,
    LazyGradient,
    Loss,
    tiled_backward,
)


class HeadFunction(torch.autograd.Function):
    """The output embedding: F.linear, whose forward is left for later."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        head: Head,
        module: nn.Linear,
        rows_per_tile: int,
    ) -> torch.Tensor:
        """Gives logits without values."""
        source = Source(head, module, hidden.detach(), rows_per_tile)
        ctx.save_for_backward(hidden, weight)
        ctx.source = weakref.ref(source)  # who holds the graph shall not hold hidden states
        return DeferredLogits.of(LazyLogits.of_head(source))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """F.linear's, in tiles where the gradient has not been computed."""
        hidden, weight = ctx.saved_tensors
        if (source := ctx.source()) is not None:
            source.check()
        wanted = ctx.needs_input_grad[:3]
        if (
            isinstance(grad, DeferredGradient)
            and not grad.gradient.computed
            and grad.gradient.at_head
            and grad.gradient.loss.num_tiles > 1
        ):
            grads = tiled_backward(grad.gradient, hidden.shape, weight, wanted)
        else:
            values = grad.values() if isinstance(grad, Uncomputed) else grad
            rows = values.reshape(-1, values.shape[-1])
            inputs = hidden.reshape(-1, hidden.shape[-1])
            grads = (
                rows.mm(weight).view(hidden.shape) if wanted[0] else None,
                rows.t().mm(inputs) if wanted[1] else None,
                rows.sum(0) if wanted[2] else None,
            )
        if source is not None:
            source.spent = True
        return *grads, None, None, None


class _SameLogits(torch.autograd.Function):
    """Another tensor over the same logits, which nobody else can write to."""

    @staticmethod
    def forward(ctx: Any, logits: DeferredLogits) -> torch.Tensor:
        """Gives the tensor."""
        return DeferredLogits.of(logits.logits)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """Passes the gradient."""
        return grad


class _LossFunction(torch.autograd.Function):
    """A loss over logits, whose gradient is left for later."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: DeferredLogits,
        target: torch.Tensor,
        weight: torch.Tensor | None,
        make: Callable[..., Loss],
    ) -> torch.Tensor:
        """Gives the loss, which `make` describes."""
        ctx.save_for_backward(logits, target, weight)
        ctx.make = make
        source = logits.logits.source
        source.check()
        loss = make(logits=logits.logits, target=target, weight=weight)
        with source.head.running(source.module):
            value = loss.value()
        source.head.engine.logits.note(
            rows=target.numel(),
            rows_per_tile=source.rows_per_tile,
            row_bytes=loss.logits.like.shape[-1] * loss.logits.like.element_size(),
        )
        return value

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Gives a gradient without values."""
        logits, target, weight = ctx.saved_tensors
        loss = ctx.make(logits=logits.logits, target=target, weight=weight)
        if torch.is_grad_enabled():  # create_graph=True: by operators that can be differentiated
            with torch._C.DisableTorchFunctionSubclass():
                value = loss.of(logits, ALL_ROWS, loss.reduction)
            of_logits = torch.autograd.grad(value, logits, grad, create_graph=True)[0]
            return of_logits, None, None, None
        gradient = LazyGradient(loss, grad.detach(), loss.logits)
        return DeferredGradient.of(gradient), None, None, None


def tiled_cross_entropy(
    input: Any,  # noqa: A002
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor | None:
    """F.cross_entropy; None where torch's own has to run, on the values."""
    if not (
        _runs_in_tiles(input, target)
        and (weight is None or (type(weight) is torch.Tensor and not weight.requires_grad))
        and size_average is None
        and reduce is None
        and reduction in ("mean", "sum", "none")
    ):
        return None
    if weight is not None and (weight.shape != input.shape[-1:] or weight.dtype != input.dtype):
        return None
    make = functools.partial(
        Loss, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )
    same = _SameLogits.apply(input)  # type: ignore[no-untyped-call]
    loss: torch.Tensor = _LossFunction.apply(same, target, weight, make)  # type: ignore[no-untyped-call]
    return loss


def tiled_divided_loss(logits: Any, target: torch.Tensor, own: OwnColumns) -> torch.Tensor | None:
    """The sum of the rows' losses over logits of which this rank has some columns.

    Args:
        logits: (rows, own columns).
        target: (rows,), numbers of classes among all columns.
        own: What the loss is of.

    Returns:
        None where logits have values, or are to be given some.
    """
    if not _runs_in_tiles(logits, target):
        return None
    make = functools.partial(
        DividedLoss, ignore_index=-1, reduction="sum", label_smoothing=0.0, own=own
    )
    same = _SameLogits.apply(logits)  # type: ignore[no-untyped-call]
    loss: torch.Tensor = _LossFunction.apply(same, target, None, make)  # type: ignore[no-untyped-call]
    return loss


def _runs_in_tiles(logits: Any, target: Any) -> bool:
    """Whether a loss over these may be computed in tiles of rows."""
    return (
        isinstance(logits, DeferredLogits)
        and logits.requires_grad
        and torch.is_grad_enabled()
        and not torch.is_autocast_enabled(logits.device.type)
        and logits.logits.clean
        and logits.dim() == 2
        and type(target) in (torch.Tensor, nn.Parameter)
        and target.dtype in (torch.int64, torch.uint8)
        and target.shape == logits.shape[:1]
        and target.numel() > 0
        and target.device == logits.device
        and plain_torch()
    )


def plain_torch() -> bool:
    """Whether operators run as they are: nobody traces, transforms or intercepts them."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    )
