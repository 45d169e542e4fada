"""A tensor without values: it records what is done to it."""

from __future__ import annotations

import sys
import traceback
import warnings
import weakref
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from castor.errors import UsageError
from castor.lazy import replay
from castor.lazy.program import Operation, Program, Value, trace

_NEEDS_VALUES = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__}
_NEEDS_MEMORY = {
    torch.Tensor.data_ptr,
    torch.Tensor.untyped_storage,
    torch.Tensor.storage,
    torch.Tensor.share_memory_,
}
_NOT_THE_USERS = {"torch", "castor", *sys.stdlib_module_names}
"""Packages whose functions call back into a user's, or are called by them."""

_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class LazyTensor(torch.Tensor):
    """A CPU tensor whose values a recording will compute.

    Reading a value computes it from what it depends on. Where that draws random numbers, everything
    recorded so far is computed at once, with a warning that names the operation.
    """

    _recording: Recording
    _value: Value
    _computed: torch.Tensor | None

    @staticmethod
    def __new__(cls, recording: Recording, value: Value) -> LazyTensor:
        """A tensor that looks like `value`."""
        meta = value.meta
        tensor: LazyTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.size(),
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            layout=meta.layout,
            device=torch.device("cpu"),
        )
        tensor._recording, tensor._value, tensor._computed = recording, value, None
        recording.tensors[id(tensor)] = tensor
        return tensor

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Says what it is, without computing it."""
        return f"LazyTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """A copy that will have the value this one has now."""
        if id(self) not in memo:
            with torch.no_grad():
                copy = self.detach().clone()
            if isinstance(self, nn.Parameter):
                copy = nn.Parameter(copy, self.requires_grad)
            memo[id(self)] = copy
        result: torch.Tensor = memo[id(self)]
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused: there is nothing to save yet."""
        raise UsageError("a lazy tensor has no values to save; boost the model first")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Handles what does not go through the dispatcher."""
        if func == _SET_DATA:  # made anew at each access, so not `is`
            return _set_data(*args)
        if func in _NEEDS_VALUES:
            with _disable_current_modes():  # inside the context they would record the computing
                return func(_values_of(args[0], func), *args[1:], **(kwargs or {}))
        if func in _NEEDS_MEMORY:
            raise UsageError(
                f"{func.__name__}() of a tensor in a lazy model, which has no memory yet; boost "
                "the model first, or build it outside LazyInitContext"
            )
        # Not super()'s, which makes a LazyTensor of every result, also of one that has values.
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Records the operation."""
        return record(func, args, kwargs or {})


class Recording:
    """A program and the lazy tensors that are still alive."""

    def __init__(self) -> None:
        self.program = Program()
        # By id, which is theirs as long as they live: tensors do not compare by identity.
        self.tensors: weakref.WeakValueDictionary[int, LazyTensor] = weakref.WeakValueDictionary()
        self.given_up = False
        """Whether everything was computed; then what follows runs eagerly, to keep the order."""

    def compute_all(self, why: str) -> None:
        """Computes every lazy tensor; warns once."""
        if self.given_up:
            return
        warnings.warn(
            f"LazyInitContext computes the tensors made so far, and runs what follows eagerly: "
            f"{why}{_user_line()}. The weights are what they should be; the memory is that of "
            "eager construction",
            stacklevel=2,
        )
        tensors = [tensor for tensor in self.tensors.values() if tensor._computed is None]
        values: dict[Value, torch.Tensor] = {}
        replay.run(self.program, [tensor._value for tensor in tensors], values.__setitem__)
        for tensor in tensors:
            tensor._computed = values[tensor._value]
        self.given_up = True


def record(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], recording: Recording | None = None
) -> Any:
    """Adds an operation to the recording of its lazy arguments, or to `recording` without such.

    Returns:
        What `func` returns, with lazy tensors in the place of tensors.
    """
    leaves, spec = tree_flatten((args, kwargs))
    lazy = {id(t): t for t in leaves if isinstance(t, LazyTensor) and t._computed is None}
    recordings = {tensor._recording for tensor in lazy.values()}
    if recording is None and not recordings:
        return _run_now(func, leaves, spec)
    if len(recordings) > 1:
        raise UsageError(
            f"{func} uses tensors of two LazyInitContexts; boost one of the models first"
        )
    recording = recordings.pop() if recordings else recording
    assert recording is not None
    written = [t for t in _written(func, args, kwargs) if isinstance(t, torch.Tensor)]
    if any(id(tensor) not in lazy for tensor in written):
        return _run_now(func, leaves, spec)
    constants = [_plain(t) for t in leaves if isinstance(t, torch.Tensor) and id(t) not in lazy]
    args, kwargs = tree_unflatten(
        [lazy[id(t)]._value if id(t) in lazy else _plain(t) for t in leaves], spec
    )
    shapes = [(t._value.meta, t.shape, t.stride()) for t in lazy.values()]
    try:
        result = trace(func, args, kwargs)
    except (NotImplementedError, RuntimeError):  # it needs values, or is wrong: torch will say
        return _run_now(func, leaves, spec)
    if any(meta.shape != shape or meta.stride() != stride for meta, shape, stride in shapes):
        raise UsageError(
            f"{func} changes the shape of a tensor in place, which cannot be put off; build this "
            "model outside LazyInitContext"
        )
    if not lazy and _has_argument(func, "dtype"):
        kwargs = {**kwargs, "dtype": result.dtype}  # the default may be another one by then
    by_meta = {id(tensor._value.meta): tensor for tensor in lazy.values()}
    results, result_spec = tree_flatten(result)
    for i, meta in enumerate(results):
        if isinstance(meta, torch.Tensor):
            known = by_meta.get(id(meta))
            results[i] = known if known is not None else LazyTensor(recording, Value(meta=meta))
    recording.program.operations.append(
        Operation(
            function=func,
            args=args,
            kwargs=kwargs,
            inputs=frozenset(tensor._value for tensor in lazy.values()),
            outputs=tuple(r._value if isinstance(r, LazyTensor) else None for r in results),
            writes=frozenset(lazy[id(tensor)]._value.memory for tensor in written),
            random=recording.program.mark(func, kwargs.get("generator")),
            constants=tuple((tensor, tensor._version) for tensor in constants),
        )
    )
    return tree_unflatten(results, result_spec)


def _run_now(func: Any, leaves: list[Any], spec: Any) -> Any:
    """Runs a function on values."""
    values = [_values_of(t, func) if isinstance(t, LazyTensor) else t for t in leaves]
    lazy_of = {id(v): t for t, v in zip(leaves, values, strict=True) if isinstance(t, LazyTensor)}
    args, kwargs = tree_unflatten(values, spec)
    written = {id(tensor) for tensor in _written(func, args, kwargs)}
    for value, tensor in ((v, t) for v, t in zip(values, leaves, strict=True) if id(v) in written):
        if isinstance(tensor, LazyTensor) and tensor._computed is not value:
            # Written to: the lazy tensor and its views must see it.
            tensor._recording.compute_all(f"{name_of(func)} cannot be put off")
            return _run_now(func, leaves, spec)
    result = func(*args, **kwargs)
    return tree_map_only(torch.Tensor, lambda tensor: lazy_of.get(id(tensor), tensor), result)


def _values_of(tensor: LazyTensor, func: Any) -> torch.Tensor:
    if tensor._computed is None:
        value = replay.compute(tensor._recording.program, tensor._value)
        if value is not None:
            return value
        tensor._recording.compute_all(f"{name_of(func)} reads a value that random numbers decide")
    assert tensor._computed is not None
    return tensor._computed


def name_of(func: Any) -> str:
    """Returns the name by which a user calls an operation of the dispatcher."""
    name = str(getattr(func, "_overloadpacket", getattr(func, "__name__", func)))
    return "item()" if name == "aten._local_scalar_dense" else name


def _user_line() -> str:
    """The innermost line under way that is not torch's, castor's or the standard library's."""
    for frame, line in traceback.walk_stack(None):  # from the inside out
        # By module, not by path: a user's script may lie in a folder called castor.
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _NOT_THE_USERS:
            return f", in {frame.f_code.co_name} ({frame.f_code.co_filename}:{line})"
    return ""


def _plain(leaf: Any) -> Any:
    return leaf._computed if isinstance(leaf, LazyTensor) else leaf


def _has_argument(func: Any, name: str) -> bool:
    return any(argument.name == name for argument in func._schema.arguments)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that `func` changes in place."""
    found = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[i] if i < len(args) else kwargs.get(argument.name))
    return tree_flatten(found)[0]


def _set_data(tensor: torch.Tensor, new: torch.Tensor) -> None:
    """`tensor.data = new`: the tensor becomes another view of new's memory."""
    if not isinstance(tensor, LazyTensor):
        raise UsageError("a tensor with values was given a lazy one's data; boost the model first")
    lazy: LazyTensor = (
        new
        if isinstance(new, LazyTensor)
        else record(torch.ops.aten.alias.default, (new,), {}, tensor._recording)
    )
    with torch._C.DisableTorchFunctionSubclass():
        _SET_DATA(tensor, lazy)
    tensor._value, tensor._computed = lazy._value, lazy._computed
