"""Parameters that several stages have, as a tied embedding: one copy a rank, one gradient for all.

Source: Narayanan et al. 2021 (Megatron-LM, section 2.2), for tied embeddings on two stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from torch import nn

from castor.distributed.tensor_ranks import TensorRanks


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedCopy:
    """This rank's copy of one."""

    param: nn.Parameter
    ranks: TensorRanks
    """Ranks that have a copy."""


class SharedParameters:
    """This rank's copies: before a step each has the gradients of all, so all stay equal."""

    def __init__(self, copies: Sequence[SharedCopy]) -> None:
        """Nothing is changed.

        Args:
            copies: In an order that is the same on all ranks.
        """
        self._copies = list(copies)
        self._summed: bool | None = None
        """Whether gradients are sums; None: there are none."""

    @property
    def counted_elsewhere(self) -> AbstractSet[nn.Parameter]:
        """Parameters whose gradient another rank counts in the norm of all."""
        return {copy.param for copy in self._copies if copy.ranks.rank > 0}

    def begin(self) -> None:
        """Backward passes follow. A step has left sums: each counts once."""
        if self._summed:
            for param in self.counted_elsewhere:
                if param.grad is not None:
                    param.grad.data.zero_()
        self._summed = False

    def settle(self) -> None:
        """Sums gradients, once for however many passes. Collective."""
        if self._summed is not False:
            return
        for copy in self._copies:
            grad = copy.param.grad
            if grad is not None:
                # Not as an edit of the user's, whom a loss scale would be hidden from.
                grad.data.copy_(copy.ranks.all_reduce(grad))
        self._summed = True
