"""Simulated ranks, whose collectives note the bytes of a step and send nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

from castor import _C
from castor.distributed import Generators, ModelParallelGroup
from castor.estimate.metatrace import Sent


class SimulatedGroup(ModelParallelGroup):
    """One rank of a group whose other ranks are simulated and hold the same values."""

    @classmethod
    def simulate(
        cls, name: str, size: int, tell: Callable[[Sent], None], *, rank: int = 0
    ) -> SimulatedGroup:
        """Makes a group of simulated ranks around this process.

        Args:
            name: Name of the group in the notes.
            size: Number of ranks.
            tell: Called with each collective's traffic of this rank, in the thread that runs it.
            rank: Number of this rank in the group.
        """
        sends = cast("_C.RankTensors", _Sends(name, size, tell))
        return cls(rank=rank, size=size, group=cast("_C.RankGroup", None), name=name, tensors=sends)

    def all_gather_object(self, value: Any, *, place: str = "") -> list[Any]:
        """Returns the value once for each rank: the others have the same."""
        return [value] * self.size

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Does nothing: the others have the tensor."""

    def check_equal(self, facts: Mapping[str, Any], *, extra: Any = None) -> list[Any]:
        """Returns `extra` once for each rank: the facts are equal."""
        return [extra] * self.size


class _Sends:
    """Replacement of _C.RankTensors that notes what it would send."""

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

    device_backend = ""

    def sends_from_device(self, _tensor: torch.Tensor) -> bool:
        return False

    def backend_sums(self, _tensor: torch.Tensor) -> bool:
        return False

    def gather_bytes(self, own: bytes, _place: str) -> list[bytes]:
        return [own] * self._size

    def _note(self, operation: str, tensor: torch.Tensor) -> None:
        self._tell(Sent(self._name, operation, tensor.numel() * tensor.element_size()))


class SimulatedGenerators(Generators):
    """Generators that are never drawn from: simulated tensors have no values."""

    def __init__(self) -> None:
        """Makes generators of a model on the meta device."""
        super().__init__(torch.device("cpu"))

    def states(self) -> tuple[torch.Tensor, ...]:
        """Returns no states."""
        return ()

    def restore(self, states: tuple[torch.Tensor, ...]) -> None:
        """Does nothing: no state has changed."""

    def seed(self, seed: int) -> None:
        """Does nothing: nothing is drawn."""
