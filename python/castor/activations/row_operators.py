"""Runs torch's operators over lazies: some give lazies, others are reduced tile by tile.

Loss functions apply operators such as log_softmax, exp and sums with a number for each row to
logits. Then they take one or a few numbers of each row: an element, a sum, a maximum. Autograd's
own backward operators do the same. Operators that are not in these tables get the values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from castor.activations.lazy_logits import LazyLogits
from castor.activations.row_expressions import (
    ChosenRows,
    Operand,
    PutRows,
    RowOperator,
    each_row,
    meta,
    reduced,
)

_aten = torch.ops.aten

_OF_ELEMENTS = frozenset(
    {
        *(_aten.add.Tensor, _aten.add.Scalar, _aten.sub.Tensor, _aten.sub.Scalar),
        *(_aten.rsub.Scalar, _aten.rsub.Tensor, _aten.mul.Tensor, _aten.mul.Scalar),
        *(_aten.div.Tensor, _aten.div.Scalar, _aten.neg.default, _aten.abs.default),
        *(_aten.exp.default, _aten.log.default, _aten.log1p.default, _aten.expm1.default),
        *(_aten.sqrt.default, _aten.reciprocal.default, _aten.sgn.default, _aten.sign.default),
        *(_aten.tanh.default, _aten.sigmoid.default, _aten.relu.default, _aten.log_sigmoid.default),
        *(_aten.tanh_backward.default, _aten.sigmoid_backward.default),
        *(_aten.threshold_backward.default, _aten.pow.Tensor_Scalar, _aten.pow.Scalar),
        *(_aten.clamp.default, _aten.clamp_min.default, _aten.clamp_max.default),
        *(_aten.maximum.default, _aten.minimum.default, _aten.xlogy.Tensor),
        *(_aten.where.self, _aten.masked_fill.Scalar, _aten.masked_fill.Tensor),
        *(_aten.eq.Tensor, _aten.eq.Scalar, _aten.ne.Scalar, _aten.isnan.default),
        *(_aten.gt.Scalar, _aten.ge.Scalar, _aten.lt.Scalar, _aten.le.Scalar),
        *(_aten.gt.Tensor, _aten.ge.Tensor, _aten.lt.Tensor, _aten.le.Tensor),
        *(_aten.isinf.default, _aten.bitwise_not.default, _aten.logical_not.default),
        *(_aten.logical_and.default, _aten.bitwise_and.Tensor, _aten.bitwise_or.Tensor),
        *(_aten.nan_to_num.default, _aten.clone.default, _aten._to_copy.default),
    }
)
"""Operators that compute each element by itself."""

_OF_ROWS = {
    _aten._log_softmax.default: 1,
    _aten._softmax.default: 1,
    _aten._log_softmax_backward_data.default: 2,
    _aten._softmax_backward_data.default: 2,
}
"""Operators that compute each row by itself, and the position of the dimension argument."""

_REDUCTIONS = {
    _aten.sum.dim_IntList: (1, 2),
    _aten.mean.dim: (1, 2),
    _aten.logsumexp.default: (1, 2),
    _aten.amax.default: (1, 2),
    _aten.amin.default: (1, 2),
    _aten.max.dim: (1, 2),
    _aten.min.dim: (1, 2),
    _aten.argmax.default: (1, 2),
    _aten.argmin.default: (1, 2),
    _aten.topk.default: (2, None),
}
"""Operators that reduce each row to a few numbers, and the positions of dim and keepdim."""

_OF_NO_GRADIENT = (_aten.argmax.default, _aten.argmin.default)
"""Reductions without a gradient."""

_MOVING = frozenset(
    {
        *(_aten.transpose.int, _aten.permute.default, _aten.unbind.int, _aten.split.Tensor),
        *(_aten.split_with_sizes.default, _aten.expand.default),
        *(_aten.view.default, _aten._unsafe_view.default, _aten._reshape_alias.default),
        *(_aten.slice.Tensor, _aten.select.int, _aten.unsqueeze.default),
        *(_aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims),
    }
)
"""Operators that choose and arrange rows: views."""
_RESHAPING = frozenset(
    {_aten.view.default, _aten._unsafe_view.default, _aten._reshape_alias.default}
)

_PUTTING = frozenset(
    {
        *(_aten.slice_backward.default, _aten.select_backward.default),
        *(_aten.stack.default, _aten.cat.default),
    }
)
"""Operators that put rows among others."""

Result = Any
"""Lazies, tensors, or one of them; None: the operator has to run on the values."""


def lazily(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Result:
    """Runs an operator over lazies without values, or tile by tile.

    Args:
        func: The operator.
        args: Positional arguments, LazyLogits among them.
        kwargs: Keyword arguments; none of them is a lazy.
    """
    flat = [v for a in args for v in (a if isinstance(a, list | tuple) else (a,))]
    lazies = [value for value in flat if isinstance(value, LazyLogits)]
    source = lazies[0].source
    if any(lazy.source is not source or lazy.num_rows == 0 for lazy in lazies):
        return None
    if kwargs.get("device") not in (None, source.hidden.device):
        return None
    if any(isinstance(v, torch.Tensor) and _is_strange(v, source.hidden.device) for v in flat):
        return None
    if func in _OF_ELEMENTS:
        return _of_elements(func, args, kwargs, lazies)
    if func in _OF_ROWS:
        return _of_rows(func, args, kwargs, lazies)
    if func in _PUTTING:
        return _put(func, args, kwargs, lazies)
    if func is _aten.nll_loss_backward.default:
        return _nll_loss_backward(args, kwargs)
    if len(lazies) > 1 or not isinstance(args[0], LazyLogits):
        return None
    if func in _MOVING:
        return _moved(func, args, kwargs)
    if func in _REDUCTIONS:
        return _reduced(func, args, kwargs)
    if func in (_aten.sum.default, _aten.mean.default):
        return _total(func, args[0], kwargs)
    if func in (_aten.any.default, _aten.all.default) and not kwargs:
        found = reduced(args[0], lambda values: (func(values).reshape(1),), trains=False)[0]
        return func(found)
    if func is _aten.nll_loss_forward.default:
        return _nll_loss_forward(args, kwargs)
    return None


def _is_strange(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a tensor is no plain one on the device of the logits."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_inference()
    return not plain or (tensor.device != device and tensor.dim() > 0)


def _of_elements(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], lazies: list[LazyLogits]
) -> Result:
    shape = lazies[0].like.shape
    if any(lazy.like.shape != shape for lazy in lazies):
        return None
    if func is _aten._to_copy.default and (
        kwargs.get("layout") not in (None, torch.strided) or kwargs.get("pin_memory")
    ):
        return None
    given = {name: value for name, value in kwargs.items() if name != "device"}  # which stays
    return _row_operator(func, args, given, lazies[0], shape)


def _of_rows(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], lazies: list[LazyLogits]
) -> Result:
    shape, at = lazies[0].like.shape, _OF_ROWS[func]
    if any(lazy.like.shape != shape for lazy in lazies) or len(args) <= at:
        return None
    if args[at] % len(shape) != len(shape) - 1:
        return None

    def of_tile(found: tuple[Any, ...]) -> tuple[Any, ...]:
        like = next(v for v in found if isinstance(v, torch.Tensor))
        wide = (
            v.expand(like.shape[0], shape[-1]) if isinstance(v, torch.Tensor) else v for v in found
        )
        values = tuple(wide)
        return (*values[:at], 1, *values[at + 1 :])

    return _row_operator(func, args, kwargs, lazies[0], shape, of_tile)


def _row_operator(
    func: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    lazy: LazyLogits,
    shape: torch.Size,
    of_tile: Callable[[tuple[Any, ...]], tuple[Any, ...]] | None = None,
) -> Result:
    try:
        put = tuple(_operand(value, shape) for value in args)
    except ValueError:
        return None
    like = func(*meta(put), **kwargs)
    if like.shape != shape:
        return None
    more = (of_tile,) if of_tile else ()
    return RowOperator(lazy.source, like, func, put, kwargs, *more)


def _operand(value: Any, shape: torch.Size) -> Any:
    return Operand(value, shape) if isinstance(value, torch.Tensor) else value


def _numbers_of(func: Any, lazy: LazyLogits, args: tuple[Any, ...]) -> torch.Tensor:
    """Returns the numbers of a lazy's rows, arranged as an operator arranges the rows."""
    numbers = torch.arange(lazy.num_rows).view(*lazy.like.shape[:-1], 1)
    found: torch.Tensor = func(numbers, *args)
    return found


def _moved(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Result:
    lazy, *rest = args
    vocabulary = lazy.like.shape[-1]
    likes = func(lazy.like, *rest, **kwargs)
    several = isinstance(likes, list | tuple)
    each = list(likes) if several else [likes]
    if any(like.dim() == 0 or like.shape[-1] != vocabulary for like in each):
        return None
    if func in _RESHAPING:
        numbers = [torch.arange(lazy.num_rows)]
    else:
        if func is _aten.expand.default:
            rest[0] = [*rest[0][:-1], -1]
        try:
            found = _numbers_of(func, lazy, tuple(rest))
        except (RuntimeError, IndexError):  # the operator moves columns
            return None
        numbers = list(found) if several else [found]
        if any(
            n.shape[-1:] != (1,) or n.shape[:-1] != like.shape[:-1]
            for n, like in zip(numbers, each, strict=True)
        ):
            return None

    def chooses(i: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda values: func(values, *args[1:], **kwargs)[i]

    nodes = [
        ChosenRows(
            lazy,
            like,
            chooses(i) if several else lambda values: func(values, *args[1:], **kwargs),
            n.reshape(-1),
            is_view=func is not _aten._unsafe_view.default,
        )
        for i, (like, n) in enumerate(zip(each, numbers, strict=True))
    ]
    return nodes if several else nodes[0]


def _put(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], lazies: list[LazyLogits]
) -> Result:
    source, vocabulary = lazies[0].source, lazies[0].like.shape[-1]
    several = func in (_aten.stack.default, _aten.cat.default)
    values = list(args[0]) if several else [args[0]]
    if any(v.dim() == 0 or v.shape[-1] != vocabulary for v in meta(values)):
        return None
    try:
        parts = [v if isinstance(v, LazyLogits) else Operand(v, v.shape) for v in values]
    except ValueError:
        return None
    likes = meta(parts)
    like = func(likes if several else likes[0], *args[1:], **kwargs)
    if like.shape[-1] != vocabulary or any(part.dtype != like.dtype for part in likes):
        return None
    numbers, first = [], 1  # 0: a row of zeros
    for part in likes:
        rows = part.numel() // vocabulary
        numbers.append(torch.arange(first, first + rows).view(*part.shape[:-1], 1))
        first += rows
    rest = list(args[1:])
    if not several:  # args[1] are the sizes of the result; row numbers have one column
        rest[0] = [*rest[0][:-1], 1]
    try:
        places = func(numbers if several else numbers[0], *rest, **kwargs)
    except (RuntimeError, IndexError):
        return None
    if places.shape != (*like.shape[:-1], 1):
        return None

    def put(*found: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = func(list(found) if several else found[0], *args[1:], **kwargs)
        return result

    return PutRows(source, like, parts, places.reshape(-1) - 1, put)


def _reduced(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Result:
    lazy = args[0]
    at, keep_at = _REDUCTIONS[func]
    last = lazy.like.dim() - 1
    dim = args[at] if len(args) > at else kwargs.get("dim")
    dims = [dim] if isinstance(dim, int) else dim
    if dims is None and func is _aten.topk.default:
        dims = [-1]
    if not dims or [d % lazy.like.dim() for d in dims] != [last]:
        return None
    given = {name: value for name, value in kwargs.items() if name not in ("dim", "keepdim")}
    many = not isinstance(dim, int) and func is not _aten.topk.default
    own = list(args[1:])
    del own[at - 1 :]
    own.append([1] if many else 1)
    keeps = True
    if keep_at is None:
        own += args[at + 1 :]
    else:
        keeps = args[keep_at] if len(args) > keep_at else kwargs.get("keepdim", False)
        own += [True, *args[keep_at + 1 :]]

    def of_tile(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = func(values, *own, **given)
        return tuple(found) if isinstance(found, list | tuple) else (found,)

    lead = lazy.like.shape[:-1]
    trains = torch.is_grad_enabled() and func not in _OF_NO_GRADIENT
    found = [
        part.reshape(*lead, part.shape[-1]) if keeps else part.reshape(lead)
        for part in reduced(lazy, of_tile, trains=trains)
    ]
    return found[0] if len(found) == 1 else tuple(found)


def _total(func: Any, lazy: LazyLogits, kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Computes a sum or mean of all elements from the tiles' sums, in float32 at least."""
    dtype = kwargs.get("dtype") or lazy.like.dtype
    if not dtype.is_floating_point or not lazy.like.is_floating_point():
        dtype = kwargs.get("dtype") or torch.int64
        precise = dtype
    else:
        precise = torch.promote_types(dtype, torch.float32)
    trains = torch.is_grad_enabled() and lazy.like.is_floating_point()
    of_tile = lambda values: (values.sum(dtype=precise).reshape(1),)  # noqa: E731
    parts = reduced(lazy, of_tile, trains=trains)[0]
    total = parts.sum()
    if func is _aten.mean.default:
        total = total / lazy.like.numel()
    return total.to(dtype)


def _nll_loss_forward(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Result:
    if kwargs or len(args) != 5 or args[0].like.dim() != 2:
        return None
    lazy, target, weight, reduction, ignored = args
    losses = torch.empty(lazy.num_rows, dtype=lazy.like.dtype, device=lazy.source.hidden.device)
    of_all: list[Any] = []

    def compute(rows: slice, values: torch.Tensor) -> None:
        whole = rows == slice(0, lazy.num_rows)
        how = reduction if whole else 0  # all rows at once: bitwise as in plain PyTorch
        found = _aten.nll_loss_forward.default(values, target[rows], weight, how, ignored)
        if whole:
            of_all.append(found)
        else:
            losses[rows] = found[0]

    each_row(lazy, compute, trains=torch.is_grad_enabled())
    if of_all:
        return of_all[0]
    counted = target != ignored
    if weight is None:
        divisor = counted.sum().to(losses.dtype)
    else:
        divisor = weight[target.masked_fill(~counted, 0)].mul(counted).sum()
    if reduction == 0:
        return losses, torch.zeros((), dtype=losses.dtype, device=losses.device)
    total = losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32))
    if reduction == 1:
        total = total / divisor
    return total.to(losses.dtype), divisor


def _nll_loss_backward(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Result:
    grad, lazy, target, *rest = args
    if kwargs or not isinstance(lazy, LazyLogits) or lazy.like.dim() != 2:
        return None
    shape = lazy.like.shape
    one = torch.Size((shape[0], 1))

    def func(*found: torch.Tensor) -> torch.Tensor:
        grad, values, target = found
        grad = grad.reshape(-1) if grad.dim() else grad
        wide = values.expand(values.shape[0], shape[-1])
        result: torch.Tensor = _aten.nll_loss_backward.default(
            grad, wide, target.reshape(-1), *rest
        )
        return result

    by_row = [Operand(v.reshape(-1, 1) if v.dim() else v, one) for v in (grad, target)]
    like = torch.empty(shape, dtype=lazy.like.dtype, device="meta")
    return RowOperator(lazy.source, like, func, (by_row[0], lazy, by_row[1]), {})


def gathered(lazy: LazyLogits, index: torch.Tensor, *, trains: bool) -> torch.Tensor:
    """Gathers elements of each row: torch.gather along the last dimension.

    Args:
        lazy: The lazy.
        index: Columns of the elements, (..., elements).
        trains: Whether the elements have a gradient.
    """
    found = torch.empty(index.shape, dtype=lazy.like.dtype, device=lazy.source.hidden.device)
    columns, result = index.reshape(-1, index.shape[-1]), found.view(-1, index.shape[-1])

    def compute(rows: slice, values: torch.Tensor) -> None:
        result[rows] = values.gather(1, columns[rows])

    each_row(lazy, compute, trains=trains)
    return found


def scattered(lazy: LazyLogits, index: torch.Tensor, grad: torch.Tensor) -> LazyLogits:
    """Returns the gradient of a lazy from that of its gathered elements.

    Args:
        lazy: The lazy that the elements were gathered from.
        index: Columns of the elements, (..., elements).
        grad: Gradient of the elements, (..., elements).
    """
    columns, width = index.shape[-1], lazy.like.shape[-1]

    def func(grad: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        grad, index = grad.reshape(-1, columns), index.reshape(-1, columns)
        return grad.new_zeros(grad.shape[0], width).scatter_add(1, index, grad)

    shape = index.shape
    args = (Operand(grad.contiguous(), shape), Operand(index.contiguous(), shape))
    like = torch.empty(lazy.like.shape, dtype=grad.dtype, device="meta")
    return RowOperator(lazy.source, like, func, args, {})


def chosen(lazy: LazyLogits, index: torch.Tensor) -> LazyLogits:
    """Chooses rows of a lazy: lazy[index].

    Args:
        lazy: The lazy.
        index: A mask of the leading dimensions, or numbers of the first.
    """
    numbers = _places_of(lazy.like.shape, index)
    like = lazy.like.new_empty((*numbers.shape[:-1], lazy.like.shape[-1]))
    return ChosenRows(lazy, like, lambda values: values[index], numbers.reshape(-1), is_view=False)


def put_back(lazy: LazyLogits, shape: torch.Size, index: torch.Tensor) -> LazyLogits:
    """Returns the gradient of a lazy from that of its chosen rows.

    Args:
        lazy: The gradient of the chosen rows.
        shape: Shape of the lazy that the rows were chosen from.
        index: The index of `chosen`.
    """
    numbers = _places_of(shape, index).reshape(-1)
    places = torch.full((shape[:-1].numel(),), -1)
    places[numbers] = torch.arange(numbers.numel())
    like = lazy.like.new_empty(shape)

    def put(values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(shape).index_put((index,), values, accumulate=True)

    return PutRows(lazy.source, like, [lazy], places, put)


def _places_of(shape: torch.Size, index: torch.Tensor) -> torch.Tensor:
    return torch.arange(shape[:-1].numel()).view(*shape[:-1], 1)[index.cpu()]
