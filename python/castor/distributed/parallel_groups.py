"""The process groups of a run's ranks, one for each dimension of parallelism."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import distributed

from castor.config.names import Reduction
from castor.distributed.model_parallel_group import ModelParallelGroup
from castor.runtime.device_groups import (
    BackendSums,
    DeviceBackend,
    DeviceLink,
    check_backend_sums,
)
from castor.runtime.parallel_dims import Dimension, ParallelDims
from castor.runtime.process_groups import own_group, own_groups
from castor.runtime.rank_group import DataParallelGroup, RankGroup
from castor.runtime.ranks import rank_and_size


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
    """Backend that sends memory of devices; None: it goes through the host."""
    sums: BackendSums | None = None
    """Collectives of `dp` by the backend; None: castor adds gradients in rank order."""
    communicator_bytes: int = 0
    """Device memory that the backend's communicators take."""

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
        self, device: torch.device, reduction: Reduction = "ordered"
    ) -> ParallelGroups:
        """Lets the ranks of one model send tensors from device to device.

        Collective: every rank calls it. Without a backend for the devices (DeviceBackend.find)
        tensors go through the host.

        Args:
            device: Device of this rank.
            reduction: Who adds up what ranks give: castor in rank order, or the backend.

        Returns:
            These groups, with the backend and the device memory that its communicators take.

        Raises:
            UsageError: There is no backend that could add up; every rank raises it.
        """
        named: dict[Dimension, ModelParallelGroup | None]
        named = {"layers": self.layers, "cp": self.cp, "pp": self.pp}
        connected = {name: ranks for name, ranks in named.items() if ranks}
        summing = reduction == "backend" and bool(self.groups)
        backend = DeviceBackend.find(device, self.gather) if connected or summing else None
        if summing:
            check_backend_sums(backend, device)
        if backend is None:
            return self
        free = backend.free_bytes()
        for name, ranks in connected.items():
            ranks.use_device_link(
                DeviceLink(ranks.links, backend.group(self.dims.groups(name)), device, reduction)
            )
        sums = None
        if summing and self.dp:
            of_dp = self.dims.groups("dp")
            sums = BackendSums(backend.group(of_dp), backend.group(of_dp), device)
        taken = max(self.gather(max(0, free - backend.free_bytes())))
        return replace(self, device_backend=backend, sums=sums, communicator_bytes=taken)

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
