"""The operations that would have given tensors their values, recorded to be run later."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from castor.errors import UsageError


@dataclass(frozen=True, kw_only=True, eq=False)
class Value:
    """Stands for a tensor of the program: `meta` has its shape, strides and storage, no memory."""

    meta: torch.Tensor

    @property
    def memory(self) -> int:
        """Equal for values that are views of the same memory."""
        return int(self.meta.untyped_storage()._cdata)


@dataclass(frozen=True, kw_only=True)
class RandomState:
    """Where a generator stands before an operation.

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


@dataclass(kw_only=True, eq=False)
class Program:
    """What happened to lazy tensors, in order.

    Random numbers come from the same places of the same streams as in eager execution, because
    every random operation is replayed, in order.
    """

    operations: list[Operation] = field(default_factory=list)
    _markers: dict[torch.Generator, torch.Tensor] = field(default_factory=dict)

    def mark(self, function: Any, generator: torch.Generator | None) -> RandomState | None:
        """Where the generator stands, if `function` draws from one.

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

    def needed_for(self, memories: set[int]) -> list[Operation]:
        """The operations that give this memory its values, in order."""
        needed, wanted = [], set(memories)
        for operation in reversed(self.operations):
            made = {out.memory for out in operation.outputs if out is not None}
            if (made | operation.writes) & wanted:
                needed.append(operation)
                wanted |= operation.memories()
        return needed[::-1]

    def replay(
        self,
        results: Iterable[Value],
        *,
        place: Callable[[Value], torch.Tensor | None] = lambda _: None,
    ) -> dict[Value, torch.Tensor]:
        """Computes values.

        Generators stand afterwards where eager execution would have left them if nobody drew from
        them since the recording, and where they stood before otherwise.

        Args:
            results: What to compute. Everything random is computed too, for its place in the
                stream, and forgotten at once.
            place: Gives a tensor to hold a value that is about to be made, of the same shape,
                strides and dtype; None to allocate. Only asked for values that are no views.

        Returns:
            The results. Besides them at most the values that a later operation reads are in memory.
        """
        self.check_constants()
        wanted = list(results)
        operations = self._needed_in_order(wanted)
        last_use = {v: i for i, op in enumerate(operations) for v in (*op.inputs, *op.outputs) if v}
        before = {gen: gen.get_state() for gen in self._markers}
        known: dict[Value, torch.Tensor] = {}
        kept = set(wanted)
        with torch.no_grad():
            for i, operation in enumerate(operations):
                _run(operation, known, place)
                for value in (*operation.inputs, *operation.outputs):
                    if value is not None and value not in kept and last_use[value] == i:
                        known.pop(value, None)
        for generator, marker in self._markers.items():
            if not torch.equal(before[generator], marker):
                generator.set_state(before[generator])
        return {value: known[value] for value in wanted}

    def compute(self, value: Value) -> torch.Tensor | None:
        """The value, from nothing but what it depends on; None if that draws random numbers."""
        self.check_constants()
        operations = self.needed_for({value.memory})
        if any(operation.random for operation in operations):
            return None
        known: dict[Value, torch.Tensor] = {}
        with torch.no_grad():
            for operation in operations:
                _run(operation, known, lambda _: None)
        return known[value]

    def _needed_in_order(self, wanted: list[Value]) -> list[Operation]:
        """What `wanted` and whatever draws random numbers depend on."""
        memories = {value.memory for value in wanted}
        for operation in self.operations:
            if operation.random:
                memories |= operation.memories()
        return self.needed_for(memories)


def _run(
    operation: Operation,
    known: dict[Value, torch.Tensor],
    place: Callable[[Value], torch.Tensor | None],
) -> None:
    if operation.random and operation.random.state is not None:
        operation.random.generator.set_state(operation.random.state)
    made = operation.outputs[0] if len(operation.outputs) == 1 else None
    is_new = made is not None and all(made.memory != value.memory for value in operation.inputs)
    target = place(made) if made is not None and is_new else None
    if target is not None and operation.function in _UNINITIALISED:
        result: Any = target
    else:
        args, kwargs = tree_map_only(
            Value, lambda value: known[value], (operation.args, operation.kwargs)
        )
        result = operation.function(*args, **kwargs)
        if target is not None:
            result = target.copy_(result)
    for value, tensor in zip(operation.outputs, tree_flatten(result)[0], strict=True):
        if value is not None:
            known[value] = tensor


_UNINITIALISED = frozenset(
    {
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.new_empty.default,
        torch.ops.aten.new_empty_strided.default,
    }
)


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
