"""Digests of weights that every rank updates itself, by which ranks check that they are equal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from castor import _C

TURNS = 8
"""Number of steps in which all of each weight is digested once."""


class WeightDigests:
    """Digests of the weights after each step of an optimizer that runs its own step.

    Each step digests the next eighth of every weight, which needs an eighth of the reads. Weights
    that have become different stay different, so that ranks notice within eight steps.
    """

    def __init__(self, session: _C.Session, index_of: Mapping[Any, int]) -> None:
        """Follows the weights of one optimizer.

        Args:
            session: Session of the model, which compares the digests with the other ranks'.
            index_of: Positions of the model's parameters.
        """
        self._session = session
        self._index_of = index_of
        self._turn = 0
        self._found: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def add(self, param: torch.Tensor, values: torch.Tensor) -> None:
        """Digests a part of a weight that has been updated.

        Args:
            param: Parameter of the model.
            values: Its new values, or its master, in float32.
        """
        words = values.detach().contiguous().view(-1).view(torch.int32)
        pairs = words.numel() // 2
        begin, end = (2 * (pairs * turn // TURNS) for turn in (self._turn, self._turn + 1))
        # 64-bit sums are as fast as memory, 32-bit sums are not. One word may be left over.
        self._found[self._index_of[param]] = (
            words[begin:end].view(torch.int64).sum() + words[2 * pairs :].sum()
        )

    def tell(self) -> None:
        """Ends a step: ranks compare the digests at their next check."""
        if self._found:
            sums = torch.stack(list(self._found.values())).tolist()
            digests = [(index, one % 2**64) for index, one in zip(self._found, sums, strict=True)]
            self._session.weights_updated(digests)
        self._found.clear()
        self._turn = (self._turn + 1) % TURNS
