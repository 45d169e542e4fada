"""The groups of a run's ranks: data-parallel replicas, and the ranks that share a model."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from castor.distributed.tensor_ranks import TensorRanks
from castor.errors import UsageError
from castor.runtime.process_groups import own_group, own_groups
from castor.runtime.ranks import Peers, Ranks, make_ranks, make_savers, rank_and_size


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """The groups that this process is in. Ranks of one layer's parts are neighbours."""

    data: Ranks | None
    """Ranks with the same shard of the model and other data or tokens; None: there are none."""
    tensor: TensorRanks | None
    """Ranks with the other shards of each layer and the same tokens, or with the other experts and
    other tokens; None: layers are full."""
    process: int
    """Number of this rank among all."""
    sequence: TensorRanks | None
    """Ranks with other tokens of the same data; None: sequences are full."""

    stages: TensorRanks | None = None
    """Ranks with the other pipeline stages, for the same data; None: there is one stage."""
    lines: tuple[tuple[int, ...], ...] = ()
    """The processes with the stages of each copy of the model, in the order of stages."""
    between_stages: distributed.ProcessGroup | None = None
    """Process group that hidden states go through."""
    everyone: Peers | None = None
    """All ranks, for checkpoints; None: each has the whole model, and `data` are all."""

    @property
    def groups(self) -> tuple[Peers, ...]:
        """Groups through which this rank reaches all others; none: it is alone."""
        groups = (self.tensor, self.data, self.stages)
        return tuple(group for group in groups if group is not None)

    @classmethod
    def find(cls, tensor_size: int, sequence_size: int, stages: int, *, asked: str) -> RankLayout:
        """Divides all ranks: neighbours share layers, neighbours of these sequences, then stages.

        Collective: every rank calls it.

        Args:
            tensor_size: Ranks that share layers.
            sequence_size: Ranks that share sequences.
            stages: Ranks that have the stages of a model.
            asked: The arguments that say so.

        Raises:
            UsageError: Their number is no multiple of the product.
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
        return cls(
            data=make_ranks(ranks.permute(1, 3, 0, 2).reshape(stages * tensor_size, -1).tolist()),
            tensor=_exchanging(ranks.reshape(-1, tensor_size).tolist(), rank),
            sequence=_exchanging(ranks.transpose(2, 3).reshape(-1, sequence_size).tolist(), rank),
            process=rank,
            stages=_exchanging(lines, rank),
            lines=tuple(map(tuple, lines)),
            between_stages=own_group(lines) if stages > 1 else None,
            everyone=make_savers() if tensor_size * stages > 1 else None,
        )

    def among_stages(self, numbers: Sequence[int]) -> TensorRanks | None:
        """Some of the ranks that have the stages of this part of the model.

        Collective: every rank of the run calls it, with the same numbers.

        Args:
            numbers: Theirs in `stages`; ascending, two or more.

        Returns:
            None where this rank is none of them.
        """
        some = [[line[number] for number in numbers] for line in self.lines]
        some += [[rank] for line in self.lines for n, rank in enumerate(line) if n not in numbers]
        return _exchanging(some, self.process)

    def share_of_cores(self) -> int:
        """Number of this process's cores that are its own: ranks share theirs.

        Collective. 0: it is alone, and has all.
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
    """Returns the ranks of this rank's group, if there are others."""
    if all(len(part) == 1 for part in parts):
        return None
    (name,) = own_groups(parts, 1)  # all ranks make all groups
    mine = next(part for part in parts if rank in part)
    if len(mine) == 1:
        return None
    return TensorRanks.of(name, rank=mine.index(rank), size=len(mine))


def data_rank_and_size(sharing: int, neighbours: int = 1) -> tuple[int, int]:
    """Returns the number of this process's part of the data, and how many parts there are.

    Collective: every rank calls it.

    Args:
        sharing: How many ranks take the same data.
        neighbours: Of ranks one after the other, how many take different data: those that divide
            experts alone.
    """
    rank, size = rank_and_size()
    group, place = rank // (sharing * neighbours), rank % neighbours
    return group * neighbours + place, max(1, size // sharing)
