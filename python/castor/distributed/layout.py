"""How the ranks of a run are divided: which train copies of the model, which parts of one."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from castor.distributed.tensor_ranks import TensorRanks
from castor.errors import UsageError
from castor.runtime.ranks import Ranks, make_ranks, own_groups, rank_and_size


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """The groups that this process is in. Ranks of one layer's parts are neighbours."""

    data: Ranks | None
    """Those with the same part of the model and other data; None: there are no others."""
    tensor: TensorRanks | None
    """Those with the other parts of each layer, and the same data; None: layers are whole."""
    process: int
    """Of all ranks, this one's number."""

    @classmethod
    def find(cls, tensor_size: int) -> RankLayout:
        """Divides all ranks into groups of `tensor_size`. Collective: every rank calls it.

        Raises:
            UsageError: Their number is no multiple of it.
        """
        rank, size = rank_and_size()
        if tensor_size == 1:
            return cls(data=make_ranks([range(size)]), tensor=None, process=rank)
        if size % tensor_size:
            started = f"{size} ranks have been started" if size > 1 else "this process is alone"
            raise UsageError(
                f"tp_size={tensor_size} needs a multiple of {tensor_size} ranks, and {started}: "
                f"start them with `castor run --nproc {tensor_size} ...`"
            )
        blocks = [list(range(i, i + tensor_size)) for i in range(0, size, tensor_size)]
        (tensor,) = own_groups(blocks, 1)
        return cls(
            data=make_ranks([list(of_one_part) for of_one_part in zip(*blocks, strict=True)]),
            tensor=TensorRanks.of(tensor, rank=rank % tensor_size, size=tensor_size),
            process=rank,
        )

    def share_of_cores(self) -> int:
        """How many of the cores that this process may run on are its own: ranks share theirs.

        Collective. 0: it is alone, and has all.
        """
        if self.data is None and self.tensor is None:
            return 0
        mine = (socket.gethostname(), sorted(os.sched_getaffinity(0)))
        everyone = [mine]
        for group in (self.tensor, self.data):
            if group is not None:
                everyone = [one for some in group.gather(everyone) for one in some]
        return max(1, len(mine[1]) // everyone.count(mine))


def data_rank_and_size(tensor_size: int) -> tuple[int, int]:
    """Which part of the data is this process's, and how many parts there are.

    Collective: every rank calls it.
    """
    rank, size = rank_and_size()
    return rank // tensor_size, max(1, size // tensor_size)
