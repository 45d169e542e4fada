"""Parameters that several stages share, such as a tied embedding; each rank has one copy.

Source: Narayanan et al. 2021 (Megatron-LM, section 2.2), for tied embeddings on two stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from torch import nn

from castor.distributed.model_parallel_group import ModelParallelGroup


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedCopy:
    """This rank's copy of a parameter that several stages share."""

    param: nn.Parameter
    ranks: ModelParallelGroup
    """Ranks that have a copy."""


class SharedParameters:
    """This rank's copies of shared parameters.

    Before a step each copy gets the sum of all copies' gradients, so all copies stay equal.
    """

    def __init__(self, copies: Sequence[SharedCopy]) -> None:
        """Takes the copies; changes nothing.

        Args:
            copies: This rank's copies, in an order that is the same on all ranks.
        """
        self._copies = list(copies)
        self._summed: bool | None = None
        """Whether gradients are summed over the copies; None: no backward has begun yet."""

    @property
    def counted_elsewhere(self) -> AbstractSet[nn.Parameter]:
        """Parameters whose gradient another rank counts in the norm of all gradients."""
        return {copy.param for copy in self._copies if copy.ranks.rank > 0}

    def begin(self) -> None:
        """Prepares for backward passes: keeps sums of an earlier step on one rank only.

        Otherwise a later sum would count them once for each rank.
        """
        if self._summed:
            for param in self.counted_elsewhere:
                if param.grad is not None:
                    param.grad.data.zero_()
        self._summed = False

    def settle(self) -> None:
        """Sums the gradients over the copies, once after any number of passes. Collective."""
        if self._summed is not False:
            return
        for copy in self._copies:
            grad = copy.param.grad
            if grad is not None:
                # Through .data: an edit by the user would be refused under a loss scale.
                grad.data.copy_(copy.ranks.all_reduce_on_host(grad))
        self._summed = True
