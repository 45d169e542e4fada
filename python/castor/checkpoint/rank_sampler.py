"""A sampler whose ranks share one order of samples and one position in it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DistributedSampler


class RankSampler(DistributedSampler[Any]):
    """A DistributedSampler that can begin anywhere in its epoch's order.

    Rank r of n takes samples r, r + n, r + 2n and so on of the samples that are left. So the
    samples that all ranks have taken are always a prefix of the order. Any number of ranks can go
    on behind it.
    """

    begin = 0
    """Number of samples at the beginning of the epoch's order that are skipped."""

    def __iter__(self) -> Iterator[int]:
        """Returns this rank's sample indices of the epoch, from `begin` on."""
        if self.begin == 0:
            return super().__iter__()
        whole: DistributedSampler[Any] = DistributedSampler(
            self.dataset, num_replicas=1, rank=0, shuffle=self.shuffle, seed=self.seed
        )
        whole.set_epoch(self.epoch)
        order = list(whole)
        left = order[self.begin :]
        beyond = len(left) % self.num_replicas
        if beyond and self.drop_last:
            del left[-beyond:]
        elif beyond:
            left += itertools.islice(itertools.cycle(order), self.num_replicas - beyond)
        return iter(left[self.rank :: self.num_replicas])

    @property
    def order(self) -> dict[str, Any]:
        """Values that decide an epoch's order, by their names in messages."""
        num_samples = len(self.dataset)  # type: ignore[arg-type]
        return {"num_samples": num_samples, "shuffle": self.shuffle, "seed": self.seed}

    def taken(self, batches: int, batch_size: int) -> int:
        """Returns the number of samples that all ranks have taken together in this epoch.

        Args:
            batches: Number of batches handed out on each rank, from `begin` on.
            batch_size: Number of samples in a batch of one rank.
        """
        step = batch_size * self.num_replicas
        taken, end = self.begin + batches * step, self.order["num_samples"]
        nothing_left = end - taken < (step if self.drop_last else 1)
        return int(end) if nothing_left else taken
