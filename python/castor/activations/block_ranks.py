"""Decisions that must be the same on all ranks that compute a block together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

Value = TypeVar("Value")


class Sharing(Protocol):
    """Group of ranks with collectives within blocks: castor.distributed's ModelParallelGroup."""

    def all_gather_places(self, place: str, value: Any) -> list[tuple[str, Any]]:
        """Returns the place and the value of every rank, in rank order. Collective.

        Raises:
            UsageError: The ranks are not all at that place; every rank raises it.
            Error: A rank is gone.
        """
        ...


class BlockRanks:
    """Exchanges values between the ranks that compute a block together.

    A block's second forward repeats the collectives of its first one. So either all of these ranks
    run it, or none.
    """

    def __init__(self, groups: Sequence[Sharing] = ()) -> None:
        """Takes the tensor-parallel and the context-parallel group, if there are any."""
        self._groups = groups

    @property
    def alone(self) -> bool:
        """Whether this rank computes blocks alone."""
        return not self._groups

    def all_gather(self, place: str, value: Value) -> list[Value]:
        """Returns the picklable values of all ranks, the same list on each. Collective.

        Args:
            place: Description of the place in the program, for the error of ranks that are at
                another one.
            value: This rank's value.
        """
        everyone = [value]
        for group in self._groups:
            everyone = [one for _, some in group.all_gather_places(place, everyone) for one in some]
        return everyone
