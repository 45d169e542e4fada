"""Deferred tensors: torch sees shape and dtype, and values are computed when they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils._pytree import tree_leaves, tree_map

from castor.activations import operators
from castor.activations.lazy_logits import LazyLogits, Step
from castor.activations.row_operators import lazily
from castor.errors import OutOfMemoryError, UsageError

_Tensor = torch.Tensor

_READ_A_STORAGE = frozenset(
    {
        _Tensor.numpy,
        _Tensor.tolist,
        _Tensor.__array__,
        _Tensor.__dlpack__,
        _Tensor.__deepcopy__,
        _Tensor.__reduce_ex__,
        _Tensor.data_ptr,
        _Tensor.untyped_storage,
        _Tensor.storage,
        _Tensor._typed_storage,
        _Tensor.share_memory_,
        _Tensor.is_set_to,
    }
)
"""Tensor methods that read memory without an operator."""


TAKES_ALONG_DIM = (torch.take_along_dim, _Tensor.take_along_dim)
_TAKEN = frozenset(
    {F.cross_entropy, torch.gather, _Tensor.gather, *TAKES_ALONG_DIM, _Tensor.__getitem__}
)
"""Functions that may run in tiles; torch's own backward needs a tensor of all logits' size."""


class Uncomputed(torch.Tensor):
    """Tensor whose values are computed when they are read.

    It acts below autograd: its graph is that of any tensor. Each operator of torch is given the
    values, unless a subclass can do without them (`_stays_uncomputed`).
    """

    @staticmethod
    def __new__(cls, like: torch.Tensor, device: torch.device, *_: Any) -> Uncomputed:
        """Makes a tensor of the shape, strides and dtype of `like`."""
        tensor: Uncomputed = torch.Tensor._make_wrapper_subclass(
            cls, like.size(), strides=like.stride(), dtype=like.dtype, device=device
        )
        # Code that asks for an address without an operator gets an error, not a null pointer.
        torch._C._set_throw_on_mutable_data_ptr(tensor)
        return tensor

    def values(self) -> torch.Tensor:
        """Returns the values, without a graph, in memory that every tensor over them shares."""
        raise NotImplementedError

    def expose(self) -> None:
        """Notes that the memory of the values may be written from now on."""
        raise NotImplementedError

    def lazy(self) -> LazyLogits | None:
        """Returns the lazy logits behind the values; None if the values may have been written."""
        raise NotImplementedError

    def _stays_uncomputed(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> torch.Tensor | None:
        """Returns the result of an operator on this tensor if it needs no values."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs loss functions in tiles; functions that read memory get a tensor that has some."""
        kwargs = kwargs or {}
        if func in _TAKEN:
            from castor.activations import functions

            result = functions.in_tiles(func, args, kwargs)
            if result is not None:
                return result
        elif func is _Tensor.__repr__:
            return _described(args[0], args[1:], kwargs)
        elif func in _READ_A_STORAGE:
            args, kwargs = tree_map(with_memory, args), tree_map(with_memory, kwargs)
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs an operator below autograd: without values, in tiles, or on the values."""
        kwargs = kwargs or {}
        if args and isinstance(args[0], Uncomputed):
            result = args[0]._stays_uncomputed(func, args[1:], kwargs)
            if result is not None:
                return result
        if not func._schema.is_mutable and (result := _in_tiles(func, args, kwargs)) is not None:
            return result
        wrapped: dict[int, Uncomputed] = {}
        exposes = func._schema.is_mutable or any(r.alias_info for r in func._schema.returns)

        def values_of(value: Any) -> Any:
            if not isinstance(value, Uncomputed):
                return value
            try:
                values = value.values()
            except OutOfMemoryError as error:
                error.asked_by(f"{func} reads all values of logits {tuple(value.shape)} at once")
                raise
            wrapped[id(values)] = value
            if exposes:
                value.expose()
            return values

        result = func(*tree_map(values_of, args), **tree_map(values_of, kwargs))
        if not func._schema.is_mutable:
            return result
        for tensor in wrapped.values():
            if tensor.shape != tensor.values().shape or tensor.dtype != tensor.values().dtype:
                raise UsageError(
                    f"{func} changes the shape of logits in place, which castor's deferred logits "
                    "cannot follow; pass GeminiPlugin(tile_logits=False)"
                )
        return tree_map(lambda value: wrapped.get(id(value), value), result)


class DeferredLogits(Uncomputed):
    """Deferred logits, or the deferred result of operators on them."""

    def __init__(self, like: torch.Tensor, device: torch.device, logits: LazyLogits) -> None:
        self.logits = logits

    @classmethod
    def of(cls, logits: LazyLogits) -> DeferredLogits:
        """Makes a tensor over `logits`."""
        return cls(logits.like, logits.source.hidden.device, logits)

    def values(self) -> torch.Tensor:
        """See Uncomputed.

        Raises:
            UsageError: The values were not computed before, and the weights have changed.
        """
        return self.logits.value()

    def expose(self) -> None:
        """See Uncomputed."""
        self.logits.expose()

    def lazy(self) -> LazyLogits | None:
        """See Uncomputed."""
        return self.logits if self.logits.clean else None

    def _stays_uncomputed(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> torch.Tensor | None:
        if func in operators.SAME_VALUES:
            return DeferredLogits.of(self.logits)
        logits = self.logits
        if not logits.clean or kwargs.get("device") not in (None, self.device):
            return None
        like = operators.stays_uncomputed(logits.like, func, args, kwargs)
        if like is None:
            return None
        step = Step(func, args, dict(kwargs))
        return DeferredLogits.of(LazyLogits(logits.source, like, logits, step))


def _in_tiles(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Returns an operator's result as tensors without values; None if it needs the values."""
    if any(isinstance(value, Uncomputed) for value in kwargs.values()):
        return None
    lazies = {id(v): v.lazy() for v in tree_leaves(args) if isinstance(v, Uncomputed)}
    if None in lazies.values():
        return None
    found = tree_map(lambda v: lazies[id(v)] if isinstance(v, Uncomputed) else v, args)
    result = lazily(func, found, kwargs)
    if isinstance(result, list | tuple):
        return type(result)(map(_as_tensor, result))
    return None if result is None else _as_tensor(result)


def _as_tensor(value: Any) -> Any:
    return DeferredLogits.of(value) if isinstance(value, LazyLogits) else value


class _WithMemory(torch.autograd.Function):
    """Makes a tensor with memory of a deferred one, in the graph."""

    @staticmethod
    def forward(ctx: Any, tensor: Uncomputed) -> torch.Tensor:
        """Returns the values."""
        return tensor.values().detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """Returns the gradient unchanged."""
        return grad


def with_memory(value: Any) -> Any:
    """Returns a tensor with memory for a deferred one, in the graph; other values unchanged."""
    if not isinstance(value, Uncomputed):
        return value
    value.expose()
    if value.requires_grad and torch.is_grad_enabled():
        return _WithMemory.apply(value)
    return value.values().detach().requires_grad_(value.requires_grad)


def _described(tensor: Uncomputed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Returns the text that print shows: the values, or only the shape if they are out of reach."""
    try:
        values = with_memory(tensor)
    except UsageError:
        shape, dtype = tuple(tensor.shape), tensor.dtype
        return f"{type(tensor).__name__}(not computed, shape={shape}, dtype={dtype})"
    description: str = torch.Tensor.__repr__(values, *args, **kwargs)
    return description
