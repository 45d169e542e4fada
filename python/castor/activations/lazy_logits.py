"""Lazy logits: hidden states, an output embedding (head), and the operators applied since."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from castor.activations.operators import ORDER_KEEPING_STEPS, ROW_STEPS, VIEW_STEPS
from castor.errors import UsageError
from castor.runtime.engine import Engine


class Head:
    """Output embedding of a boosted model.

    Args:
        engine: The model's engine.
        module: The output embedding, a module that the engine follows.
        position: Position of the module among the engine's modules.
        updates_in_backward: Whether the module's weights may change before step().
    """

    def __init__(
        self, engine: Engine, module: nn.Linear, position: int, *, updates_in_backward: bool
    ) -> None:
        self.engine = engine
        self.updates_in_backward = updates_in_backward
        self._enter = engine.session.forward_pre_hook(position, module)
        self._leave = engine.session.forward_hook(position, module)

    @contextmanager
    def running(self, module: nn.Module) -> Iterator[None]:
        """Lets the head compute outside its forward: pins its chunk, and enters it in the trace."""
        with torch.enable_grad():  # an event of training, also inside an autograd function
            self._enter(module, ())
        try:
            yield
        finally:
            with torch.enable_grad():
                self._leave(module, (), ())


class Source:
    """Hidden states that the head gets in one forward, and the versions of its weights."""

    def __init__(
        self, head: Head, module: nn.Linear, hidden: torch.Tensor, rows_per_tile: int
    ) -> None:
        self.head = head
        self.module = module
        self.hidden = hidden
        self.rows_per_tile = rows_per_tile
        self.spent = False
        """Whether a backward has reached the head."""
        self._steps = head.engine.history.totals.steps
        self._versions = self._current_versions()

    @property
    def num_rows(self) -> int:
        """Number of rows of the logits."""
        return self.hidden.numel() // self.hidden.shape[-1]

    def _current_versions(self) -> list[int]:
        read = (self.hidden, *self.module._parameters.values())
        return [tensor._version for tensor in read if tensor is not None]

    def check(self) -> None:
        """Raises UsageError if hidden states or weights have changed since the forward."""
        updated = self._steps != self.head.engine.history.totals.steps or (
            self.spent and self.head.updates_in_backward
        )
        if updated or self._versions != self._current_versions():
            changed = "the weights were updated" if updated else "what they come from was written"
            raise UsageError(
                "these logits were not computed in their forward, castor computes them when they "
                f"are read (GeminiPlugin(tile_logits=...)), and {changed} since; read them before, "
                "or pass tile_logits=False"
            )

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the head's output for some rows of hidden states."""
        return F.linear(hidden, self.module.weight, self.module.bias)

    def whole(self) -> torch.Tensor:
        """Computes all logits, and does not keep them.

        Raises:
            UsageError: Hidden states or weights have changed since the forward.
        """
        self.check()
        with torch.inference_mode(False), torch.no_grad():
            return self.project(self.hidden)


@dataclass(frozen=True)
class Step:
    """One of torch's operators over logits, with all arguments but the first."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def is_view(self) -> bool:
        """Whether the result shares memory with the first argument."""
        return self.func in VIEW_STEPS

    @property
    def moves_rows(self) -> bool:
        """Whether it chooses and arranges rows; otherwise it changes each element by itself."""
        return self.func in ROW_STEPS

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the operator's result."""
        result: torch.Tensor = self.func(values, *self.args, **self.kwargs)
        return result


Rows = slice | torch.Tensor
"""Numbers of rows: a slice, or a tensor on the CPU."""


def take(values: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Returns some rows of a matrix."""
    return values[rows] if isinstance(rows, slice) else values[rows.to(values.device)]


def count(rows: Rows) -> int:
    """Counts the rows."""
    return rows.stop - rows.start if isinstance(rows, slice) else rows.numel()


def plainest(rows: torch.Tensor) -> Rows:
    """Returns the rows as a slice if they are consecutive, else as they are."""
    numbers: list[int] = rows.tolist()
    if numbers and numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return slice(numbers[0], numbers[0] + len(numbers))
    return rows


class Tile:
    """Cache of the values of one tile: rows of lazy logits that are computed together.

    The rows of each lazy are computed once, and kept until they have been read as often as wanted.

    Args:
        wanted: Number of reads of each lazy's rows, by the lazy's identity (uses_below).
    """

    def __init__(self, wanted: dict[int, int]) -> None:
        self._wanted = dict(wanted)
        self._values: dict[tuple[int, Any], torch.Tensor] = {}
        self._numbers: dict[tuple[int, Any], Rows] = {}
        self._kept: list[Rows] = []

    def keep(self, rows: Rows) -> None:
        """Keeps row numbers alive as long as the tile, which knows them by their identity."""
        self._kept.append(rows)

    def values(self, of: LazyLogits, rows: Rows) -> torch.Tensor:
        """Returns values of a lazy's rows, (rows, vocabulary), which must not be written to."""
        key = (id(of), _key(rows))
        found = self._values.pop(key, None)
        if found is None:
            found = of.compute(rows, self)
        self._wanted[id(of)] = self._wanted.get(id(of), 1) - 1
        if self._wanted[id(of)] > 0:
            self._values[key] = found
        return found

    def behind(self, of: LazyLogits, rows: Rows, numbers: torch.Tensor) -> Rows:
        """Returns the rows that a lazy's rows come from, as the same object at each call.

        Args:
            of: The lazy.
            rows: Rows of the lazy.
            numbers: For each row of the lazy, the number of the row that it comes from.
        """
        key = (id(of), _key(rows))
        if key not in self._numbers:
            self._numbers[key] = plainest(take(numbers, rows))
        return self._numbers[key]


def _key(rows: Rows) -> Any:
    return (rows.start, rows.stop) if isinstance(rows, slice) else id(rows)


class LazyLogits:
    """Logits, or casts, scalings and arrangements of their rows, without values ("a lazy").

    Computed values are kept, and shared by every tensor over them. User code may write to them;
    `clean` says that it cannot have done so. A copy that was made before such a write is computed
    from the original values.

    Args:
        source: Hidden states and head that the logits come from.
        like: Shape, strides and dtype, on the meta device.
        parent: The lazy that `step` is applied to; None: this is the head's output.
        step: The operator.
    """

    def __init__(
        self,
        source: Source,
        like: torch.Tensor,
        parent: LazyLogits | None = None,
        step: Step | None = None,
    ) -> None:
        self.source = source
        self.like = like
        self.parent = parent
        self.step = step
        self._value: torch.Tensor | None = None
        self._exposed = False
        self._numbers: torch.Tensor | None = None  # numbers of the parent's rows that this has

    @classmethod
    def of_head(cls, source: Source) -> LazyLogits:
        """Makes the head's output."""
        shape = (*source.hidden.shape[:-1], source.module.weight.shape[0])
        return cls(source, torch.empty(shape, dtype=source.hidden.dtype, device="meta"))

    @property
    def is_view(self) -> bool:
        """Whether it shares memory with its inputs."""
        return self.step is not None and self.step.is_view

    @property
    def is_logits(self) -> bool:
        """Whether it comes from the head's output by casts, scalings and moves of rows only.

        What a subclass computes does not.
        """
        return type(self) is LazyLogits and (self.parent is None or self.parent.is_logits)

    @property
    def inputs(self) -> tuple[LazyLogits, ...]:
        """Lazies that it is computed from."""
        return () if self.parent is None else (self.parent,)

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.like.numel() // self.like.shape[-1]

    @property
    def computed(self) -> bool:
        """Whether it has values."""
        return self._value is not None

    @property
    def clean(self) -> bool:
        """Whether the values are certainly those that the source and the steps give."""
        if self._exposed:
            return False
        return not self.is_view or all(lazy.clean for lazy in self.inputs)

    def expose(self) -> None:
        """Notes that the values are written, or that user code holds their memory and may write."""
        self._exposed = True
        if self.is_view:
            for lazy in self.inputs:
                lazy.expose()

    def value(self) -> torch.Tensor:
        """Returns the values, which are computed once.

        Raises:
            UsageError: The values were not computed before, and the weights have changed.
        """
        if self._value is None:
            with torch.inference_mode(False), torch.no_grad():
                self._value = self.made_of(
                    lambda lazy: lazy.value() if self.is_view else lazy.original()
                )
        return self._value

    def original(self, *, keep: bool = True) -> torch.Tensor:
        """Returns the values that the source and the steps give, which must not be written to.

        Args:
            keep: Whether newly computed values are kept.
        """
        if self.clean and (keep or self._value is not None):
            return self.value()
        with torch.inference_mode(False), torch.no_grad():
            return self.made_of(lambda lazy: lazy.original(keep=keep))

    def made_of(self, get: Callable[[LazyLogits], torch.Tensor]) -> torch.Tensor:
        """Computes the values from those of the inputs, which `get` returns."""
        return self.source.whole() if self.parent is None else _step_of(self)(get(self.parent))

    def compute(self, rows: Rows, tile: Tile) -> torch.Tensor:
        """Computes values of some rows, (rows, vocabulary); the head's weights must be readable.

        Args:
            rows: Numbers of the rows.
            tile: The tile, which has the values of the inputs.
        """
        if self._value is not None and self._value.is_contiguous() and self.clean:
            return take(self._value.view(-1, self._value.shape[-1]), rows)
        if self.parent is None:
            hidden = self.source.hidden
            return self.source.project(take(hidden.reshape(-1, hidden.shape[-1]), rows))
        step = _step_of(self)
        if not step.moves_rows:
            return step(tile.values(self.parent, rows))
        if step.func in ORDER_KEEPING_STEPS:
            return tile.values(self.parent, rows)
        if self._numbers is None:
            numbers = torch.arange(self.parent.num_rows).view(*self.parent.like.shape[:-1], 1)
            self._numbers = step(numbers).reshape(-1)
        return tile.values(self.parent, tile.behind(self, rows, self._numbers))

    def steps_to(self, later: LazyLogits) -> list[Step]:
        """Returns the steps from here to `later`, which comes from this."""
        steps: list[Step] = []
        while later is not self:
            assert later.parent is not None
            steps.append(_step_of(later))
            later = later.parent
        return steps[::-1]

    def head_output(self) -> LazyLogits:
        """Returns the head's output, at which the operators begin."""
        return self if self.parent is None else self.parent.head_output()

    def row_numbers(self, begin: LazyLogits | None = None) -> torch.Tensor | None:
        """Returns the numbers of `begin`'s rows in the order of these rows; None: the same order.

        Args:
            begin: A lazy that this comes from; None: the head's output.
        """
        begin = begin or self.head_output()
        steps = [step for step in begin.steps_to(self) if step.moves_rows]
        if all(step.func in ORDER_KEEPING_STEPS for step in steps):
            return None
        node, path = self, []
        while node is not begin:
            assert node.parent is not None
            path.append(node)
            node = node.parent
        numbers = torch.arange(node.num_rows, device=self.source.hidden.device)
        numbers = numbers.view(*node.like.shape[:-1], 1)
        for node in reversed(path):
            step = _step_of(node)
            if step.func in ORDER_KEEPING_STEPS:
                numbers = numbers.reshape(*node.like.shape[:-1], 1)
            elif step.moves_rows:
                numbers = step(numbers)
        return numbers.reshape(-1)


def autograd_at_work() -> Any:
    """Returns a guard under which autograd works as usual, even in the middle of an operator."""
    return torch._C._ForceDispatchKeyGuard(*_KEYS)


_KEYS = (
    torch._C._dispatch_tls_local_include_set(),
    torch._C._dispatch_tls_local_exclude_set(),
)


def uses_below(*lazies: LazyLogits) -> dict[int, int]:
    """Counts how often each lazy's rows are read, by its identity, to compute `lazies` once."""
    uses: dict[int, int] = {}
    left = list(lazies)
    while left:
        lazy = left.pop()
        uses[id(lazy)] = uses.get(id(lazy), 0) + 1
        if uses[id(lazy)] == 1:
            left += lazy.inputs
    return uses


def _step_of(logits: LazyLogits) -> Step:
    assert logits.step is not None
    return logits.step
