"""Decisions that several ranks make alike: those that compute a block together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

Value = TypeVar("Value")


class Sharing(Protocol):
    """Ranks that exchange something within blocks: castor.distributed's TensorRanks."""

    def hear(self, place: str, value: Any) -> list[tuple[str, Any]]:
        """Returns the place and the value of every rank, in rank order. Collective.

        Raises:
            UsageError: They are not all at that place; every rank raises it.
            Error: One is gone.
        """
        ...


class Agreement:
    """Exchanges values between the ranks that compute a block together.

    A block's second forward repeats the exchanges of its first, so either all of them run it or
    none.
    """

    def __init__(self, groups: Sequence[Sharing] = ()) -> None:
        """Takes the tensor-parallel and the context-parallel group, where there are such."""
        self._groups = groups

    @property
    def alone(self) -> bool:
        """Whether there are no others."""
        return not self._groups

    def of_all(self, place: str, value: Value) -> list[Value]:
        """Returns the picklable values of all ranks, the same list on each. Collective.

        Args:
            place: Where this is, for a message to ranks that are elsewhere.
            value: This rank's.
        """
        everyone = [value]
        for group in self._groups:
            everyone = [one for _, some in group.hear(place, everyone) for one in some]
        return everyone
