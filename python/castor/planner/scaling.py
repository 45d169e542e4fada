"""Predicts how a model's step scales with the ranks of a cluster (`castor scaling`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isinf

from castor.errors import UsageError
from castor.planner.cluster import Cluster
from castor.planner.layout_cost import LayoutCost
from castor.planner.layout_search import LayoutSearch


@dataclass(frozen=True, kw_only=True)
class Point:
    """One point of a scaling curve: a step on a number of ranks."""

    ranks: int
    """Number of ranks."""
    batch: int
    """Samples in a step."""
    sequence: int
    """Tokens in a sample."""
    cost: LayoutCost | None
    """Cost of the fastest layout; None: no layout fits."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all ranks; 0 if no layout fits."""
        return self.batch * self.sequence / self.cost.seconds if self.cost else 0.0

    def of_linear(self, first: Point) -> float:
        """Returns the throughput per rank as a fraction of that at `first`, which must fit."""
        return self.tokens_per_second / self.ranks / (first.tokens_per_second / first.ranks)


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Weak and strong scaling curve, fewest ranks first."""

    weak: list[Point]
    """Points with the same number of samples per rank."""
    strong: list[Point]
    """Points with the same number of samples in all, for ranks that can divide them."""


def first_that_fits(points: list[Point]) -> Point | None:
    """Returns the first point that fits, which a curve is compared with; None: none fits."""
    return next((point for point in points if point.cost), None)


def sizes(cluster: Cluster, most: int) -> list[Cluster]:
    """Returns the cluster in other sizes: fractions of a node, then full nodes, by doubling.

    A rank has the same share of its node in every size.

    Args:
        cluster: The cluster as described.
        most: Number of ranks of the largest size, at most.

    Raises:
        UsageError: A size has several nodes and the description has no network, or `most` is below
            1.
    """
    each = cluster.ranks_per_node
    counts = [n for n in _doubled(1, each - 1) if n <= most]
    found = [
        replace(cluster, nodes=1, ranks_per_node=n, at_once=min(cluster.at_once, n)) for n in counts
    ]
    found += [replace(cluster, nodes=nodes) for nodes in _doubled(1, most // each)]
    if not found:
        raise UsageError(f"most_ranks is {most}; give 1 or more")
    if found[-1].nodes > 1 and isinf(cluster.network.bytes_per_second):
        raise UsageError(
            f"network is missing, which {found[-1].nodes} nodes of {each} ranks are joined by: "
            "give the bandwidth of a rank, such as '50GB/s'"
        )
    return found


def scaling(
    search: LayoutSearch,
    cluster: Cluster,
    *,
    most: int = 1024,
    told: Callable[[int, int], None] = lambda _done, _all: None,
) -> Scaling:
    """Finds the fastest layout on one to `most` ranks, by doubling.

    Args:
        search: The model's layouts; its workload is that of the cluster as described.
        cluster: The cluster as described.
        most: Number of ranks of the last point, at most.
        told: Called with the number of finished searches and the number of all.

    Raises:
        UsageError: The samples of the workload are no multiple of the cluster's ranks, or `sizes`
            raises it.
        ValueError: See LayoutSearch.search.
    """
    batch = search.workload.batch
    each, left = divmod(batch, cluster.ranks)
    if left:
        raise UsageError(
            f"{batch} samples on {cluster.ranks} ranks leave none as many on each; give a batch "
            f"that is a multiple of {cluster.ranks}"
        )
    clusters = sizes(cluster, most)
    wanted = {(of.ranks, samples): of for of in clusters for samples in (each * of.ranks, batch)}
    found: dict[tuple[int, int], Point] = {}
    for done, ((ranks, samples), of) in enumerate(wanted.items()):
        told(done, len(wanted))
        of_batch = search.with_batch(samples)
        if of_batch.layouts(of):
            fastest = next(iter(of_batch.search(of, shown=1).fitting), None)
            found[ranks, samples] = Point(
                ranks=ranks, batch=samples, sequence=search.workload.sequence, cost=fastest
            )
    return Scaling(
        weak=[found[of.ranks, each * of.ranks] for of in clusters],
        strong=[found[of.ranks, batch] for of in clusters if (of.ranks, batch) in found],
    )


def _doubled(least: int, most: int) -> list[int]:
    return [least << n for n in range(64) if least << n <= most]
