"""The groups of ranks that share a model: tensor, context, expert and pipeline parallel ones."""

from __future__ import annotations

import math
import pickle
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from castor.errors import UsageError
from castor.runtime.device_groups import DeviceLink
from castor.runtime.rank_group import RankGroup

BETWEEN_PASSES = "what ranks tell each other between passes (a step, a save)"
"""Place of a gather outside of passes, for messages."""


def _never(_place: str, _other: str) -> bool:
    return False


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelParallelGroup(RankGroup):
    """Ranks with other shards, tokens, experts or stages of one model."""

    entered: EnteredTensor = field(default_factory=lambda: EnteredTensor())
    """Input of layers that entered last."""
    _device_links: list[DeviceLink] = field(default_factory=list)

    @property
    def link(self) -> str:
        """Name of the link that activations go through, for reports."""
        return self.links.device_backend or self.links.link

    def use_device_link(self, link: DeviceLink) -> None:
        """Sends tensors on devices over a process group, from now on."""
        self._device_links[:] = [link]

    @property
    def device_link(self) -> DeviceLink | None:
        """Link between the ranks' devices; None: tensors go through the host."""
        return self._device_links[0] if self._device_links else None

    def all_gather_object(self, value: Any, *, place: str = BETWEEN_PASSES) -> list[Any]:
        """Returns the picklable values of all ranks, in rank order; see RankGroup.

        Raises:
            UsageError: Two ranks are at different places, such as within a pass; every rank raises
                it.
        """
        heard = self.all_gather_places(place, value)
        if link := self.device_link:
            link.check()
        return [given for _, given in heard]

    def all_gather_places(
        self, place: str, value: Any, *, unless: Callable[[str, str], bool] = _never
    ) -> list[tuple[str, Any]]:
        """Returns the place and the picklable value of every rank, in rank order.

        It uses the link that names a rank which has ended, and goes on where a device's is broken.

        Args:
            place: Place in the program where this rank is, for a message.
            value: This rank's picklable value.
            unless: Whether ranks may be at two different places together.

        Raises:
            UsageError: Two ranks are at different places; every rank raises it.
        """
        given = self.links.gather_bytes(pickle.dumps((place, value)), f"is at {place}")
        everyone: list[tuple[str, Any]] = [pickle.loads(one) for one in given]
        here, numbers = everyone[0][0], self.numbers
        for number, (other, _) in zip(numbers, everyone, strict=True):
            if other != here and not unless(here, other):
                raise UsageError(
                    f"rank {numbers[0]} is at {here}, and rank {number} at {other}: ranks with "
                    "shards of one model take part in each other's passes and steps; give all as "
                    "many batches and micro-batches"
                )
        return everyone

    def leave(self) -> None:
        """Leaves the group, since this rank cannot go on.

        Ranks that wait for it raise Error, and so do later calls. Ranks that share no memory with
        it learn of it when this process ends.
        """
        self.links.leave()

    def all_reduce_on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums as all_reduce does, and returns a new tensor on the CPU.

        For gradients: one rank may have its own on the device, and another in host storage.
        """
        total = tensor.detach().to("cpu", memory_format=torch.contiguous_format, copy=True)
        self.links.all_reduce(total)
        return total

    def shard_range(self, length: int, rank: int | None = None) -> range:
        """Returns the indices of a rank's shard of `length` elements, as tensor_split divides them.

        Args:
            length: Full number of elements.
            rank: Rank that has the shard; None: this one.
        """
        each, more = divmod(length, self.size)
        rank = self.rank if rank is None else rank
        return range(rank * each + min(rank, more), (rank + 1) * each + min(rank + 1, more))

    def local_columns(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns this rank's shard of the last dimension."""
        return tensor.tensor_split(self.size, dim=-1)[self.rank]

    def all_gather_columns(self, own: torch.Tensor, width: int) -> torch.Tensor:
        """Gathers the last dimension outside autograd; `width` is its full size."""
        widths = [len(self.shard_range(width, rank)) for rank in range(self.size)]
        padded = torch.nn.functional.pad(own.detach(), (0, widths[0] - own.shape[-1]))
        shards = self.all_gather(padded).unbind()
        return torch.cat(
            [shard[..., :of] for shard, of in zip(shards, widths, strict=True)], dim=-1
        )

    def all_gather_shards(
        self, own: torch.Tensor, shapes: Sequence[tuple[int, ...]]
    ) -> list[torch.Tensor]:
        """Gathers all ranks' tensors, in rank order.

        Args:
            own: This rank's tensor, on the CPU.
            shapes: Shape of each rank's tensor.
        """
        longest = max(map(math.prod, shapes))
        padded = own.new_zeros(longest)
        padded[: own.numel()] = own.detach().reshape(-1)
        return [
            shard[: math.prod(shape)].view(shape)
            for shard, shape in zip(self.all_gather(padded).unbind(), shapes, strict=True)
        ]

    def exchange(self, x: torch.Tensor, scattered: int, gathered: int) -> torch.Tensor:
        """Scatters one dimension and gathers another, outside autograd; see collectives."""
        slices = torch.stack(x.detach().chunk(self.size, scattered))
        return torch.cat(self.all_to_all(slices).unbind(), gathered)


class EnteredTensor:
    """The last input of copy_to_layer and its output, until another enters or the pass ends.

    The output is held here, because autograd may keep only a view of it.
    """

    def __init__(self) -> None:
        """Remembers nothing yet."""
        self.sums_beside = True
        """Whether its gradient may be summed beside the computing of weights' gradients."""
        self._input: weakref.ref[torch.Tensor] | None = None
        self._output: torch.Tensor | None = None
        self._version = 0

    def output_for(self, x: torch.Tensor) -> torch.Tensor | None:
        """Returns the output for an input; None: another entered last, or this was written."""
        if self._input is None or self._input() is not x or x._version != self._version:
            return None
        return self._output

    def remember(self, x: torch.Tensor, output: torch.Tensor) -> None:
        """Keeps an input and its output."""
        self._input, self._output, self._version = weakref.ref(x), output, x._version

    def forget(self) -> None:
        """Forgets the tensor that entered last, after a pass."""
        self._input = self._output = None
