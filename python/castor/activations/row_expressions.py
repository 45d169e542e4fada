"""Lazy results of torch's operators on logits, row by row: log-probabilities, gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_map

from castor.activations.lazy_logits import (
    LazyLogits,
    Rows,
    Source,
    Tile,
    autograd_at_work,
    count,
    plainest,
    take,
    uses_below,
)
from castor.activations.recompute import drop_tensors
from castor.errors import OutOfMemoryError, UsageError


class Operand:
    """Tensor with values beside lazies, which has one number or one row for each of their rows.

    Args:
        tensor: The tensor.
        shape: Shape of the lazies, to which the tensor is broadcast.

    Raises:
        ValueError: The rows cannot be separated without copying more than a number for each.
    """

    def __init__(self, tensor: torch.Tensor, shape: torch.Size) -> None:
        with autograd_at_work(), torch.no_grad():  # the same versions, without its graph
            self._tensor = tensor.detach()
        self._version = tensor._version
        self._by_row: torch.Tensor | None = None  # None: all rows have the same values
        self.like = torch.empty_like(tensor, device="meta")
        if tensor.dim() > len(shape):
            raise ValueError
        lead = tensor.shape[:-1]
        if all(size == 1 for size in lead):
            self._same = self._tensor.reshape(tensor.shape[-1:])
            return
        columns = self._tensor
        if columns.shape[-1] > 1 and columns.stride(-1) == 0:
            columns = columns.narrow(-1, 0, 1)
        expanded = columns.expand(*shape[:-1], columns.shape[-1])
        if columns.shape[-1] == 1:
            self._by_row = expanded.reshape(-1, 1)
        else:
            try:
                self._by_row = expanded.view(-1, columns.shape[-1])
            except RuntimeError:  # strides that are not those of a matrix
                raise ValueError from None

    def _check(self) -> None:
        if self._tensor._version != self._version:
            raise UsageError(
                f"a tensor of shape {tuple(self._tensor.shape)} was written in place after it was "
                "combined with logits that castor computes when they are read "
                "(GeminiPlugin(tile_logits=...)); write to a copy, or pass tile_logits=False"
            )

    def values(self) -> torch.Tensor:
        """Returns all values, in the tensor's shape."""
        self._check()
        return self._tensor

    def rows(self, rows: Rows) -> torch.Tensor:
        """Returns the values of some rows, which broadcast to (rows, vocabulary)."""
        self._check()
        return self._same if self._by_row is None else take(self._by_row, rows)


class RowOperator(LazyLogits):
    """Result of an operator that computes each row from the same row of lazies and operands.

    Args:
        source: Source of the lazies.
        like: Shape and dtype of the result, on the meta device.
        func: The operator.
        args: Positional arguments, LazyLogits and Operands among them.
        kwargs: Keyword arguments.
        of_tile: Converts the arguments for a tile, which has two dimensions.
    """

    def __init__(
        self,
        source: Source,
        like: torch.Tensor,
        func: Callable[..., torch.Tensor],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        of_tile: Callable[[tuple[Any, ...]], tuple[Any, ...]] = lambda args: args,
    ) -> None:
        super().__init__(source, like)
        self._func = func
        self._args = args
        self._kwargs = dict(kwargs)
        self._of_tile = of_tile

    @property
    def inputs(self) -> tuple[LazyLogits, ...]:
        """See LazyLogits."""
        return tuple(value for value in self._args if isinstance(value, LazyLogits))

    def made_of(self, get: Callable[[LazyLogits], torch.Tensor]) -> torch.Tensor:
        """See LazyLogits."""

        def values_of(value: Any) -> Any:
            if isinstance(value, LazyLogits):
                return get(value)
            return value.values() if isinstance(value, Operand) else value

        return self._func(*map(values_of, self._args), **self._kwargs).reshape(self.like.shape)

    def compute(self, rows: Rows, tile: Tile) -> torch.Tensor:
        """See LazyLogits."""

        def rows_of(value: Any) -> Any:
            if isinstance(value, LazyLogits):
                return tile.values(value, rows)
            return value.rows(rows) if isinstance(value, Operand) else value

        args = tuple(map(rows_of, self._args))
        result = self._func(*self._of_tile(args), **self._kwargs)
        return result.expand(count(rows), self.like.shape[-1])


class ChosenRows(LazyLogits):
    """Some rows of a lazy, in any order.

    Args:
        parent: The lazy.
        like: Shape and dtype of the result, on the meta device.
        choose: Computes the result from the parent's values.
        numbers: Numbers of the parent's rows that the result has.
        is_view: Whether the result shares the parent's memory.
    """

    def __init__(
        self,
        parent: LazyLogits,
        like: torch.Tensor,
        choose: Callable[[torch.Tensor], torch.Tensor],
        numbers: torch.Tensor,
        *,
        is_view: bool,
    ) -> None:
        super().__init__(parent.source, like)
        self._parent = parent
        self._choose = choose
        self._chosen = numbers
        self._is_view = is_view

    @property
    def is_view(self) -> bool:
        """See LazyLogits."""
        return self._is_view

    @property
    def inputs(self) -> tuple[LazyLogits, ...]:
        """See LazyLogits."""
        return (self._parent,)

    def made_of(self, get: Callable[[LazyLogits], torch.Tensor]) -> torch.Tensor:
        """See LazyLogits."""
        return self._choose(get(self._parent))

    def compute(self, rows: Rows, tile: Tile) -> torch.Tensor:
        """See LazyLogits."""
        return tile.values(self._parent, tile.behind(self, rows, self._chosen))


class PutRows(LazyLogits):
    """Rows of lazies and operands, each at its place among rows of zeros.

    Args:
        source: Source of the lazies.
        like: Shape and dtype of the result, on the meta device.
        parts: The lazies, and operands of their own shapes.
        numbers: For each row of the result, its number among the rows of all parts in sequence; -1:
            the row is zero.
        put: Computes the result from the parts' values.
    """

    def __init__(
        self,
        source: Source,
        like: torch.Tensor,
        parts: Sequence[LazyLogits | Operand],
        numbers: torch.Tensor,
        put: Callable[..., torch.Tensor],
    ) -> None:
        super().__init__(source, like)
        self._parts = parts
        self._places = numbers
        self._put = put

    @property
    def inputs(self) -> tuple[LazyLogits, ...]:
        """See LazyLogits."""
        return tuple(part for part in self._parts if isinstance(part, LazyLogits))

    def made_of(self, get: Callable[[LazyLogits], torch.Tensor]) -> torch.Tensor:
        """See LazyLogits."""
        return self._put(
            *(get(p) if isinstance(p, LazyLogits) else p.values() for p in self._parts)
        )

    def compute(self, rows: Rows, tile: Tile) -> torch.Tensor:
        """See LazyLogits."""
        places = take(self._places, rows)
        result: torch.Tensor | None = None
        first = 0
        for part in self._parts:
            behind = first + part.like.numel() // part.like.shape[-1]
            here = ((places >= first) & (places < behind)).nonzero().reshape(-1)
            numbers = plainest(places[here] - first)
            first = behind
            if here.numel() == 0:
                continue
            tile.keep(numbers)
            values = (
                tile.values(part, numbers) if isinstance(part, LazyLogits) else part.rows(numbers)
            )
            if here.numel() == places.numel():
                return values.expand(places.numel(), self.like.shape[-1])
            if result is None:
                result = self._zeros(places.numel())
            result[here.to(result.device)] = values
            del values
        return self._zeros(places.numel()) if result is None else result

    def _zeros(self, rows: int) -> torch.Tensor:
        device = self.source.hidden.device
        return torch.zeros(rows, self.like.shape[-1], dtype=self.like.dtype, device=device)


def in_tiles(source: Source, num_rows: int, compute: Callable[[slice], None]) -> None:
    """Runs a computation over all rows, tile by tile.

    If the device budget has no room for a tile, tiles have half as many rows from then on, for
    everything that comes from these logits.

    Args:
        source: Source of the logits, which has the number of rows of a tile.
        num_rows: Number of all rows.
        compute: Called with the rows of each tile; a call that fails must have no effect.

    Raises:
        OutOfMemoryError: The device has no room for one row, or another tier has no room.
    """
    first = 0
    while first < num_rows:
        rows = slice(first, min(first + source.rows_per_tile, num_rows))
        try:
            compute(rows)
        except OutOfMemoryError as error:
            if error.tier != "device" or count(rows) <= 1:
                raise
            drop_tensors(error)
            source.rows_per_tile = -(-count(rows) // 2)
            continue
        first = rows.stop


Value = TypeVar("Value")


def at_once(source: Source, num_rows: int, compute: Callable[[], Value]) -> Value | None:
    """Computes a result of all rows together; None if the device budget has no room for that.

    In that case tiles have half as many rows from then on; see in_tiles.
    """
    try:
        return compute()
    except OutOfMemoryError as error:
        if error.tier != "device" or num_rows <= 1:
            raise
        drop_tensors(error)
    source.rows_per_tile = -(-num_rows // 2)
    return None


def each_tile(lazy: LazyLogits) -> Callable[[slice], torch.Tensor]:
    """Returns a function that computes the values of some rows of a lazy, and keeps none."""
    uses = uses_below(lazy)

    def values(rows: slice) -> torch.Tensor:
        with torch.inference_mode(False), torch.no_grad():
            return Tile(uses).values(lazy, rows)

    return values


@contextmanager
def at_hand(source: Source, *, trains: bool) -> Iterator[None]:
    """Makes the head's weights available for tiles that are computed outside the head's forward.

    Args:
        source: Source of the logits.
        trains: Whether the result has a gradient. The computation is then part of each step, and is
            entered in the trace. Otherwise (metrics) the weights are read like any weight outside
            its module.
    """
    source.check()
    in_backward = torch._C._current_graph_task_id() != -1
    enters = trains and not (source.spent or in_backward)
    with source.head.running(source.module) if enters else nullcontext():
        yield


def each_row(
    lazy: LazyLogits, compute: Callable[[slice, torch.Tensor], None], *, trains: bool
) -> None:
    """Computes all rows of a lazy in tiles, and passes each tile on.

    Args:
        lazy: The lazy.
        compute: Called with the rows of a tile and their values, (rows, vocabulary).
        trains: Whether the result has a gradient; see at_hand.
    """
    values, source = each_tile(lazy), lazy.source
    with at_hand(source, trains=trains), torch.inference_mode(False), torch.no_grad():
        in_tiles(source, lazy.num_rows, lambda rows: compute(rows, values(rows)))
    source.head.engine.logits.note(
        rows=lazy.num_rows,
        rows_per_tile=source.rows_per_tile,
        row_bytes=lazy.like.shape[-1] * lazy.like.element_size(),
    )


def reduced(
    lazy: LazyLogits,
    of_tile: Callable[[torch.Tensor], tuple[torch.Tensor, ...]],
    *,
    trains: bool,
) -> list[torch.Tensor]:
    """Reduces each row to a few numbers, tile by tile.

    Args:
        lazy: The lazy.
        of_tile: Returns tensors of (rows, anything) for values of (rows, vocabulary).
        trains: Whether the result has a gradient; see at_hand.

    Returns:
        These tensors, for all rows.
    """
    found: list[tuple[torch.Tensor, ...]] = []
    each_row(lazy, lambda _, values: found.append(of_tile(values)), trains=trains)
    return [torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*found, strict=True)]


def meta(value: Any) -> Any:
    """Replaces lazies and operands in a value by tensors on the meta device."""
    return tree_map(lambda v: v.like if isinstance(v, LazyLogits | Operand) else v, value)
