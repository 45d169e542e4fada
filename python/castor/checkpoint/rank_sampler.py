"""One order of samples that ranks share, and where in it they are together."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DistributedSampler


class RankSampler(DistributedSampler[Any]):
    """A DistributedSampler that can begin anywhere in its epoch's order.

    Of the samples that are left rank r takes each n-th from the r-th, so that what n ranks have
    taken so far is a beginning of the order: as many ranks as there are go on behind it.
    """

    begin = 0
    """Number of samples of the epoch that are not handed out."""

    def __iter__(self) -> Iterator[int]:
        """This rank's indices of the epoch."""
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
        """Returns the values that decide an epoch's order, by their names in messages."""
        num_samples = len(self.dataset)  # type: ignore[arg-type]
        return {"num_samples": num_samples, "shuffle": self.shuffle, "seed": self.seed}

    def taken(self, batches: int, batch_size: int) -> int:
        """Returns the number of samples that all ranks have taken together.

        Args:
            batches: Handed out on each rank, from `begin` on.
            batch_size: Samples in a batch of one rank.
        """
        step = batch_size * self.num_replicas
        taken, end = self.begin + batches * step, self.order["num_samples"]
        nothing_left = end - taken < (step if self.drop_last else 1)
        return int(end) if nothing_left else taken
