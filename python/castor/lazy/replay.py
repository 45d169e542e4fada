"""Runs what was recorded, with no more in memory than it takes."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from castor.lazy.program import Operation, Program, Value

_OWN_PAGES_BYTES = 2**16


def run(
    program: Program,
    results: Iterable[Value],
    done: Callable[[Value, torch.Tensor], None],
    *,
    place: Callable[[Value], torch.Tensor | None] = lambda _: None,
) -> None:
    """Computes values, and gives each to `done` as soon as nothing will change or read it.

    Everything random is computed too, for its place in the stream, and forgotten at once. Besides
    what `place` gives and `done` keeps, no more is held than what a later operation needs: values
    that one replaces wholly, as the second of two initialisers does, are not.

    Args:
        program: What was recorded.
        results: What to compute. What draws no random numbers is computed in this order.
        done: Called once for each.
        place: Gives a contiguous tensor for a result that is about to be made, of its size and
            dtype; None to allocate. Only asked for results that fill their memory.
    """
    program.check_constants()
    wanted = dict.fromkeys(results)
    position: dict[int, int] = {}
    for i, value in enumerate(wanted):
        position.setdefault(value.memory, i)
    operations = program.needed_for(set(position), draws=True)
    with program.generators_followed():
        _execute(program, _one_after_the_other(operations, position), wanted, done, place)


def compute(program: Program, value: Value) -> torch.Tensor | None:
    """A value, from nothing but what it depends on; None if that draws random numbers."""
    program.check_constants()
    operations = program.needed_for({value.memory})
    if any(operation.random for operation in operations):
        return None
    found: dict[Value, torch.Tensor] = {}
    _execute(program, operations, {value}, found.__setitem__, lambda _: None)
    return found[value]


def _execute(
    program: Program,
    operations: list[Operation],
    wanted: Iterable[Value],
    done: Callable[[Value, torch.Tensor], None],
    place: Callable[[Value], torch.Tensor | None],
) -> None:
    wanted_in: dict[int, list[Value]] = {}
    for value in wanted:
        wanted_in.setdefault(value.memory, []).append(value)
    lives = _Lives(operations, program.replaced())
    contents = _Contents()
    with torch.no_grad():
        for i, operation in enumerate(operations):
            lasting = lives.lasting(i) & wanted_in.keys()
            _run(operation, contents, _Maker(place=place, lasting=lasting))
            for memory in lives.ended[i]:
                if memory in lasting:
                    for value in wanted_in.pop(memory):
                        done(value, contents.tensor(value))
                contents.forget(memory)


def _one_after_the_other(
    operations: list[Operation], position: Mapping[int, int]
) -> list[Operation]:
    """Another order that gives the same values, in which fewer are under way at the same time.

    What draws random numbers, and has to do with what does, goes first; random draws stay in order.
    The rest are sets of operations that have nothing to do with each other, as of tensors read from
    files. Sets are in the order of `position`, whatever order several threads recorded them in:
    ranks finish the same parameter at the same time.

    Args:
        operations: What is to run, as it was recorded.
        position: Positions of the results, by the memory that they lie in.
    """
    sets = _independent(operations, position)
    drawn = {id(op) for together in sets if any(op.random for op in together) for op in together}
    ordered: list[Operation] = []
    between: list[Operation] = []
    """Operations since the last random draw."""
    for operation in operations:
        if id(operation) not in drawn:
            continue
        if operation.random:
            ordered += [op for together in _independent(between, position) for op in together]
            ordered.append(operation)
            between = []
        else:
            between.append(operation)
    ordered += [op for together in _independent(between, position) for op in together]
    return ordered + [op for together in sets for op in together if id(op) not in drawn]


def _independent(operations: list[Operation], position: Mapping[int, int]) -> list[list[Operation]]:
    """Splits operations into sets that share no memory, in the order of their first results."""
    root: dict[int, int] = {}

    def find(memory: int) -> int:
        while root.setdefault(memory, memory) != memory:
            root[memory] = root[root[memory]]
            memory = root[memory]
        return memory

    for operation in operations:
        first, *others = operation.memories()
        for other in others:
            root[find(other)] = find(first)
    sets: dict[int, list[Operation]] = {}
    for operation in operations:
        sets.setdefault(find(next(iter(operation.memories()))), []).append(operation)
    last = len(position)

    def first_result(together: list[Operation]) -> int:
        return min(position.get(memory, last) for op in together for memory in op.memories())

    return sorted(sets.values(), key=first_result)


class _Lives:
    """When the contents of memory are needed, in a run of operations.

    Memory has a life from its making, or from an operation that replaces what it held, to the last
    use before the next such operation.
    """

    def __init__(self, operations: list[Operation], replaced: dict[Operation, int]) -> None:
        self.ended: list[list[int]] = [[] for _ in operations]
        """By operation: memory whose life ends with it."""
        self._last_life: dict[int, int] = {}
        """By memory: the operation that its last life begins with, if another life went before."""
        next_use: dict[int, Operation] = {}
        for i in reversed(range(len(operations))):
            for memory in operations[i].memories():
                following = next_use.get(memory)
                if following is None or replaced.get(following) == memory:
                    self.ended[i].append(memory)
                next_use[memory] = operations[i]
            if (memory_replaced := replaced.get(operations[i])) is not None:
                self._last_life.setdefault(memory_replaced, i)
        self._memories = [operation.memories() for operation in operations]

    def lasting(self, i: int) -> set[int]:
        """Memory that operation i uses in its last life."""
        return {memory for memory in self._memories[i] if i >= self._last_life.get(memory, 0)}


@dataclass(frozen=True, kw_only=True)
class _Maker:
    """Makes memory for an operation."""

    place: Callable[[Value], torch.Tensor | None]
    lasting: set[int]
    """Memory that holds a result from its next making on."""

    def placed(self, value: Value) -> torch.Tensor | None:
        """A result's place, if it has one."""
        if value.memory not in self.lasting or not value.fills_its_memory:
            return None
        placed = self.place(value)
        return None if placed is None else placed.view(value.meta.shape)

    def make(self, value: Value) -> torch.Tensor:
        """Uninitialised memory for a value that fills it."""
        placed = self.placed(value)
        if placed is not None:
            return placed
        if value.memory in self.lasting:
            return torch.empty(value.meta.shape, dtype=value.meta.dtype)
        return in_own_pages(value.meta.shape, value.meta.dtype)


class _Contents:
    """The tensors of the values that are in memory."""

    def __init__(self) -> None:
        self._known: dict[int, dict[Value, torch.Tensor]] = {}
        self._whole: dict[int, torch.Tensor] = {}
        """Memory that was made for an operation that replaces what it holds."""

    def put(self, value: Value, tensor: torch.Tensor) -> None:
        self._known.setdefault(value.memory, {})[value] = tensor

    def tensor(self, value: Value, maker: _Maker | None = None) -> torch.Tensor:
        """The value's tensor; made by `maker` where its memory is about to be replaced."""
        tensor = self._known.get(value.memory, {}).get(value)
        if tensor is None:
            tensor = self._view(value, maker)
            self.put(value, tensor)
        return tensor

    def _view(self, value: Value, maker: _Maker | None) -> torch.Tensor:
        whole = self._whole.get(value.memory)
        if whole is None:
            assert maker is not None
            whole = self._whole[value.memory] = maker.make(value)
        meta = value.meta
        offset = whole.storage_offset() + meta.storage_offset()
        return whole.as_strided(meta.shape, meta.stride(), offset)

    def forget(self, memory: int) -> None:
        """Lets go of the memory."""
        self._known.pop(memory, None)
        self._whole.pop(memory, None)


def _run(operation: Operation, contents: _Contents, maker: _Maker) -> None:
    if operation.random and operation.random.state is not None:
        operation.random.generator.set_state(operation.random.state)
    made = operation.outputs[0] if len(operation.outputs) == 1 else None
    is_new = made is not None and all(made.memory != value.memory for value in operation.inputs)
    if made is not None and operation.function in _UNINITIALISED and made.fills_its_memory:
        result: Any = maker.make(made)
    else:
        target = maker.placed(made) if made is not None and is_new else None
        args, kwargs = tree_map_only(
            Value, lambda value: contents.tensor(value, maker), (operation.args, operation.kwargs)
        )
        result = operation.function(*args, **kwargs)
        if target is not None:
            result = target.copy_(result)
    for value, tensor in zip(operation.outputs, tree_flatten(result)[0], strict=True):
        if value is not None:
            contents.put(value, tensor)


def in_own_pages(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised memory whose pages go back to the system with it.

    malloc would keep those of large tensors.
    """
    num_bytes = shape.numel() * dtype.itemsize
    if num_bytes < _OWN_PAGES_BYTES:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=dtype).view(shape)


_UNINITIALISED = frozenset(
    {
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.new_empty.default,
        torch.ops.aten.new_empty_strided.default,
    }
)
