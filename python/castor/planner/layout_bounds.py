"""Lower bounds of a layout's time and memory, before any of its stages is recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf

from castor import _C
from castor.config.names import SCALAR_TYPES
from castor.estimate import simulator
from castor.estimate.machine import Machine
from castor.estimate.workload import Workload
from castor.planner.cluster import Cluster
from castor.planner.layout_cost import NO_NVME, ROUNDING
from castor.planner.layouts import Layout
from castor.planner.replicas import (
    gathering_ranks,
    least_reduced,
    ranks_sharing_host_storage,
)
from castor.planner.simulated_rank import SimulatedRank, StagePass
from castor.runtime.engine import WORKING_DTYPES

_LARGEST_SHARED_CHUNK = 64 << 20
"""Bytes of a chunk of several parameters (kMaxSearchedBytes in csrc/core/chunk_layout.cc)."""
_ELEMENTS = 1 << 20
"""Elements of the parameter whose optimizer states are counted."""


@dataclass(frozen=True, kw_only=True)
class MicroBatchCost:
    """Cost of a micro-batch through the full model, with no other micro-batch under way."""

    seconds: float
    """Seconds of forward and backward."""
    kept_bytes: int
    """Bytes that forward keeps for backward."""
    block_seconds: float = 0.0
    """Seconds in a block; 0: the model has no blocks for stages."""
    block_kept_bytes: int = 0
    """Bytes that a block keeps for backward; 0: the model has no blocks for stages."""
    block_passing_bytes: int = 0
    """Bytes of a block beside the kept ones while its forward runs."""
    block_bytes: int = 0
    """Bytes of a block's parameters."""
    block_sends: bool = False
    """Whether all parameters of a block get a gradient."""


@dataclass(frozen=True, kw_only=True)
class ModelInLayout:
    """Model in a layout on a cluster."""

    layout: Layout
    """Layout of the ranks."""
    of_one: MicroBatchCost
    """Cost of a micro-batch of one row."""
    of_two: MicroBatchCost
    """Cost of a micro-batch of two rows."""
    layers: Sequence[int]
    """Number of blocks of each stage."""
    cluster: Cluster
    """Cluster of the ranks."""
    workload: Workload
    """Workload, whose precision, optimizer, state format and overlap are read."""

    def of_rows(self, measure: Callable[[MicroBatchCost], float]) -> float:
        """Returns a lower bound of a measure for a micro-batch of the layout's rows."""
        # An operator takes the larger of FLOPs and bytes, both proportional to rows, and something
        # fixed: each row after the second adds at least as much as the second did.
        one, two = measure(self.of_one), measure(self.of_two)
        return one + (self.layout.rows - 1) * (two - one)


def passing_bytes(one: StagePass) -> int:
    """Returns the peak bytes of a stage's forward beside those that it keeps for backward."""
    return max(event.nonmodel_bytes for event in one.forward) - one.kept_bytes


def sends_all(block: SimulatedRank, stage: int, cluster: Cluster) -> bool:
    """Whether a micro-batch gives each parameter of a stage a gradient.

    Args:
        block: A rank that has no other stage.
        stage: Number of the stage.
        cluster: The cluster.
    """
    one = block.passes[stage]
    trace = [*one.forward, *one.backward]
    events = [(event.kind, event.position, event.nonmodel_bytes, 0) for event in trace]
    options = simulator.options(cluster.machine, overlap="none")
    options |= {"device_bytes": 1, "host_bytes": NO_NVME}
    sent: int = block.simulator.run(events, [0.0] * len(events), options)["d2h_bytes"]
    return sent >= block.param_bytes


def least_of_passes(of_all: ModelInLayout, like: Layout) -> float | None:
    """Returns a lower bound of a layout's seconds; None: the device has no room for it.

    Args:
        of_all: The model, with layers and sequences sharded as in `like`.
        like: The layout, or a similar one that takes no less: without context parallelism.
    """
    layout, layers, cluster = of_all.layout, of_all.layers, of_all.cluster
    share = layout.dims.cp // like.dims.cp
    # Causal attention in a ring skips masked pairs of tokens: at most half of the work is saved.
    least = 0.5 if share > 1 and layout.mode == "ring_attn" else 1.0

    def of_rows(measure: Callable[[MicroBatchCost], float]) -> float:
        return least * of_all.of_rows(measure) / share

    each = of_rows(lambda whole: whole.seconds)
    block = of_rows(lambda whole: whole.block_seconds)
    count = len(layers)
    blocks = [_blocks_of(of_all, rank) for rank in range(layout.dims.pp)]
    # The first rank has the most micro-batches under way.
    under_way = min(layout.microbatches, layout.dims.pp) * blocks[0]
    if layout.style == "zbv":  # when the first micro-batch has passed the last stage
        under_way = min(layout.microbatches, count - 1) * layers[0] + layers[-1]
    held = max(
        of_rows(lambda whole: whole.block_kept_bytes) * under_way,
        of_rows(lambda whole: whole.kept_bytes) / layout.dims.pp,
    )
    if held > cluster.machine.device_bytes:
        return None
    working = layout.microbatches * max(each / layout.dims.pp, block * max(blocks))
    bubble = each * (layout.dims.pp - 1) / count if layout.style != "zbv" else 0.0
    params = of_all.of_one.block_bytes * max(blocks[0], blocks[-1])
    element_bytes = WORKING_DTYPES[of_all.workload.precision].itemsize
    return working + bubble + least_reduced(layout, cluster, params, element_bytes)


def least_of_replicas(of_all: ModelInLayout) -> float:
    """Returns a lower bound of the seconds that the links between host and device are busy.

    When a pass through a stage begins, the device holds no more weights than fit beside the
    activations of the micro-batches under way; the others are fetched. Gradients go to the host,
    except for resident chunks; of those that ranks reduce on their GPUs, each rank's shard goes.
    The larger bound of the pipeline's first and last rank counts.
    """
    layout, block, machine = of_all.layout, of_all.of_one, of_all.cluster.machine
    gathering = gathering_ranks(layout, of_all.cluster)
    if not block.block_bytes:
        return 0.0
    kept = of_all.of_rows(lambda whole: whole.block_kept_bytes)
    # Share of weights in the bytes of a resident chunk: weights, gradients, the rank's states.
    part = 1 / (2 + _states_of_weights(machine, of_all.workload) / layout.dims.same_shard)
    return max(
        _of_rank(layout, block, kept, of_all.layers, machine, rank, part, gathering)
        for rank in {0, layout.dims.pp - 1}
    )


def least_of_nvme(of_all: ModelInLayout) -> float:
    """Returns a lower bound of a step's seconds due to NVMe; 0: the host may have room for all.

    Bytes that the host has no room for are read and written at least once. Of the passes, only the
    first forward runs beside that. The larger bound of the pipeline's first and last rank counts.
    """
    layout, workload, cluster = of_all.layout, of_all.workload, of_all.cluster
    machine, block_bytes = cluster.machine, of_all.of_one.block_bytes
    if machine.nvme is None or not block_bytes:
        return 0.0
    block = of_all.of_rows(lambda whole: whole.block_seconds)
    sharing = ranks_sharing_host_storage(layout, cluster)
    each = 2 / sharing + _states_of_weights(machine, workload) / layout.dims.same_shard
    beside = 1 if workload.overlap != "none" and not cluster.on_host else 0
    least = 0.0
    for rank in {0, layout.dims.pp - 1}:
        blocks = _blocks_of(of_all, rank)
        weights = blocks * block_bytes
        over = weights * each - machine.host_bytes
        if over > 0:
            passes = (layout.microbatches - beside) * blocks * block
            least = max(least, 2 * over / machine.nvme + passes)
    return least * ROUNDING


def least_lacking(of_all: ModelInLayout) -> float:
    """Returns a lower bound of the bytes that host and NVMe lack; 0: the layout may fit."""
    layout, cluster = of_all.layout, of_all.cluster
    machine, sharing = cluster.machine, ranks_sharing_host_storage(layout, cluster)
    room: float = machine.host_bytes
    each = 2 / sharing + _states_of_weights(machine, of_all.workload) / layout.dims.same_shard
    if machine.nvme is not None:
        room += inf if machine.nvme_bytes is None else machine.nvme_bytes
    blocks = max(_blocks_of(of_all, rank) for rank in {0, layout.dims.pp - 1})
    weights = blocks * of_all.of_one.block_bytes
    # Replicas have no weights and gradients on NVMe.
    on_host = 2 / sharing * weights if layout.dims.same_shard > 1 else 0.0
    return max(0.0, weights * each - room, on_host - machine.host_bytes) * ROUNDING


def _blocks_of(of_all: ModelInLayout, rank: int) -> int:
    """Returns the number of blocks that a rank of the pipeline has."""
    return sum(of_all.layers[stage] for stage in of_all.layout.stages_of(rank))


@cache
def _states_of_weights(machine: Machine, workload: Workload) -> float:
    """Returns the bytes of optimizer states for each byte of weights."""
    one = _C.Simulator(
        params=[("of all", _ELEMENTS, True)],
        modules=[("of all", [0], -1)],
        precision=SCALAR_TYPES[workload.precision],
        chunk_bytes=0,
        state_format=workload.state_format,
        rule=workload.optimizer,
    )
    everywhere = simulator.places(machine) | {"host_bytes": NO_NVME}
    weights = _ELEMENTS * WORKING_DTYPES[workload.precision].itemsize
    states = int(one.places(everywhere)["host_bytes"]) - 2 * weights
    return states / weights


def _of_rank(
    layout: Layout,
    block: MicroBatchCost,
    block_kept: float,
    layers: Sequence[int],
    machine: Machine,
    rank: int,
    part_of_what_stays: float,
    gathering: int,
) -> float:
    room = machine.device_bytes
    count = layout.simulated_microbatches
    order = _C.pipeline_order(layout.style, layout.dims.pp, layout.stages_per_rank, count, rank)
    held = most = fetched = 0.0
    for stage, _, what in order:
        if what == "of_weights":
            continue
        # Backward has freed a block's activations when it first asks for weights.
        beside = held if what == "forward" else held - block_kept
        if what != "of_inputs" or stage:  # the first stage has none
            fetched += max(0, layers[stage] * block.block_bytes - max(0, room - beside))
        held += layers[stage] * (block_kept if what == "forward" else -block_kept)
        most = max(most, held)
    sent = 0.0
    if block.block_sends:
        # A stage may share its first and its last chunk, of which it has not all gradients.
        for stage in layout.stages_of(rank):
            sent += max(0, layers[stage] * block.block_bytes - 2 * _LARGEST_SHARED_CHUNK)
        sent -= part_of_what_stays * max(0, room - most - block.block_passing_bytes)
    seconds = max(fetched / machine.h2d, count * sent / gathering / machine.d2h)
    return ROUNDING * seconds * layout.microbatches / count
