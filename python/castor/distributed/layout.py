"""The groups of a run's ranks: data-parallel replicas, and the ranks that share a model."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import distributed

from castor.distributed.tensor_ranks import TensorRanks
from castor.errors import UsageError
from castor.runtime.device_groups import DeviceBackend, DeviceLink
from castor.runtime.process_groups import own_group, own_groups
from castor.runtime.ranks import Peers, Ranks, make_ranks, make_savers, rank_and_size


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """The groups that this process is in. Tensor-parallel ranks are neighbours."""

    data: Ranks | None
    """Ranks with the same shard of the model and other data or tokens; None: this rank is the only
    one with its shard."""
    tensor: TensorRanks | None
    """Tensor-parallel ranks, or expert-parallel ranks; None: layers are full.

    Tensor-parallel ranks have the other shards of each layer and the same tokens. Expert-parallel
    ranks have the other experts and other tokens.
    """
    process: int
    """Number of this process among all ranks of the run."""
    sequence: TensorRanks | None
    """Context-parallel ranks, with other tokens of the same data; None: sequences are full."""

    stages: TensorRanks | None = None
    """Ranks with the other pipeline stages, for the same data; None: there is one stage."""
    lines: tuple[tuple[int, ...], ...] = ()
    """Processes of each pipeline, one for each rank of `stages`, in the order of stages."""
    stage_group: distributed.ProcessGroup | None = None
    """Process group that sends stage inputs and outputs; None: there is one stage."""
    everyone: Peers | None = None
    """All ranks, for checkpoints; None: each has the full model, and `data` are all ranks."""
    subsets: Mapping[str, list[list[int]]] = field(default_factory=dict)
    """Subsets of all ranks whose groups are `data`, `tensor`, `sequence` and `stages`."""
    device_backend: DeviceBackend | None = None
    """Backend that sends memory of devices; None: it goes through the host."""
    communicator_bytes: int = 0
    """Device memory that the backend's communicators take."""

    @property
    def groups(self) -> tuple[Peers, ...]:
        """Groups through which this rank reaches all others; empty: it is alone."""
        groups = (self.tensor, self.data, self.stages)
        return tuple(group for group in groups if group is not None)

    @classmethod
    def find(cls, tensor_size: int, sequence_size: int, stages: int, *, asked: str) -> RankLayout:
        """Makes the groups of all ranks. Collective: every rank calls it.

        Tensor-parallel ranks are direct neighbours, then follow context-parallel ranks, then
        stages, then data-parallel replicas.

        Args:
            tensor_size: Number of ranks of a tensor-parallel (or expert-parallel) group.
            sequence_size: Number of ranks of a context-parallel group.
            stages: Number of ranks of a pipeline.
            asked: The user's arguments that set these sizes, for a message.

        Raises:
            UsageError: The number of ranks is no multiple of the product of the sizes.
        """
        rank, size = rank_and_size()
        each = tensor_size * sequence_size * stages
        if size % each:
            started = f"{size} ranks have been started" if size > 1 else "this process is alone"
            raise UsageError(
                f"{asked} needs a multiple of {each} ranks, and {started}: start them with "
                f"`castor run --nproc {each} ...`"
            )
        ranks = torch.arange(size).view(-1, stages, sequence_size, tensor_size)
        lines = ranks.permute(0, 2, 3, 1).reshape(-1, stages).tolist()
        subsets = {
            "data": ranks.permute(1, 3, 0, 2).reshape(stages * tensor_size, -1).tolist(),
            "tensor": ranks.reshape(-1, tensor_size).tolist(),
            "sequence": ranks.transpose(2, 3).reshape(-1, sequence_size).tolist(),
            "stages": lines,
        }
        return cls(
            data=make_ranks(subsets["data"]),
            tensor=_exchanging(subsets["tensor"], rank),
            sequence=_exchanging(subsets["sequence"], rank),
            process=rank,
            stages=_exchanging(lines, rank),
            subsets=subsets,
            lines=tuple(map(tuple, lines)),
            stage_group=own_group(lines) if stages > 1 else None,
            everyone=make_savers() if tensor_size * stages > 1 else None,
        )

    def connect_devices(self, device: torch.device) -> RankLayout:
        """Lets the ranks of one model send tensors from device to device.

        Collective: every rank calls it. Without a backend for the devices (DeviceBackend.find)
        tensors go through the host.

        Args:
            device: Device of this rank.

        Returns:
            This layout, with the backend and the device memory that its communicators take.
        """
        named = {"tensor": self.tensor, "sequence": self.sequence, "stages": self.stages}
        connected = {name: ranks for name, ranks in named.items() if ranks}
        backend = DeviceBackend.find(device, self.gather) if connected else None
        if backend is None:
            return self
        free = backend.free_bytes()
        for name, ranks in connected.items():
            ranks.use_device_link(
                DeviceLink(ranks.tensors, backend.group(self.subsets[name]), device)
            )
        taken = max(self.gather(max(0, free - backend.free_bytes())))
        return replace(self, device_backend=backend, communicator_bytes=taken)

    def peers_of_stages(self, numbers: Sequence[int]) -> TensorRanks | None:
        """Makes a group of some of this rank's pipeline ranks.

        Collective: every rank of the run calls it, with the same numbers.

        Args:
            numbers: Numbers of the group's ranks in `stages`; ascending, two or more.

        Returns:
            The group; None if this rank is not in it.
        """
        some = [[line[number] for number in numbers] for line in self.lines]
        some += [[rank] for line in self.lines for n, rank in enumerate(line) if n not in numbers]
        return _exchanging(some, self.process)

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
        everyone = {self.process: value}
        for group in self.groups:
            everyone = {of: one for some in group.gather(everyone) for of, one in some.items()}
        return [everyone[of] for of in sorted(everyone)]


def _exchanging(parts: list[list[int]], rank: int) -> TensorRanks | None:
    """Returns the ranks of this rank's group; None if it is alone there."""
    if all(len(part) == 1 for part in parts):
        return None
    (name,) = own_groups(parts, 1)  # all ranks make all groups
    mine = next(part for part in parts if rank in part)
    if len(mine) == 1:
        return None
    return TensorRanks.of(name, rank=mine.index(rank), size=len(mine))


def data_rank_and_size(sharing: int, neighbours: int = 1) -> tuple[int, int]:
    """Returns the number of this process's shard of the data, and the number of data shards.

    Collective: every rank calls it.

    Args:
        sharing: Number of ranks that take the same data.
        neighbours: Number of neighbouring ranks that take different data: the size of an
            expert-parallel group without tensor parallelism; otherwise 1.
    """
    rank, size = rank_and_size()
    group, place = rank // (sharing * neighbours), rank % neighbours
    return group * neighbours + place, max(1, size // sharing)
