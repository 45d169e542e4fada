"""The numbers of ranks along each dimension of parallelism, and the place of a rank among them.

The names are those of TorchTitan's ParallelDims.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple

from castor.errors import UsageError

Dimension = Literal["dp", "pp", "cp", "layers"]
"""Dimension whose groups have a rank with each index: "dp" are the ranks with the same shard of the
model (data- and context-parallel ones), "layers" the ranks that shard a layer or its experts."""


class RankCoordinates(NamedTuple):
    """The index of a rank in its group along each dimension; `dp` numbers its shard of the data."""

    dp: int
    pp: int
    cp: int
    tp: int
    ep: int


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """Sizes of the groups of a run's ranks.

    Ranks are numbered with tensor-parallel ranks (or, without these, expert-parallel ranks) as
    direct neighbours. Then follow context-parallel ranks, pipeline stages and data-parallel ranks.

    Raises:
        TypeError, ValueError: A size is no whole number of 1 or more, or `ep` does not fit.
    """

    dp: int = 1
    """Number of data-parallel ranks, which take different samples."""
    cp: int = 1
    """Number of context-parallel ranks: HybridParallelPlugin's sp_size."""
    tp: int = 1
    """Number of tensor-parallel ranks: tp_size."""
    pp: int = 1
    """Number of pipeline-parallel ranks: pp_size."""
    ep: int = 1
    """Number of expert-parallel ranks: ep_size. They are the tensor-parallel ranks where `tp` is
    above 1, otherwise data-parallel ranks; so they add none."""

    def __post_init__(self) -> None:
        """Checks the sizes."""
        for size in fields(self):
            value = getattr(self, size.name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{size.name} is {value!r}; give a whole number")
            if value < 1:
                raise ValueError(f"{size.name} is {value}; give 1 or more")
        if self.tp > 1 and self.ep not in (1, self.tp):
            raise ValueError(f"ep={self.ep} is neither 1 nor tp={self.tp}")
        if self.dp % self.ep_of_dp:
            raise ValueError(
                f"dp={self.dp} is no multiple of ep={self.ep}, whose ranks are "
                "data-parallel ones with tp=1"
            )

    @classmethod
    def of_one_replica(cls, *, cp: int = 1, tp: int = 1, pp: int = 1, ep: int = 1) -> ParallelDims:
        """Returns the sizes with which each shard of the model is on as few ranks as possible."""
        return cls(dp=ep if tp == 1 else 1, cp=cp, tp=tp, pp=pp, ep=ep)

    @classmethod
    def of_arguments(cls, arguments: Mapping[str, Any]) -> ParallelDims:
        """Returns one replica's sizes from HybridParallelPlugin's arguments; see arguments."""
        sizes = {name: arguments.get(f"{name}_size", 1) for name in ("tp", "pp", "ep")}
        return cls.of_one_replica(cp=arguments.get("sp_size", 1), **sizes)

    def arguments(self) -> dict[str, int]:
        """Returns the sizes by the names of HybridParallelPlugin's arguments."""
        return {"tp_size": self.tp, "ep_size": self.ep, "sp_size": self.cp, "pp_size": self.pp}

    def one_replica(self) -> ParallelDims:
        """Returns the sizes of the ranks that one replica needs at least."""
        return replace(self, dp=self.ep_of_dp)

    def in_world(self, world_size: int) -> ParallelDims:
        """Returns the sizes with as many data-parallel ranks as `world_size` ranks allow.

        Raises:
            UsageError: The number of ranks is no multiple of one replica's.
        """
        one = self.one_replica()
        replicas, left = divmod(world_size, one.world_size)
        if left:
            sizes = (f"{name}={size}" for name, size in self.arguments().items() if size > 1)
            number, alone = one.world_size, world_size == 1
            started = "this process is alone" if alone else f"{world_size} ranks have been started"
            raise UsageError(
                f"{', '.join(sizes)} needs a multiple of {number} ranks, and {started}: start them "
                f"with `castor run --nproc {number} ...`"
            )
        return replace(one, dp=one.dp * replicas)

    @property
    def ep_of_dp(self) -> int:
        """Number of expert-parallel ranks among the data-parallel ones; 1 with `tp` above 1."""
        return self.ep if self.tp == 1 else 1

    @property
    def edp(self) -> int:
        """Number of data-parallel ranks with the same experts."""
        return self.dp // self.ep_of_dp

    @property
    def layer_shards(self) -> int:
        """Number of ranks that shard each layer, or its experts."""
        return max(self.tp, self.ep)

    @property
    def same_shard(self) -> int:
        """Number of ranks with the same shard of the model, over which ZeRO shards its state."""
        return self.edp * self.cp

    @property
    def non_data_parallel_size(self) -> int:
        """Number of ranks that take the same samples."""
        return self.cp * self.tp * self.pp

    @property
    def is_one_rank(self) -> bool:
        """Whether one rank has the full model and full sequences of its data."""
        return self.non_data_parallel_size == self.layer_shards == 1

    @property
    def world_size(self) -> int:
        """Number of all ranks."""
        return self.dp * self.non_data_parallel_size

    def coordinates(self, rank: int) -> RankCoordinates:
        """Returns the indices of a rank.

        Raises:
            ValueError: There is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is none of {self.world_size} ranks")
        rest, layer = divmod(rank, self.layer_shards)
        rest, cp = divmod(rest, self.cp)
        edp, pp = divmod(rest, self.pp)
        return RankCoordinates(
            dp=edp * self.ep_of_dp + (layer if self.ep_of_dp > 1 else 0),
            pp=pp,
            cp=cp,
            tp=layer if self.tp > 1 else 0,
            ep=layer if self.ep > 1 else 0,
        )

    def groups(self, dimension: Dimension) -> list[list[int]]:
        """Returns the ranks of each group along a dimension; every rank is in one group."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for edp, pp, cp, layer in itertools.product(
            range(self.edp), range(self.pp), range(self.cp), range(self.layer_shards)
        ):
            group = {"dp": (pp, layer), "pp": (edp, cp, layer), "cp": (edp, pp, layer),
                     "layers": (edp, pp, cp)}[dimension]  # fmt: skip
            rank = ((edp * self.pp + pp) * self.cp + cp) * self.layer_shards + layer
            groups.setdefault(group, []).append(rank)
        return [*groups.values()]


ONE_RANK = ParallelDims()
"""Sizes of a process that is alone."""
