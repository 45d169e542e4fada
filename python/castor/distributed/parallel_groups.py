"""The process groups of a run's ranks, one for each dimension of parallelism."""

from __future__ import annotations

import math
import os
import pickle
import socket
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import distributed

from castor.config.names import ReduceOn, Reduction
from castor.errors import UsageError
from castor.runtime.device_groups import (
    DeviceBackend,
    DeviceGroup,
    DeviceLink,
    DeviceReduction,
    check_device_reduction,
    end_unused_groups,
    why_through_host,
)
from castor.runtime.parallel_dims import Dimension, ParallelDims
from castor.runtime.process_groups import own_group, own_groups
from castor.runtime.rank_group import DataParallelGroup, RankGroup
from castor.runtime.ranks import rank_and_size

# --- The groups of ranks that share a model: tensor, context, expert and pipeline parallel ones ---

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


# --- The process groups of a run's ranks, one for each dimension of parallelism -------------------


@dataclass(frozen=True, kw_only=True)
class ParallelGroups:
    """The process groups that this rank is in, one for each dimension of ParallelDims."""

    dims: ParallelDims
    """Sizes of the groups."""
    rank: int
    """Number of this process among all ranks of the run."""
    dp: DataParallelGroup | None
    """Ranks with the same shard of the model and other data or tokens; None: this rank is the only
    one with its shard."""
    layers: ModelParallelGroup | None
    """The tensor-parallel group, or the expert-parallel one where dims.tp is 1; None: neither.

    Tensor-parallel ranks have the other shards of each layer and the same tokens. Expert-parallel
    ranks have the other experts and other tokens.
    """
    cp: ModelParallelGroup | None
    """The context-parallel group, with other tokens of the same data; None: sequences are full."""
    pp: ModelParallelGroup | None = None
    """The pipeline-parallel group, with the other stages for the same data; None: there is one."""
    pp_group: distributed.ProcessGroup | None = None
    """Process group that sends stage inputs and outputs; None: there is one stage."""
    everyone: RankGroup | None = None
    """All ranks, for checkpoints; None: each has the full model, and `dp` are all ranks."""
    device_backend: DeviceBackend | None = None
    """Backend that sends activations from device to device; None: they go through the host."""
    communicator_bytes: int = 0
    """Device memory that the communicators for activations take."""
    sums: DeviceReduction | None = None
    """Collectives of `dp` between devices; None: the host reduces gradients."""
    reduces_on_host: str = ""
    """Why the host reduces gradients, where that is a choice."""

    @property
    def groups(self) -> tuple[RankGroup, ...]:
        """Groups through which this rank reaches all others; empty: it is alone."""
        groups = (self.layers, self.dp, self.pp)
        return tuple(group for group in groups if group is not None)

    @classmethod
    def make(cls, replica: ParallelDims) -> ParallelGroups:
        """Makes the groups of all ranks. Collective: every rank calls it.

        Args:
            replica: Sizes of one replica; the number of ranks gives that of replicas.

        Raises:
            UsageError: The number of ranks is no multiple of one replica's.
        """
        rank, size = rank_and_size()
        dims = replica.in_world(size)
        return cls(
            dims=dims,
            rank=rank,
            dp=DataParallelGroup.make(dims.groups("dp")),
            layers=_model_parallel(dims.groups("layers"), rank),
            cp=_model_parallel(dims.groups("cp"), rank),
            pp=_model_parallel(dims.groups("pp"), rank),
            pp_group=own_group(dims.groups("pp")) if dims.pp > 1 else None,
            everyone=RankGroup.of_all_ranks() if dims.layer_shards * dims.pp > 1 else None,
        )

    def connect_devices(
        self,
        device: torch.device,
        reduction: Reduction = "ordered",
        *,
        reduce_on: ReduceOn = "auto",
        most_reduction_bytes: int = 0,
    ) -> ParallelGroups:
        """Lets the ranks of one model send tensors from device to device.

        Collective: every rank calls it. Without a backend for the devices (DeviceBackend.find)
        tensors go through the host. Groups of earlier models that are gone end first.

        Args:
            device: Device of this rank.
            reduction: Who adds up what ranks give: castor in rank order, or the backend.
            reduce_on: Where data-parallel ranks reduce gradients in rank order.
            most_reduction_bytes: Device memory that "auto" lets that take.

        Returns:
            These groups, with the backend and the device memory that its communicators take.

        Raises:
            UsageError: There is no backend that could add up; every rank raises it.
        """
        if self.groups and device.type != "cpu":
            end_unused_groups(self.gather)
        named: dict[Dimension, ModelParallelGroup | None]
        named = {"layers": self.layers, "cp": self.cp, "pp": self.pp}
        connected = {name: ranks for name, ranks in named.items() if ranks}
        required = reduction == "backend" or reduce_on == "device"
        summing = bool(self.groups) and (required or reduce_on == "auto")
        backend = DeviceBackend.find(device, self.gather) if connected or summing else None
        if summing and required:
            check_device_reduction(backend, device, reduction)
        why = "" if summing else "as asked for"
        if backend is None:
            return replace(self, reduces_on_host=why or why_through_host(device))
        free = backend.free_bytes()
        for name, ranks in connected.items():
            ranks.use_device_link(
                DeviceLink(ranks.links, backend.group(self.dims.groups(name)), device, reduction)
            )
        between = backend.free_bytes()
        reducing: tuple[DeviceGroup, ...] = ()
        if summing and self.dp:
            of_dp = self.dims.groups("dp")
            reducing = backend.group(of_dp), backend.group(of_dp)
        taken = (max(0, free - between), max(0, between - backend.free_bytes()))
        linked, reduced = (max(of_each) for of_each in zip(*self.gather(taken), strict=True))
        sums = None
        if reducing:
            sums = DeviceReduction(
                reducing,
                backend,
                reduction=reduction,
                communicator_bytes=reduced,
                most_bytes=None if required else most_reduction_bytes,
            )
        return replace(
            self,
            device_backend=backend if connected else None,
            communicator_bytes=linked,
            sums=sums,
            reduces_on_host=why,
        )

    def subset_of_pp(self, numbers: Sequence[int]) -> ModelParallelGroup | None:
        """Makes a group of some ranks of this rank's pipeline-parallel group.

        Collective: every rank of the run calls it, with the same numbers.

        Args:
            numbers: Indices of the group's ranks in `pp`; ascending, two or more.

        Returns:
            The group; None if this rank is not in it.
        """
        pipelines = self.dims.groups("pp")
        some = [[ranks[number] for number in numbers] for ranks in pipelines]
        some += [[one] for ranks in pipelines for n, one in enumerate(ranks) if n not in numbers]
        return _model_parallel(some, self.rank)

    def share_of_cores(self) -> int:
        """Returns this process's share of the cores that it shares with other ranks. Collective.

        Returns 0 if the process is alone and has all cores.
        """
        if not self.groups:
            return 0
        mine = (socket.gethostname(), sorted(os.sched_getaffinity(0)))
        return max(1, len(mine[1]) // self.gather(mine).count(mine))

    def gather(self, value: Any) -> list[Any]:
        """Returns the picklable values of all ranks of all groups, by number. Collective."""
        everyone = {self.rank: value}
        for group in self.groups:
            everyone = {
                of: one for some in group.all_gather_object(everyone) for of, one in some.items()
            }
        return [everyone[of] for of in sorted(everyone)]


def _model_parallel(parts: list[list[int]], rank: int) -> ModelParallelGroup | None:
    """Returns the ranks of this rank's group; None if it is alone there."""
    if all(len(part) == 1 for part in parts):
        return None
    (name,) = own_groups(parts, 1)  # all ranks make all groups
    mine = next(part for part in parts if rank in part)
    if len(mine) == 1:
        return None
    return ModelParallelGroup.of(name, mine)


def data_rank_and_size(replica: ParallelDims) -> tuple[int, int]:
    """Returns the number of this process's shard of the data, and the number of data shards.

    Collective: every rank calls it.

    Args:
        replica: Sizes of one replica of the model.

    Raises:
        UsageError: The number of ranks is no multiple of one replica's.
    """
    rank, size = rank_and_size()
    if size == 1:
        return 0, 1
    dims = replica.in_world(size)
    return dims.coordinates(rank).dp, dims.dp
