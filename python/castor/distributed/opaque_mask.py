"""Attention masks of divided sequences, on their way from where they are made to attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch


class OpaqueMaskError(NotImplementedError, AttributeError):
    """Layers look into a mask that is of other tokens than their hidden states."""


class OpaqueMask:
    """A mask of transformers under context parallelism, for attention alone.

    It is of all tokens, or of pieces, and hidden states are of a rank's. A layer that makes a mask
    of it itself would compute something else, or fail on sizes.
    """

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(f"'{name}'")

    def __getitem__(self, _: Any) -> NoReturn:
        _refuse("a part of it")

    @classmethod
    def __torch_function__(
        cls, function: Any, _: Any, __: Sequence[Any] = (), ___: Mapping[str, Any] | None = None
    ) -> NoReturn:
        _refuse(f"{getattr(function, '__name__', function)} of it")


class WholeMask(OpaqueMask):
    """The mask of all tokens, or from a rank's tokens to all."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        """Mask in the form that the attention function takes."""


def _refuse(what: str) -> NoReturn:
    raise OpaqueMaskError(
        f"layers of this model look into the attention mask themselves ({what}), which is of other "
        "tokens than a rank's hidden states where sp_size divides sequences: train with sp_size=1"
    )
