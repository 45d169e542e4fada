"""Fits other libraries' fused output embeddings to the device budget.

TRL's trainers ask the model for log-probabilities instead of logits. Its autograd functions take
hidden states and the head's weight, and compute TOKEN_CHUNK_SIZE rows (4,096) of a fixed number of
columns (32,768) at a time. Their buffers have that size however small vocabulary and budget are.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from castor.activations.recompute import drop_tensors
from castor.errors import OutOfMemoryError

_FUNCTIONS = {
    "trl.kernels.chunked_logprob": "ChunkedLogProbFunction",
    "trl.kernels.chunked_divergence": "ChunkedDivergenceFunction",
}
"""Autograd functions by module; the second argument of each is the head's weight."""
_ROWS, _COLUMNS = "TOKEN_CHUNK_SIZE", "VOCAB_CHUNK_SIZE"
"""Constants of these modules: rows and columns of logits that are in memory at once."""
_COLUMNS_ARGUMENT = 5
"""Position of ChunkedLogProbFunction's `chunk_size`, which it has instead of a constant."""


def fit_fused_heads() -> None:
    """Lets imported fused heads compute fewer rows at once if the device budget needs it.

    Each head begins with its library's number of rows, whose results are bitwise those of the
    library. After an attempt for which the device budget has no room, it goes on with half as many
    rows; the attempt leaves nothing behind. Buffers are no wider than the vocabulary.
    """
    for module_name, class_name in _FUNCTIONS.items():
        module = sys.modules.get(module_name)
        function: Any = getattr(module, class_name, None)
        if module is None or function is None or not hasattr(module, _ROWS):
            continue
        if not hasattr(function.forward, "__wrapped__"):
            rows = _Rows(module)
            for name in ("forward", "backward"):
                setattr(function, name, staticmethod(rows.fitting(getattr(function, name))))


class _Rows:
    """Number of rows that one library's function computes at once."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._rows: int = getattr(module, _ROWS)
        """Most rows that have fit so far."""

    def fitting(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps the function's forward or backward, to compute as many rows as there is room for.

        The wrapped function raises OutOfMemoryError if the device has no room for one row, or if
        another tier has no room.
        """

        @functools.wraps(compute)
        def computed(ctx: Any, *args: Any) -> Any:
            is_forward = compute.__name__ == "forward"
            tensors = args if is_forward else ctx.saved_tensors
            most, columns = max(1, tensors[0].shape[0]), tensors[1].shape[0]
            args = self._narrowed(args, columns) if is_forward else args
            while True:
                rows = min(self._rows, most)
                try:
                    with self._at_once(rows, columns):
                        return compute(ctx, *args)
                except OutOfMemoryError as error:
                    if error.tier != "device" or rows <= 1:
                        raise
                    drop_tensors(error)
                self._rows = -(-rows // 2)

        return computed

    def _narrowed(self, args: tuple[Any, ...], columns: int) -> tuple[Any, ...]:
        if hasattr(self._module, _COLUMNS) or type(args[_COLUMNS_ARGUMENT]) is not int:
            return args
        narrow = min(args[_COLUMNS_ARGUMENT], columns)
        return (*args[:_COLUMNS_ARGUMENT], narrow, *args[_COLUMNS_ARGUMENT + 1 :])

    @contextmanager
    def _at_once(self, rows: int, columns: int) -> Iterator[None]:
        constants = vars(self._module)
        before = {name: constants[name] for name in (_ROWS, _COLUMNS) if name in constants}
        constants[_ROWS] = rows
        if _COLUMNS in before:
            constants[_COLUMNS] = min(before[_COLUMNS], columns)
        try:
            yield
        finally:
            constants.update(before)
