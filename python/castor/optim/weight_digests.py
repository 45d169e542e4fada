"""Digests of weights that every rank updates by itself, by which ranks see that they are equal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from castor import _C

TURNS = 8
"""Steps in which all of each weight is looked at once."""


class WeightDigests:
    """Digests of the weights after each step of an optimizer that runs its own.

    A step looks at an eighth of each weight, the next one at the next eighth: weights that have
    drifted apart stay apart, so ranks see it within eight steps, for an eighth of the reads.
    """

    def __init__(self, session: _C.Session, index_of: Mapping[Any, int]) -> None:
        """Follows the weights of one optimizer.

        Args:
            session: Of the model, which compares them with the other ranks'.
            index_of: The model's parameters, with their places in it.
        """
        self._session = session
        self._index_of = index_of
        self._turn = 0
        self._found: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def add(self, param: torch.Tensor, values: torch.Tensor) -> None:
        """Looks at a weight that has been updated.

        Args:
            param: Of the model.
            values: What it has come to, or its master, in float32.
        """
        words = values.detach().contiguous().view(-1).view(torch.int32)
        pairs = words.numel() // 2
        begin, end = (2 * (pairs * turn // TURNS) for turn in (self._turn, self._turn + 1))
        # Sums of 64 bits are as fast as memory; those of 32 are not, and a word may be left over.
        self._found[self._index_of[param]] = (
            words[begin:end].view(torch.int64).sum() + words[2 * pairs :].sum()
        )

    def tell(self) -> None:
        """The step is over: ranks compare what was added where they meet next."""
        if self._found:
            sums = torch.stack(list(self._found.values())).tolist()
            digests = [(index, one % 2**64) for index, one in zip(self._found, sums, strict=True)]
            self._session.weights_updated(digests)
        self._found.clear()
        self._turn = (self._turn + 1) % TURNS
