"""Operators under which logits stay deferred, and the operators of their backward.

Logits are rows over a vocabulary, the last dimension. An operator under which they stay deferred is
called a step. It either arranges rows or changes every element by itself. The last dimension of its
result is the full vocabulary again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

_aten = torch.ops.aten

ORDER_KEEPING_STEPS = frozenset(
    {
        _aten.view.default,
        _aten._unsafe_view.default,
        _aten._reshape_alias.default,
        _aten.unsqueeze.default,
        _aten.squeeze.default,
        _aten.squeeze.dim,
        _aten.squeeze.dims,
    }
)
"""Steps that give the same rows in the same order, in another shape."""

_CHOOSING_STEPS = frozenset({_aten.slice.Tensor, _aten.select.int})
ROW_STEPS = ORDER_KEEPING_STEPS | _CHOOSING_STEPS
"""Steps that arrange or choose rows."""
VIEW_STEPS = ROW_STEPS - {_aten._unsafe_view.default}
"""Steps whose result shares memory with their input."""

_SCALINGS = frozenset({_aten.mul.Tensor, _aten.div.Tensor})
_SHIFTS = frozenset({_aten.add.Tensor, _aten.sub.Tensor})
UNDONE_BY_NOTHING = _SHIFTS | {_aten.clone.default}
"""Steps whose gradient passes unchanged: autograd runs no operator on it."""

SAME_VALUES = frozenset({_aten.detach.default, _aten.alias.default})
"""Operators that give the same values in the same memory."""


def stays_uncomputed(
    like: torch.Tensor, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> torch.Tensor | None:
    """Returns the result's shape, strides and dtype on the meta device if `func` is a step.

    Args:
        like: The logits, on the meta device.
        func: An operator.
        args: Positional arguments but the first.
        kwargs: Keyword arguments.

    Returns:
        A meta tensor; None if `func` is no step with these arguments.
    """
    vocabulary = like.shape[-1]
    if func in _SCALINGS or func in _SHIFTS:
        allowed = len(args) == 1 and type(args[0]) in (int, float) and not kwargs
    elif func is _aten._to_copy.default:
        allowed = not args and _only_casts(kwargs)
        kwargs = {key: value for key, value in kwargs.items() if key != "device"}  # which stays
    elif func is _aten.clone.default:
        allowed = not args
    else:
        allowed = func in ROW_STEPS or func in (_aten.tanh.default, _aten.neg.default)
    if not allowed:
        return None
    result: torch.Tensor = func(like, *args, **kwargs)
    if result.dim() == 0 or result.shape[-1] != vocabulary or not result.is_floating_point():
        return None
    if func in _CHOOSING_STEPS:
        dim = (args[0] if args else 0) % like.dim()
        if dim == like.dim() - 1 and result.shape != like.shape:
            return None
    if func is _aten.unsqueeze.default and args[0] % (like.dim() + 1) == like.dim():
        return None
    if func not in ROW_STEPS and result.dtype != like.dtype and func is not _aten._to_copy.default:
        return None
    return result


def _only_casts(kwargs: Mapping[str, Any]) -> bool:
    """Whether a copy changes the dtype only; the caller has checked the device."""
    return (
        kwargs.get("layout") in (None, torch.strided)
        and not kwargs.get("pin_memory")
        and kwargs.get("memory_format") in (None, torch.preserve_format, torch.contiguous_format)
    )


def undoes(
    step: Any,
    step_args: tuple[Any, ...],
    before: torch.Tensor,
    after: torch.Tensor,
    func: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    is_result: Callable[[Any], bool],
) -> bool:
    """Whether `func` computes the gradient of a step's input from that of its result.

    Args:
        step: The step's operator.
        step_args: The step's positional arguments but the first.
        before: Shape and dtype of the step's input, on the meta device.
        after: Shape and dtype of the gradient of the step's result, on the meta device.
        func: The operator on the gradient.
        args: Positional arguments of `func`, without the gradient.
        kwargs: Keyword arguments of `func`.
        is_result: Whether a tensor is the step's result.
    """
    if step in ORDER_KEEPING_STEPS:
        return (
            func in ORDER_KEEPING_STEPS and not kwargs and func(after, *args).shape == before.shape
        )
    if step in _SCALINGS:
        return func is step and args == step_args and not kwargs
    if step is _aten._to_copy.default:
        return func is _aten._to_copy.default and kwargs.get("dtype") == before.dtype and not args
    if step is _aten.neg.default:
        return func is step
    if step is _aten.tanh.default:
        return func is _aten.tanh_backward.default and is_result(args[0])
    if step is _aten.slice.Tensor:
        return func is _aten.slice_backward.default and _slice(args[0], args[1:]) == _slice(
            before.shape, step_args
        )
    if step is _aten.select.int:
        return func is _aten.select_backward.default and (
            list(args[0]) == list(before.shape)
            and args[1] % before.dim() == step_args[0] % before.dim()
            and args[2] % before.shape[args[1]] == step_args[1] % before.shape[args[1]]
        )
    return False


def _slice(sizes: Any, args: tuple[Any, ...]) -> tuple[tuple[int, ...], int, tuple[int, int, int]]:
    """Normalises the arguments of a slice."""
    dim, start, end, step = args + (0, None, None, 1)[len(args) :]
    dim %= len(sizes)
    return tuple(sizes), dim, slice(start, end, step).indices(sizes[dim])
