"""Memory and traffic of data-parallel replicas in a step."""

from __future__ import annotations

from dataclasses import dataclass

from castor.planner.cluster import Cluster
from castor.planner.layouts import Layout

COMMUNICATORS_OF_REPLICAS = 2
"""Number of communicators of replicas that reduce on their GPUs: for gradients and for weights."""


@dataclass(frozen=True, kw_only=True)
class SentByRank:
    """Bytes of gradients and weights that a rank sends in a step."""

    within: float = 0.0
    """Bytes to ranks of its node."""
    across: float = 0.0
    """Bytes to ranks of other nodes; all bytes, if a collective over nodes is not split by node."""


def ranks_sharing_host_storage(layout: Layout, cluster: Cluster) -> int:
    """Returns the number of ranks that share the host storage of parameters and gradients.

    Ranks of a node share it, on GPUs only where all replicas run on one node
    (docs/design/0057-one-host-copy-for-gpus.md). That is so with zero_stage "auto" and 1, which
    layouts have; 2 and 3 shard the storage on GPUs and on several nodes.
    """
    of_node = _ranks_of_a_node(layout, cluster)
    return of_node if cluster.on_host or of_node == layout.dims.same_shard else 1


def _ranks_of_a_node(layout: Layout, cluster: Cluster) -> int:
    """Returns the number of a node's ranks that have the same parameters."""
    apart = layout.dims.layer_shards * layout.dims.pp
    return max(1, min(layout.dims.same_shard, cluster.ranks_per_node // apart))


def sent_between_replicas(
    layout: Layout, cluster: Cluster, param_bytes: int, element_bytes: int
) -> SentByRank:
    """Returns the bytes that a rank sends to reduce gradients and to gather weights.

    - Replicas on one node share weights and gradients in host memory: each rank reads the others'
      gradients of its shard.
    - Replicas that compute on several hosts do so on each host. Between hosts go sums of gradients,
      their means and shards of weights.
    - GPUs on several nodes, and nodes of one replica each, exchange shards of gradients after
      backward, and gather gradients and weights.

    Args:
        layout: The layout of the ranks.
        cluster: The cluster.
        param_bytes: Bytes of a rank's parameters.
        element_bytes: Bytes of a parameter's element.
    """
    copies, of_node = layout.dims.same_shard, _ranks_of_a_node(layout, cluster)
    if copies == 1:
        return SentByRank()
    nodes = copies // of_node
    within = (of_node - 1) / of_node * param_bytes
    if nodes == 1:
        return SentByRank(within=within)
    if cluster.on_host and of_node > 1:
        across = _crossing(param_bytes / of_node, element_bytes, nodes)
        return SentByRank(within=within, across=across)
    return SentByRank(across=3 * (copies - 1) / copies * param_bytes)


def reduced(layout: Layout, cluster: Cluster, param_bytes: int, element_bytes: int) -> float:
    """Returns the seconds in which a rank sends the bytes of sent_between_replicas.

    Traffic within a node and between nodes adds up: both need the processors that ranks share.
    """
    sent = sent_between_replicas(layout, cluster, param_bytes, element_bytes)
    ways = ((cluster.replica_link or cluster.link, sent.within), (cluster.network, sent.across))
    return sum(link.seconds_on_host(num_bytes) for link, num_bytes in ways if num_bytes)


def least_reduced(layout: Layout, cluster: Cluster, param_bytes: int, element_bytes: int) -> float:
    """Returns a lower bound of the seconds of exchanges between replicas that nothing hides."""
    of_node = _ranks_of_a_node(layout, cluster) == layout.dims.same_shard
    if cluster.reduces_on_gpus and of_node:
        return 0.0
    return reduced(layout, cluster, param_bytes, element_bytes)


def gathering_ranks(layout: Layout, cluster: Cluster) -> int:
    """Returns the number of ranks that reduce gradients of streamed chunks on their GPUs.

    That is so on one node, where one backward pass brings all of a step's gradients, and
    cluster.reduces_on_gpus. More passes add up in host storage
    (docs/design/0067-reduced-on-the-gpus.md).

    Returns:
        The number of ranks. 1: gradients of streamed chunks go to the host in full.
    """
    copies = layout.dims.same_shard
    apart = not cluster.reduces_on_gpus or _ranks_of_a_node(layout, cluster) != copies
    return 1 if apart or layout.microbatches > 1 else copies


def communicator_bytes(layout: Layout, cluster: Cluster) -> int:
    """Returns the device bytes of a rank's communicators between GPUs.

    There is one for each group of ranks that share the model, and there are two for replicas that
    reduce gradients on their GPUs.
    """
    if cluster.transport != "nccl":
        return 0
    dims = layout.dims
    count = sum(size > 1 for size in (dims.layer_shards, dims.cp, dims.pp))
    if dims.same_shard > 1 and cluster.reduces_on_gpus:
        count += COMMUNICATORS_OF_REPLICAS
    return count * cluster.communicator_bytes


def dram_of_replicas(layout: Layout, cluster: Cluster, param_bytes: int, resident: float) -> float:
    """Returns the bytes that a rank moves through host memory for exchanges with other replicas.

    Of P bytes, on one node with n replicas:

    - streamed chunks, reduced on the host: each rank reads a shard of all n gradients, and writes
      the shard of the mean: P + P / n.
    - streamed chunks, reduced on the GPUs: nothing beside the way to the host, which is that of the
      rank's shard of the mean. After several micro-batches (gathering_ranks) the sums go from the
      host to the GPU, and the rank's shard of the mean comes back: P + P / n.
    - resident chunks of GPUs, reduced on the host: their gradients come to the host first, the
      means go back, and weights go through the host in shards: 4 P + P / n.
    - resident chunks of GPUs, reduced there: the rank's shard of the weights: P / n.

    What is sent to other nodes, or to replicas that share no host memory, is read once and written
    once. Gradients of streamed chunks on their way to host storage are not in it.

    Args:
        layout: The layout of the ranks.
        cluster: The cluster.
        param_bytes: Bytes of a rank's parameters.
        resident: Share of the parameters in resident chunks.
    """
    copies, of_node = layout.dims.same_shard, _ranks_of_a_node(layout, cluster)
    if copies == 1:
        return 0.0
    if copies != of_node:
        sent = sent_between_replicas(layout, cluster, param_bytes, element_bytes=4)
        return 2 * (sent.within + sent.across)
    on_device = 0.0 if cluster.on_host else resident * param_bytes
    on_host = param_bytes - on_device
    passes = 0 if cluster.reduces_on_gpus else 4
    streamed = 0.0 if gathering_ranks(layout, cluster) > 1 else 1 + 1 / copies
    return on_host * streamed + on_device * (passes + 1 / copies)


@dataclass(frozen=True, kw_only=True)
class ReplicaSeconds:
    """Seconds in which a rank exchanges gradients and weights with other replicas in a step."""

    gradients: float
    """Seconds for gradients, which are reduced beside the last backward."""
    weights: float
    """Seconds for weights, which are gathered beside the next forward."""

    def exposed(self, *, backward: float, forward: float, chunks: int) -> float:
        """Returns the seconds that no computing hides.

        A chunk's gradients are complete when the backward of its modules is over, and are reduced
        one chunk after the other. The forward of a chunk's modules waits for its weights.

        Args:
            backward: Seconds of the last backward.
            forward: Seconds of the next forward; 0: weights are gathered before it.
            chunks: Number of the rank's chunks, which come evenly.
        """
        reduced = begun = 0.0
        for chunk in range(1, chunks + 1):
            reduced = max(reduced, backward * chunk / chunks) + self.gradients / chunks
            begun = max(begun, self.weights * chunk / chunks) + forward / chunks
        return (reduced - backward) + (begun - forward)


def sent_between_gpus(
    layout: Layout, cluster: Cluster, param_bytes: int, resident: float
) -> ReplicaSeconds | None:
    """Returns the seconds of exchanges between the GPUs of one node.

    Gradients of resident chunks are all-reduced where they are. Of their weights a rank copies its
    shard to the host, and all shards are gathered on the GPUs. Gradients of streamed chunks are
    reduce-scattered on the GPU; the rank's shard goes to the host as gradients do, and is not
    counted here. After several micro-batches (gathering_ranks) they come from the host, and the
    shard goes back. Weights of streamed chunks need nothing, since ranks share them in host memory
    (docs/design/0064-sums-by-the-backend.md).

    Args:
        layout: The layout of the ranks.
        cluster: The cluster.
        param_bytes: Bytes of a rank's parameters.
        resident: Share of the parameters in resident chunks.

    Returns:
        The seconds. None where the host reduces, or replicas are on several nodes.
    """
    copies = layout.dims.same_shard
    alone = copies == 1 or _ranks_of_a_node(layout, cluster) != copies
    if not cluster.reduces_on_gpus or alone:
        return None
    machine, link = cluster.machine, cluster.link
    on_device, on_host = resident * param_bytes, (1 - resident) * param_bytes
    to_host = on_device / copies / machine.d2h
    streamed = on_host / machine.h2d + on_host / copies / machine.d2h
    if gathering_ranks(layout, cluster) > 1:
        streamed = 0.0
    return ReplicaSeconds(
        gradients=link.collective("all_reduce", on_device, copies)
        + streamed
        + link.collective("all_to_all", on_host, copies),
        weights=to_host + link.collective("all_gather", on_device / copies, copies),
    )


def _crossing(means: float, element_bytes: int, nodes: int) -> float:
    """Returns the bytes that the busiest rank sends to other nodes (docs/design/0047-nodes.md).

    With two nodes, the first sends sums and the last one means. With more, a node between others
    sends both.
    """
    sums = means * 4 / element_bytes
    weights = (nodes - 1) / nodes * means
    return weights + (max(sums, means) if nodes == 2 else sums + means)
