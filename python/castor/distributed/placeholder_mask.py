"""Placeholders for attention masks under context parallelism, which attention alone may read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch


class PlaceholderMaskError(NotImplementedError, AttributeError):
    """A layer reads an attention mask whose tokens are not those of its hidden states."""


class PlaceholderMask:
    """An attention mask that transformers' layers pass on to attention without reading it.

    The mask covers the full sequence or pieces of it, while hidden states cover the tokens of one
    rank. A layer that derives a mask of its own would compute something else, or fail on sizes.
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


class FullMask(PlaceholderMask):
    """The mask of all tokens, or the mask from a rank's tokens to all tokens."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        """Mask in the form that the attention function takes."""


def _refuse(what: str) -> NoReturn:
    raise PlaceholderMaskError(
        f"layers of this model look into the attention mask themselves ({what}), which is of other "
        "tokens than a rank's hidden states where sp_size shards sequences: train with sp_size=1"
    )
