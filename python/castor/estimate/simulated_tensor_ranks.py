"""Simulated ranks: collectives note what a step would send, and send nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

from castor import _C
from castor.distributed import Generators, TensorRanks
from castor.estimate.metatrace import Sent


class SimulatedTensorRanks(TensorRanks):
    """One of several ranks whose peers are simulated and hold the same values."""

    @classmethod
    def alike(
        cls, name: str, size: int, tell: Callable[[Sent], None], *, rank: int = 0
    ) -> SimulatedTensorRanks:
        """Ranks of which this process is one.

        Args:
            name: What they are called in what is noted.
            size: How many.
            tell: Is given what this rank would send, in the thread that would send it.
            rank: Which one it is.
        """
        sends = cast("_C.RankTensors", _Sends(name, size, tell))
        return cls(rank=rank, size=size, group=cast("_C.RankGroup", None), name=name, tensors=sends)

    def gather(self, value: Any) -> list[Any]:
        """The others have the same."""
        return [value] * self.size

    def share(self, tensor: torch.Tensor) -> None:
        """They have it."""

    def check_equal(self, facts: Mapping[str, Any], *, beside: Any = None) -> list[Any]:
        """They are."""
        return [beside] * self.size


class _Sends:
    """Stands for _C.RankTensors."""

    def __init__(self, name: str, size: int, tell: Callable[[Sent], None]) -> None:
        self._name = name
        self._size = size
        self._tell = tell

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self._note("all_reduce", tensor)

    def all_gather(self, own: torch.Tensor, _parts: torch.Tensor) -> None:
        self._note("all_gather", own)

    def all_to_all(self, parts: torch.Tensor, _received: torch.Tensor) -> None:
        self._note("all_to_all", parts)

    def ring_shift(self, sent: torch.Tensor, _received: torch.Tensor) -> None:
        self._note("ring_shift", sent)

    def gather_bytes(self, own: bytes, _place: str) -> list[bytes]:
        return [own] * self._size

    def _note(self, operation: str, tensor: torch.Tensor) -> None:
        self._tell(Sent(self._name, operation, tensor.numel() * tensor.element_size()))


class SimulatedGenerators(Generators):
    """Nothing is drawn of them: simulated tensors have no values."""

    def __init__(self) -> None:
        """Makes generators of a model on the meta device."""
        super().__init__(torch.device("cpu"))

    def states(self) -> tuple[torch.Tensor, ...]:
        """There are none."""
        return ()

    def restore(self, states: tuple[torch.Tensor, ...]) -> None:
        """Nothing has changed."""

    def seed(self, seed: int) -> None:
        """Nothing begins."""
