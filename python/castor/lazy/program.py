"""The operations that would have given tensors their values, recorded to be run later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from castor.errors import UsageError


@dataclass(frozen=True, kw_only=True, eq=False)
class Value:
    """Stands for a tensor of the program: `meta` has its shape, strides and storage, no memory."""

    meta: torch.Tensor

    @property
    def memory(self) -> int:
        """Equal for values that are views of the same memory."""
        return int(self.meta.untyped_storage()._cdata)

    @property
    def fills_its_memory(self) -> bool:
        """Whether it is all of its memory, in order."""
        return (
            self.meta.is_contiguous() and self.meta.nbytes == self.meta.untyped_storage().nbytes()
        )


@dataclass(frozen=True, kw_only=True)
class RandomState:
    """The state of a generator before an operation.

    `state` is None if it stands where the operation before left it.
    """

    generator: torch.Generator
    state: torch.Tensor | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Operation:
    """One call of the dispatcher. Tensors of the program appear as Values among the arguments."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: frozenset[Value]
    outputs: tuple[Value | None, ...]
    """In the order of the flattened result; None where that is no tensor."""
    writes: frozenset[int]
    """Memory (Value.memory) that it changes in place."""
    random: RandomState | None
    constants: tuple[tuple[torch.Tensor, int], ...]
    """Tensors with values among the arguments, and the version each had when recorded."""

    def memories(self) -> set[int]:
        """All memory it reads, writes or makes."""
        values = [*self.inputs, *(out for out in self.outputs if out is not None)]
        return {value.memory for value in values} | self.writes

    def replaces(self) -> Value | None:
        """The value that it makes anew, all of its memory, without reading what was there."""
        target = self.args[0] if self.function in _REPLACING else None
        if not isinstance(target, Value) or not target.fills_its_memory:
            return None
        others = self.inputs - {target}
        return None if any(value.memory == target.memory for value in others) else target


@dataclass(kw_only=True, eq=False)
class Program:
    """The operations on lazy tensors, in order.

    Random numbers come from the same places of the same streams as in eager execution, because
    every random operation is replayed, in order.
    """

    operations: list[Operation] = field(default_factory=list)
    _markers: dict[torch.Generator, torch.Tensor] = field(default_factory=dict)

    def mark(self, function: Any, generator: torch.Generator | None) -> RandomState | None:
        """Returns the generator's state if `function` draws from one.

        The stream is not advanced by what is deferred. Instead one number is drawn, so that a later
        manual_seed shows, even one with the seed that was set before.
        """
        if torch.Tag.nondeterministic_seeded not in function.tags:
            return None
        generator = generator if generator is not None else torch.default_generator
        state = generator.get_state()
        marker = self._markers.get(generator)
        follows = marker is not None and torch.equal(marker, state)
        torch.rand((), generator=generator)
        self._markers[generator] = generator.get_state()
        return RandomState(generator=generator, state=None if follows else state)

    def check_constants(self) -> None:
        """Raises UsageError if a tensor that an operation takes its values from has changed."""
        for operation in self.operations:
            for tensor, version in operation.constants:
                if tensor._version != version:
                    raise UsageError(
                        f"a tensor of shape {tuple(tensor.shape)} that {operation.function} of a "
                        "lazy model uses was changed in place before boost; give the model a copy "
                        "of its own (tensor.clone())"
                    )

    def needed_for(self, memories: set[int], *, draws: bool = False) -> list[Operation]:
        """The operations that give this memory its values, in order.

        Not those whose work a later one replaces wholly, except, with `draws`, whatever draws
        random numbers, and what that depends on.
        """
        replaced = self.replaced()
        needed, wanted = [], set(memories)
        for operation in reversed(self.operations):
            made = {out.memory for out in operation.outputs if out is not None}
            if (made | operation.writes) & wanted or (draws and operation.random):
                needed.append(operation)
                wanted |= operation.memories()
                wanted.discard(replaced.get(operation, 0))
        return needed[::-1]

    def replaced(self) -> dict[Operation, int]:
        """Operations that give some memory new values, whatever it held, and that memory."""
        dtypes: dict[int, set[torch.dtype]] = {}
        for operation in self.operations:
            for value in (*operation.inputs, *operation.outputs):
                if value is not None:
                    dtypes.setdefault(value.memory, set()).add(value.meta.dtype)
        found = {operation: operation.replaces() for operation in self.operations}
        return {
            operation: value.memory
            for operation, value in found.items()
            if value is not None and len(dtypes[value.memory]) == 1
        }

    @contextmanager
    def generators_followed(self) -> Iterator[None]:
        """Inside, everything random is run.

        Generators stand afterwards where eager execution would have left them if nobody drew from
        them since the recording, and where they stood before otherwise.
        """
        before = {gen: gen.get_state() for gen in self._markers}
        yield
        for generator, marker in self._markers.items():
            if not torch.equal(before[generator], marker):
                generator.set_state(before[generator])


_REPLACING = frozenset(
    {
        torch.ops.aten.copy_.default,
        torch.ops.aten.fill_.Scalar,
        torch.ops.aten.fill_.Tensor,
        torch.ops.aten.normal_.default,
        torch.ops.aten.uniform_.default,
        torch.ops.aten.zero_.default,
    }
)
"""Operations that give their first argument new values, whatever it held."""


def trace(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs a function on the meta tensors of the Values among its arguments.

    Devices become "meta" and generators are left out, so that nothing is computed or drawn.
    """

    def to_meta(argument: Any) -> Any:
        if isinstance(argument, Value):
            return argument.meta
        if isinstance(argument, torch.Tensor) and not argument.is_meta:
            return torch.empty_strided(
                argument.shape, argument.stride(), dtype=argument.dtype, device="meta"
            )
        return argument

    leaves, spec = tree_flatten((args, kwargs))
    args, kwargs = tree_unflatten([to_meta(leaf) for leaf in leaves], spec)
    kwargs = {k: v for k, v in kwargs.items() if k not in ("generator", "pin_memory")}
    if kwargs.get("device") is not None or _is_factory(function):
        kwargs["device"] = torch.device("meta")
    return function(*args, **kwargs)


def _is_factory(function: Any) -> bool:
    arguments = function._schema.arguments
    return any(a.name == "device" for a in arguments) and not any(
        "Tensor" in str(a.type) for a in arguments
    )
