"""Autograd functions of an output embedding with deferred logits, and of losses over them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from castor.activations.deferred import (
    TAKES_ALONG_DIM,
    DeferredLogits,
    Uncomputed,
    with_memory,
)
from castor.activations.lazy_logits import Head, LazyLogits, Source
from castor.activations.row_expressions import at_once
from castor.activations.row_operators import chosen, gathered, put_back, scattered
from castor.activations.tiled_loss import (
    ALL_ROWS,
    DeferredGradient,
    LazyGradient,
    LocalColumns,
    Loss,
    VocabParallelLoss,
    backward_of_rows,
    tiled_backward,
)


class HeadFunction(torch.autograd.Function):
    """Output embedding: F.linear, whose forward is deferred."""

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
        """Returns deferred logits."""
        source = Source(head, module, hidden.detach(), rows_per_tile)
        ctx.save_for_backward(hidden, weight)
        ctx.source = weakref.ref(source)  # the graph must not keep hidden states alive
        return DeferredLogits.of(LazyLogits.of_head(source))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Returns F.linear's gradients, computed in tiles if the logits' gradient is deferred."""
        hidden, weight = ctx.saved_tensors
        if (source := ctx.source()) is not None:
            source.check()
        wanted = ctx.needs_input_grad[:3]
        grads = None
        if torch.is_grad_enabled():  # create_graph=True needs differentiable operators
            pass
        elif isinstance(grad, DeferredGradient) and grad.gradient.at_head:
            grads = _of_gradient(grad.gradient, hidden, weight, wanted)
        elif isinstance(grad, DeferredLogits) and grad.logits.clean and not grad.logits.computed:
            grads = backward_of_rows(grad.logits, hidden, weight, wanted)
        if grads is None:
            values = with_memory(grad) if isinstance(grad, Uncomputed) else grad
            grads = _of_values(values, hidden, weight, wanted)
        if source is not None:
            source.spent = True
        return *grads, None, None, None


_Gradients = tuple[torch.Tensor | None, ...]


def _of_gradient(
    gradient: LazyGradient,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    wanted: tuple[bool, bool, bool],
) -> _Gradients | None:
    """Computes the head's gradients from a deferred one, in tiles; None if that has values.

    Args:
        gradient: Deferred gradient of the head's output.
        hidden: The hidden states.
        weight: Weight of the head.
        wanted: Which gradients are needed: those of hidden states, weight and bias.
    """
    if gradient.computed:
        return None
    loss = gradient.loss
    if loss.num_tiles <= 1:
        grads = at_once(
            loss.logits.source,
            loss.target.numel(),
            lambda: _of_values(gradient.compute(), hidden, weight, wanted),
        )
        if grads is not None:
            return grads
    return tiled_backward(gradient, hidden.shape, weight, wanted)


def _of_values(
    grad: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    wanted: tuple[bool, bool, bool],
) -> _Gradients:
    rows = grad.reshape(-1, grad.shape[-1])
    inputs = hidden.reshape(-1, hidden.shape[-1])
    return (
        rows.mm(weight).view(hidden.shape) if wanted[0] else None,
        rows.t().mm(inputs) if wanted[1] else None,
        rows.sum(0) if wanted[2] else None,
    )


class _SameLogits(torch.autograd.Function):
    """Makes another tensor over the same logits, to which user code has no access."""

    @staticmethod
    def forward(ctx: Any, logits: DeferredLogits) -> torch.Tensor:
        """Returns the tensor."""
        return DeferredLogits.of(logits.logits)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """Returns the gradient unchanged."""
        return grad


class _LossFunction(torch.autograd.Function):
    """Loss over deferred logits, whose gradient is deferred."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: DeferredLogits,
        target: torch.Tensor,
        weight: torch.Tensor | None,
        make: Callable[..., Loss],
    ) -> torch.Tensor:
        """Returns the value of the loss that `make` constructs."""
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
        """Returns a deferred gradient."""
        logits, target, weight = ctx.saved_tensors
        loss = ctx.make(logits=logits.logits, target=target, weight=weight)
        if torch.is_grad_enabled():  # create_graph=True needs differentiable operators
            with torch._C.DisableTorchFunctionSubclass():
                value = loss.of(logits, ALL_ROWS, loss.reduction)
            of_logits = torch.autograd.grad(value, logits, grad, create_graph=True)[0]
            return of_logits, None, None, None
        gradient = LazyGradient(loss, grad.detach(), loss.logits)
        return DeferredGradient.of(gradient), None, None, None


class _Gather(torch.autograd.Function):
    """Tensor.gather along the vocabulary, whose gradient is deferred."""

    @staticmethod
    def forward(ctx: Any, tensor: DeferredLogits, index: torch.Tensor) -> torch.Tensor:
        """Returns the elements."""
        ctx.save_for_backward(index)
        ctx.logits = tensor.logits
        return gathered(tensor.logits, index, trains=ctx.needs_input_grad[0])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Returns a deferred gradient."""
        (index,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True needs differentiable operators
            zeros = grad.new_zeros(ctx.logits.like.shape)
            return zeros.scatter_add(-1, index, grad), None
        return DeferredLogits.of(scattered(ctx.logits, index, grad)), None


class _ChooseRows(torch.autograd.Function):
    """Chosen rows of deferred logits, whose gradient is deferred."""

    @staticmethod
    def forward(ctx: Any, tensor: DeferredLogits, index: torch.Tensor) -> torch.Tensor:
        """Returns the rows, deferred."""
        ctx.save_for_backward(index)
        ctx.shape = tensor.shape
        return DeferredLogits.of(chosen(tensor.logits, index))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Returns a deferred gradient if it is given one."""
        (index,) = ctx.saved_tensors
        lazy = grad.lazy() if isinstance(grad, Uncomputed) else None
        if lazy is not None and not torch.is_grad_enabled():
            return DeferredLogits.of(put_back(lazy, ctx.shape, index)), None
        return grad.new_zeros(ctx.shape).index_put((index,), grad, accumulate=True), None


def in_tiles(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Runs a function of torch over deferred logits in tiles; None: torch's own has to run.

    Args:
        func: The function, one of `_TAKEN` in deferred.py.
        args: Positional arguments.
        kwargs: Keyword arguments.
    """
    if func is F.cross_entropy:
        return tiled_cross_entropy(*args, **kwargs)
    if not (isinstance(args[0] if args else None, DeferredLogits) and plain_torch()):
        return None
    if not args[0].logits.clean:
        return None
    if func is torch.Tensor.__getitem__:
        return _at_places(*args)
    arguments = _of_take_along_dim if func in TAKES_ALONG_DIM else _of_gather
    try:
        tensor, dim, index = arguments(*args, **kwargs)
    except TypeError:
        return None
    if not (
        type(index) is torch.Tensor
        and type(dim) is int
        and index.dtype == torch.int64
        and index.device == tensor.device
        and index.dim() == tensor.dim() > 0
        and index.shape[:-1] == tensor.shape[:-1]
        and index.numel() > 0
        and dim in (-1, tensor.dim() - 1)
    ):
        return None
    if func in TAKES_ALONG_DIM:
        index = torch.where(index < 0, index + tensor.shape[-1], index)  # gather checks the range
    found: torch.Tensor = _Gather.apply(tensor, index)
    return found


def _of_gather(
    input: Any,  # noqa: A002
    dim: Any,
    index: Any,
    *,
    sparse_grad: Any = False,
) -> tuple[Any, Any, Any]:
    return input, None if sparse_grad else dim, index


def _of_take_along_dim(
    input: Any,  # noqa: A002
    indices: Any,
    dim: Any = None,
) -> tuple[Any, Any, Any]:
    return input, dim, indices


def _at_places(tensor: DeferredLogits, index: Any) -> torch.Tensor | None:
    """Returns tensor[index] if that chooses rows, or an element of each row; else None."""
    if isinstance(index, tuple) and len(index) == 1:
        (index,) = index
    if isinstance(index, tuple):
        return _elements(tensor, index)
    if type(index) is not torch.Tensor or index.device.type not in ("cpu", tensor.device.type):
        return None
    if index.dtype == torch.bool:
        may = 0 < index.dim() < tensor.dim() and index.shape == tensor.shape[: index.dim()]
        may = may and bool(index.any())
    else:
        may = (
            index.dtype == torch.int64
            and index.dim() == 1
            and tensor.dim() > 1
            and index.numel() == index.unique().numel() > 0
            and bool((index.abs() < tensor.shape[0]).all())
            and bool((index >= 0).all())
        )
    if not may:
        return None
    found: torch.Tensor = _ChooseRows.apply(tensor, index)
    return found


def _elements(tensor: DeferredLogits, index: tuple[Any, ...]) -> torch.Tensor | None:
    """Returns tensor[rows, columns] if each row is there at most once; else None."""
    if len(index) != 2 or tensor.dim() != 2:
        return None
    rows, columns = index
    for one in index:
        if type(one) is not torch.Tensor or one.dtype != torch.int64 or one.dim() != 1:
            return None
    if rows.shape != columns.shape or columns.device != tensor.device:
        return None
    if not bool((columns.abs() < tensor.shape[1]).all()):
        return None
    columns = columns.remainder(tensor.shape[1])
    if not torch.equal(rows.cpu(), torch.arange(tensor.shape[0])):
        chosen_rows = _at_places(tensor, rows)
        if not isinstance(chosen_rows, DeferredLogits):
            return None
        tensor = chosen_rows
    found: torch.Tensor = _Gather.apply(tensor, columns[:, None])
    return found.squeeze(-1)


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
    """Runs F.cross_entropy in tiles; None: torch's own has to run, on the values."""
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
    same = _SameLogits.apply(input)
    loss: torch.Tensor = _LossFunction.apply(same, target, weight, make)
    return loss


def tiled_vocab_parallel_loss(
    logits: Any, target: torch.Tensor, own: LocalColumns
) -> torch.Tensor | None:
    """Computes the sum of rows' losses in tiles, over logits of which this rank has some columns.

    Args:
        logits: Logits of this rank's columns, (rows, own columns).
        target: Numbers of classes among all columns, (rows,).
        own: This rank's shard of the loss.

    Returns:
        The sum; None if the logits have values, or the loss cannot run in tiles.
    """
    if not _runs_in_tiles(logits, target):
        return None
    make = functools.partial(
        VocabParallelLoss, ignore_index=-1, reduction="sum", label_smoothing=0.0, own=own
    )
    same = _SameLogits.apply(logits)
    loss: torch.Tensor = _LossFunction.apply(same, target, None, make)
    return loss


def _runs_in_tiles(logits: Any, target: Any) -> bool:
    """Whether a loss over logits and target may be computed in tiles of rows."""
    return (
        isinstance(logits, DeferredLogits)
        and logits.logits.is_logits
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
    """Whether operators run unmodified: no tracer, transform, mode or saved-tensor hook is on."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    )
