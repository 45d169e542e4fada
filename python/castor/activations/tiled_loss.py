"""Cross-entropy over deferred logits, and its gradient, in tiles of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from castor.activations import operators
from castor.activations.deferred import DeferredLogits, Uncomputed
from castor.activations.lazy_logits import (
    LazyLogits,
    Rows,
    Tile,
    autograd_at_work,
    plainest,
    take,
)
from castor.activations.row_expressions import at_once, each_tile, in_tiles

ALL_ROWS = slice(None)


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Cross-entropy of logits, with torch's arguments."""

    logits: LazyLogits
    target: torch.Tensor
    weight: torch.Tensor | None
    ignore_index: int
    reduction: str
    label_smoothing: float

    @property
    def num_tiles(self) -> int:
        """Number of tiles that the rows are computed in."""
        return -(-self.target.numel() // self.logits.source.rows_per_tile)

    def of(self, logits: torch.Tensor, rows: Rows, reduction: str) -> torch.Tensor:
        """Returns the loss of some rows, or of all, from their logits."""
        return F.cross_entropy(
            logits,
            self.target[rows],
            self.weight,
            ignore_index=self.ignore_index,
            reduction=reduction,
            label_smoothing=self.label_smoothing,
        )

    def hidden_rows(self) -> Callable[[slice], torch.Tensor]:
        """Returns a function from row numbers of the loss to their hidden states."""
        source = self.logits.source
        hidden = source.hidden.reshape(-1, source.hidden.shape[-1])
        numbers = self.logits.row_numbers()
        return lambda rows: hidden[rows if numbers is None else numbers[rows]]

    def changed_by_element(self, logits: torch.Tensor) -> torch.Tensor:
        """Applies the steps that act on each element to rows of the head's output."""
        for step in self.logits.head_output().steps_to(self.logits):
            if not step.moves_rows:
                logits = step(logits)
        return logits

    def divisor(self) -> torch.Tensor | None:
        """Returns the divisor of the sum over rows; None: the sum is not divided."""
        if self.reduction != "mean":
            return None
        counted = self.target != self.ignore_index
        if self.weight is None:
            return counted.sum()
        return self.weight[self.target.masked_fill(~counted, 0)].mul(counted).sum()

    def value(self) -> torch.Tensor:
        """Computes the loss. The head's weights must be pinned."""
        if self.num_tiles <= 1:
            found = at_once(
                self.logits.source,
                self.target.numel(),
                lambda: self.of(self.logits.original(keep=False), ALL_ROWS, self.reduction),
            )
            if found is not None:
                return found
        losses = self.target.new_empty(self.target.shape, dtype=self.logits.like.dtype)
        hidden = self.hidden_rows()

        def compute(rows: slice) -> None:
            logits = self.changed_by_element(self.logits.source.project(hidden(rows)))
            losses[rows] = self.of(logits, rows, "none")

        in_tiles(self.logits.source, self.target.numel(), compute)
        if self.reduction == "none":
            return losses
        total = losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32))
        divisor = self.divisor()
        return (total if divisor is None else total / divisor).to(losses.dtype)

    def gradient(self, logits: LazyLogits, grad: torch.Tensor) -> torch.Tensor:
        """Computes the gradient with respect to `logits` by plain operators, all rows at once.

        Args:
            logits: A lazy between the head's output and the loss.
            grad: Gradient of the loss.
        """
        start, edge = _begin_graph(logits.original(keep=False))
        with torch.enable_grad():
            for step in logits.steps_to(self.logits):
                start = step(start)
            loss = self.of(start, ALL_ROWS, self.reduction)
        del start
        return torch.autograd.grad(loss, edge, grad)[0]


class LazyGradient:
    """Lazy gradient of a loss with respect to logits.

    Args:
        loss: The loss.
        grad: Gradient of the loss.
        logits: A lazy between the head's output and the loss.
    """

    def __init__(self, loss: Loss, grad: torch.Tensor, logits: LazyLogits) -> None:
        self.loss = loss
        self.grad = grad
        self.logits = logits
        self.like = torch.empty_like(logits.like, memory_format=torch.contiguous_format)
        self._value: torch.Tensor | None = None

    @property
    def computed(self) -> bool:
        """Whether it has values, which user code may have written to."""
        return self._value is not None

    def value(self) -> torch.Tensor:
        """Returns the values, which are computed once.

        Raises:
            UsageError: The values were not computed before, and the weights have changed.
        """
        if self._value is None:
            self._value = self.compute()
        return self._value

    def compute(self) -> torch.Tensor:
        """Computes the values, and does not keep them."""
        with torch.inference_mode(False), autograd_at_work():
            return self.loss.gradient(self.logits, self.grad).contiguous()

    def before(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Returns the gradient before the last step if an operator on this computes it, or None."""
        after = self.after_passing()
        step, parent = after.step, after.parent
        if step is None or parent is None or kwargs.get("device") not in (None, self.grad.device):
            return None

        def is_result(value: Any) -> bool:
            return isinstance(value, DeferredLogits) and value.logits is after and after.clean

        if not operators.undoes(
            step.func, step.args, parent.like, self.like, func, args, kwargs, is_result
        ):
            return None
        return LazyGradient(self.loss, self.grad, parent)

    def after_passing(self) -> LazyLogits:
        """Returns the earliest lazy before the logits that has the same gradient."""
        logits = self.logits
        while logits.step is not None and logits.step.func in operators.UNDONE_BY_NOTHING:
            assert logits.parent is not None
            logits = logits.parent
        return logits

    @property
    def at_head(self) -> bool:
        """Whether this is the gradient of the head's output."""
        return self.after_passing().parent is None

    def of_losses(self) -> torch.Tensor:
        """Returns the gradients of the rows' losses."""
        divisor = self.loss.divisor()
        grad = self.grad if divisor is None else self.grad / divisor
        return grad.expand(self.loss.target.shape)


class LossGradient(LazyLogits):
    """Gradient of a loss as a lazy, so that other gradients can be added to it."""

    def __init__(self, gradient: LazyGradient) -> None:
        super().__init__(gradient.logits.source, gradient.like)
        self._gradient = gradient
        self._places: torch.Tensor | None = None  # number of each row in the loss; -1: not in it

    @property
    def inputs(self) -> tuple[LazyLogits, ...]:
        """See LazyLogits."""
        return (self._gradient.logits,)

    def made_of(self, get: Callable[[LazyLogits], torch.Tensor]) -> torch.Tensor:
        """See LazyLogits."""
        return self._gradient.value()

    def compute(self, rows: Rows, tile: Tile) -> torch.Tensor:
        """See LazyLogits."""
        loss, logits = self._gradient.loss, self._gradient.logits
        if rows == slice(0, logits.num_rows):  # bitwise as in plain PyTorch
            found = self._gradient.compute()
            return found.view(-1, found.shape[-1])
        if self._places is None:
            numbers = loss.logits.row_numbers(logits)
            if numbers is None:
                numbers = torch.arange(logits.num_rows)
            self._places = torch.full((logits.num_rows,), -1)
            self._places[numbers.cpu()] = torch.arange(loss.target.numel())
        places = take(self._places, rows)
        here = (places >= 0).nonzero().reshape(-1)
        start = tile.values(logits, rows)
        result = torch.zeros_like(start)
        if here.numel() == 0:
            return result
        of_loss, chosen = plainest(places[here]), plainest(here)
        if not isinstance(of_loss, slice):
            of_loss = of_loss.to(result.device)
        with autograd_at_work():
            start, edge = _begin_graph(take(start, chosen))
            with torch.enable_grad():
                for step in logits.steps_to(loss.logits):
                    if not step.moves_rows:
                        start = step(start)
                losses = loss.of(start, of_loss, "none")
            del start
            grad = self._gradient.of_losses()[of_loss]
            found = torch.autograd.grad(losses, edge, grad)[0]
        if here.numel() == result.shape[0]:
            return found
        result[chosen if isinstance(chosen, slice) else chosen.to(result.device)] = found
        return result


class DeferredGradient(Uncomputed):
    """Deferred gradient of deferred logits."""

    def __init__(self, like: torch.Tensor, device: torch.device, gradient: LazyGradient) -> None:
        self.gradient = gradient

    @classmethod
    def of(cls, gradient: LazyGradient) -> DeferredGradient:
        """Makes a tensor over `gradient`."""
        return cls(gradient.like, gradient.grad.device, gradient)

    def values(self) -> torch.Tensor:
        """See Uncomputed.

        Raises:
            UsageError: The values were not computed before, and the weights have changed.
        """
        return self.gradient.value()

    def expose(self) -> None:
        """Does nothing: once computed, the values are used as they are."""

    def lazy(self) -> LazyLogits | None:
        """See Uncomputed."""
        return None if self.gradient.computed else LossGradient(self.gradient)

    def _stays_uncomputed(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> torch.Tensor | None:
        if func in operators.SAME_VALUES:
            return DeferredGradient.of(self.gradient)
        if self.gradient.computed:
            return None
        before = self.gradient.before(func, args, kwargs)
        return None if before is None else DeferredGradient.of(before)


def tiled_backward(
    gradient: LazyGradient,
    shape: torch.Size,
    weight: torch.Tensor,
    wanted: tuple[bool, bool, bool],
) -> tuple[torch.Tensor | None, ...]:
    """Computes the gradients of hidden states, weight and bias from a loss, in tiles of logits.

    Args:
        gradient: Lazy gradient of the head's output.
        shape: Shape of the hidden states.
        weight: Weight of the head, (vocabulary, width).
        wanted: Which of the three gradients are needed.

    Returns:
        The three gradients; None for those that are not needed.
    """
    loss, source = gradient.loss, gradient.loss.logits.source
    numbers, grad = loss.logits.row_numbers(), gradient.of_losses()
    of_hidden = None
    if wanted[0]:  # rows that are not in the loss have no gradient
        new = weight.new_empty if numbers is None else weight.new_zeros
        of_hidden = new((source.num_rows, shape[-1]))
    of_weight = _Sum(weight.dtype) if wanted[1] else None
    of_bias = _Sum(weight.dtype) if wanted[2] else None
    hidden_rows = loss.hidden_rows()

    def compute(rows: slice) -> None:
        hidden = hidden_rows(rows)
        logits, edge = _begin_graph(source.project(hidden))
        with torch.enable_grad():
            losses = loss.of(loss.changed_by_element(logits), rows, "none")
        del logits
        of_logits = torch.autograd.grad(losses, edge, grad[rows])[0]
        del losses
        if of_hidden is not None:
            of_hidden[rows if numbers is None else numbers[rows]] = of_logits.mm(weight)
        add_rows(of_logits, hidden, of_weight, of_bias)

    in_tiles(source, loss.target.numel(), compute)
    return (
        None if of_hidden is None else of_hidden.view(shape),
        None if of_weight is None else of_weight.rounded(),
        None if of_bias is None else of_bias.rounded(),
    )


def add_rows(
    of_logits: torch.Tensor,
    hidden: torch.Tensor,
    of_weight: _Sum | None,
    of_bias: _Sum | None,
) -> None:
    """Adds the share of some rows to the gradients of weight and bias: to both or to none.

    Args:
        of_logits: Gradient of the rows' logits.
        hidden: Hidden states of the rows.
        of_weight: The sum for the weight; None: it is not needed.
        of_bias: The sum for the bias; None: it is not needed.
    """
    part = None if of_bias is None else of_logits.sum(0, dtype=of_bias.precise)
    if of_weight is not None:
        of_weight.add_product(of_logits.t(), hidden)
    if of_bias is not None and part is not None:
        of_bias.add(part)


def backward_of_rows(
    gradient: LazyLogits,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    wanted: tuple[bool, bool, bool],
) -> tuple[torch.Tensor | None, ...]:
    """Computes the gradients of hidden states, weight and bias from a lazy gradient, in tiles.

    Args:
        gradient: Lazy gradient of the head's output.
        hidden: The hidden states.
        weight: Weight of the head, (vocabulary, width).
        wanted: Which of the three gradients are needed.

    Returns:
        The three gradients; None for those that are not needed.
    """
    inputs = hidden.reshape(-1, hidden.shape[-1])
    of_hidden = torch.empty_like(inputs) if wanted[0] else None
    of_weight = _Sum(weight.dtype) if wanted[1] else None
    of_bias = _Sum(weight.dtype) if wanted[2] else None
    values = each_tile(gradient)

    def compute(rows: slice) -> None:
        of_logits = values(rows)
        if of_hidden is not None:
            of_hidden[rows] = of_logits.mm(weight)
        if of_weight is not None and rows == slice(0, len(inputs)):  # bitwise as in plain PyTorch
            of_weight.add(of_logits.t().mm(inputs))
            add_rows(of_logits, inputs, None, of_bias)
        else:
            add_rows(of_logits, inputs[rows], of_weight, of_bias)

    in_tiles(gradient.source, len(inputs), compute)
    return (
        None if of_hidden is None else of_hidden.view(hidden.shape),
        None if of_weight is None else of_weight.rounded(),
        None if of_bias is None else of_bias.rounded(),
    )


class _GraphBegins(torch.autograd.Function):
    """Begins a graph with a tensor whose gradient can be taken after it is freed.

    A leaf would keep the tensor alive.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Returns the values, in a graph."""
        return values.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Never reached: the gradient is taken before."""
        return None, None


def _begin_graph(values: torch.Tensor) -> tuple[torch.Tensor, GradientEdge]:
    """Returns the values in a graph, and the edge by which to ask for their gradient."""
    anchor = torch.empty((), requires_grad=True)
    with torch.enable_grad():
        start: torch.Tensor = _GraphBegins.apply(anchor, values)
    return start, get_gradient_edge(start)


class _Sum:
    """Sum over tiles, in float32 at least."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.precise = torch.promote_types(dtype, torch.float32)
        self._dtype = dtype
        self._total: torch.Tensor | None = None

    def add(self, part: torch.Tensor) -> None:
        """Adds a tile's part in float32 at least, or that of all rows; it may be written later."""
        self._total = part if self._total is None else self._total.add_(part)

    def add_product(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Adds the product of two matrices, not rounded to their dtype."""
        left, right = left.to(self.precise), right.to(self.precise)
        self._total = left.mm(right) if self._total is None else self._total.addmm_(left, right)

    def rounded(self) -> torch.Tensor:
        """Returns the sum, rounded to the dtype that was asked for."""
        assert self._total is not None
        return self._total.to(self._dtype)


# --- Vocabulary-parallel loss in tiles of rows: each rank has some columns of the logits ----------


class LocalColumns(Protocol):
    """This rank's shard of a vocabulary-parallel loss (castor.distributed)."""

    def seen(self, logits: torch.Tensor, rows: slice) -> torch.Tensor:
        """Returns for each row the values that the other ranks need, (values, rows) in float32.

        Args:
            logits: Logits of this rank's columns, (rows, own columns).
            rows: Numbers of the rows.
        """
        ...

    def total(self, seen: torch.Tensor) -> torch.Tensor:
        """Returns the sum of all rows' losses. Collective.

        Args:
            seen: Results of `seen` for all rows, (values, rows).
        """
        ...

    def gradient(self, logits: torch.Tensor, rows: Rows, grad: torch.Tensor) -> torch.Tensor:
        """Returns the logits' gradient for the gradients `grad` of rows' losses; after `total`."""
        ...


@dataclass(frozen=True, kw_only=True)
class VocabParallelLoss(Loss):
    """Vocabulary-parallel loss with one collective for all tiles; tiles may differ by rank."""

    own: LocalColumns
    """This rank's shard of the loss."""

    def of(self, logits: torch.Tensor, rows: Rows, reduction: str) -> torch.Tensor:
        """Returns a tensor with the gradient of some rows' losses, and zeros as values."""
        losses: torch.Tensor = _OfColumns.apply(logits, self.own, rows)
        return losses if reduction == "none" else losses.sum()

    def value(self) -> torch.Tensor:
        """Returns the sum of the losses. The head's weights must be pinned. Collective."""
        seen: list[torch.Tensor] = []
        hidden = self.hidden_rows()

        def compute(rows: slice) -> None:
            logits = self.changed_by_element(self.logits.source.project(hidden(rows)))
            seen.append(self.own.seen(logits, rows))

        in_tiles(self.logits.source, self.target.numel(), compute)
        return self.own.total(torch.cat(seen, dim=1))


class _OfColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, own: LocalColumns, rows: Rows) -> torch.Tensor:
        ctx.save_for_backward(logits)
        ctx.own, ctx.rows = own, rows
        return logits.new_zeros(logits.shape[0], dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (logits,) = ctx.saved_tensors
        return ctx.own.gradient(logits, ctx.rows, grad), None, None
