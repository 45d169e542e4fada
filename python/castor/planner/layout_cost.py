"""Memory and time of a step in a layout, for each rank.

A rank's stages are recorded on the meta device (castor.planner.simulated_rank). The simulator of
one rank moves chunks over the passes that the schedule runs. The pipeline's schedule and the
collectives between ranks are added to its time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from castor import _C
from castor.activations.block_profile import Events
from castor.config.names import ReducedOn, Reduction
from castor.estimate import simulator
from castor.estimate.machine import Machine
from castor.estimate.metatrace import TraceEvent
from castor.estimate.workload import Overlap
from castor.planner.cluster import Cluster
from castor.planner.layouts import Layout
from castor.planner.replicas import (
    communicator_bytes,
    dram_of_replicas,
    gathering_ranks,
    ranks_sharing_host_storage,
    reduced,
    sent_between_gpus,
)
from castor.planner.simulated_rank import SEQUENCE, SimulatedRank, StagePass

NO_NVME = 2**62
"""Host bytes with which nothing goes to NVMe; whether the host has room is checked later."""
_NO_DRAM_WALL = 1e30
"""Bandwidth of host memory in simulations of one rank; all ranks of a node share the real one."""
ROUNDING = 1 - 1e-9
"""Factor of lower bounds of seconds, so that rounding does not lift them above the cost."""


class _Needs:
    """Memory that a rank needs in each tier."""

    device_bytes: int
    host_bytes: int
    nvme_bytes: int

    def lacking(self, machine: Machine) -> int:
        """Returns the bytes that device, host and NVMe of a rank lack, added up."""
        lacks = max(0, self.device_bytes - machine.device_bytes)
        lacks += max(0, self.host_bytes - machine.host_bytes)
        room = machine.nvme_bytes
        return lacks + (0 if room is None else max(0, self.nvme_bytes - room))

    def fits(self, machine: Machine) -> bool:
        """Whether all tiers have room."""
        return self.lacking(machine) == 0


@dataclass(frozen=True, kw_only=True)
class LayoutCost(_Needs):
    """Cost of a step: bytes and seconds of the rank that takes most."""

    layout: Layout
    """Layout of the ranks."""
    device_bytes: int
    """Device bytes that the rank needs at least, with streamed chunks."""
    host_bytes: int
    """Host bytes of the rank, window buffers of NVMe included."""
    nvme_bytes: int
    """Bytes on NVMe, for which the host has no room."""
    nvme_weight_bytes: int
    """Bytes of `nvme_bytes` that are parameters and gradients."""
    seconds: float
    """Seconds of the step."""
    reduction: Reduction
    """GeminiPlugin's reduction with which the step is predicted."""
    reduced_on: ReducedOn
    """Place where replicas reduce gradients."""
    dram_bytes: int
    """Bytes that the ranks of a node move through its memory in a step: chunks on their way to
    devices, gradients on their way to host storage, reductions on the host, the optimizer's."""
    dram_seconds: float
    """Seconds that these take of the memory's bandwidth."""
    busy: dict[str, float]
    """Seconds of the step by resource.

    - "compute": operators.
    - "exchange": collectives between tensor-, expert- and context-parallel ranks.
    - "reduce": gradients and weights, between data-parallel replicas, that nothing hides.
    - "copies": chunks that computing waits for.
    - "update": the optimizer.
    - "nvme": NVMe that computing and the optimizer wait for.
    - "bubble": stages that wait for other stages.
    - "processors": processors that other ranks compute on.
    - "dram": host memory that copies and the optimizer wait for, since the node's ranks share it.
    """

    @property
    def exposed(self) -> float:
        """Seconds in which a rank exchanges and computes nothing."""
        return self.busy["exchange"] + self.busy["reduce"]

    @property
    def exposed_share(self) -> float:
        """Share of the step that `exposed` takes."""
        return self.exposed / self.seconds

    @property
    def bound(self) -> str:
        """Name in `busy` of the resource that takes longest; "dram" where it is the wall."""
        if self.dram_seconds >= self.seconds * ROUNDING:
            return "dram"
        return max(self.busy, key=lambda name: self.busy[name])


@dataclass(frozen=True, kw_only=True)
class Found:
    """Result of a search over a model's layouts."""

    cluster: Cluster
    """Cluster of the layouts."""
    fitting: list[LayoutCost]
    """Costs of the layouts that fit, fastest first."""
    others: list[LayoutCost]
    """Costs of layouts if none fits, those that lack least memory first."""
    refused: dict[str, str]
    """Kinds of parallelism that the model does not support, with the reasons."""
    compared: int
    """Number of layouts of the workload on the cluster."""


@dataclass(frozen=True, kw_only=True)
class _Seconds:
    """Seconds of a micro-batch in a stage."""

    forward: list[float]
    """Seconds of each event of the forward."""
    backward: list[float]
    """Seconds of each event of the backward, without those of `of_weights`."""
    of_weights: list[float]
    """Seconds of each event of a deferred backward of weights."""
    exchange: float
    """Seconds of collectives, included in the lists."""
    waiting: float
    """Seconds of collectives in which nothing is sent."""


class End(_Needs):
    """First or last rank of a pipeline: its memory, and the time that its chunks cost."""

    def __init__(
        self,
        recorded: SimulatedRank,
        replica: SimulatedRank,
        layout: Layout,
        cluster: Cluster,
        rank: int,
        *,
        overlap: Overlap,
    ) -> None:
        """Simulates the rank.

        Args:
            recorded: The recorded rank.
            replica: The rank, with chunks laid out for its replicas.
            layout: The layout of the ranks.
            cluster: The cluster.
            rank: Number of the rank in the pipeline.
            overlap: GeminiPlugin's overlap.
        """
        self._layout, self._cluster, self._rank, self._overlap = layout, cluster, rank, overlap
        self._replica, self._sharing = replica, ranks_sharing_host_storage(layout, cluster)
        self.slowdown, self.update = 1.0, 0.0
        self.dram_bytes = 0.0
        """Bytes through host memory in a step, of chunks, gradients and the optimizer."""
        self._alone = 0.0
        self._communicators = communicator_bytes(layout, cluster)
        """Device bytes that chunks and activations do not have."""
        figures = self._time(recorded, host_bytes=NO_NVME)
        self.device_bytes = figures["smallest_budget_bytes"] + self._communicators
        places = simulator.places(
            cluster.machine, ranks_sharing=self._sharing, reduced_on=cluster.reduced_on
        )
        in_memory = places | {"host_bytes": NO_NVME}
        self.host_bytes: int = replica.simulator.places(in_memory)["host_bytes"]
        self.nvme_bytes = self.nvme_weight_bytes = 0
        self.in_memory = self.slowdown, self.update
        """Slowdown and seconds of the update if nothing waited for NVMe."""
        settled = cluster.between(layout.dims.layer_shards).collective(
            "all_reduce", recorded.settled_bytes, layout.dims.ep_of_dp
        )
        chunks = max(recorded.simulator.chunks) + 1
        resident = figures["num_resident"] / chunks
        self.reduce = settled + self._exposed_of_replicas(recorded, resident, chunks)
        self.dram_of_replicas = dram_of_replicas(layout, cluster, recorded.param_bytes, resident)
        """Bytes through host memory in a step, of exchanges with other replicas."""

    def _exposed_of_replicas(self, recorded: SimulatedRank, resident: float, chunks: int) -> float:
        """Returns the seconds of what replicas exchange that computing does not hide."""
        layout, cluster = self._layout, self._cluster
        seconds = sent_between_gpus(layout, cluster, recorded.param_bytes, resident)
        if seconds is None:
            return reduced(layout, cluster, recorded.param_bytes, recorded.element_bytes)
        passes = [seconds_of(one, cluster, layout) for one in recorded.passes.values()]
        beside_forward = self._overlap != "none"
        return seconds.exposed(
            backward=self.slowdown * sum(sum(one.backward) + sum(one.of_weights) for one in passes),
            forward=self.slowdown * sum(sum(one.forward) for one in passes) * beside_forward,
            chunks=chunks,
        )

    @property
    def least_seconds(self) -> float:
        """Lower bound of a step's seconds, independent of the other ranks."""
        layout = self._layout
        passes = layout.microbatches / layout.simulated_microbatches * self._alone * self.slowdown
        return (passes + self.reduce + self.update) * ROUNDING

    @property
    def needs_nvme(self) -> bool:
        """Whether the host has no room and the machine has NVMe."""
        machine = self._cluster.machine
        return machine.nvme is not None and self.host_bytes > machine.host_bytes

    def store(self) -> None:
        """Moves the bytes that the host has no room for to NVMe, as a session does.

        Several ranks do not train parameters on NVMe. If parameters would have to be there,
        nothing changes.
        """
        in_memory = self.slowdown, self.update
        figures = self._time(
            self._replica,
            host_bytes=self._cluster.machine.host_bytes,
            ranks_sharing=self._sharing,
        )
        if figures["nvme_weight_bytes"] and self._layout.dims.same_shard > 1:
            self.slowdown, self.update = in_memory
            return
        self.device_bytes = figures["smallest_budget_bytes"] + self._communicators
        self.host_bytes, self.nvme_bytes = figures["host_bytes"], figures["nvme_bytes"]
        self.nvme_weight_bytes = figures["nvme_weight_bytes"]

    def _time(self, recorded: SimulatedRank, **places: int) -> dict[str, Any]:
        """Sets `slowdown` and `update`, and returns the simulator's figures.

        Updates beside the first forwards delay them once, whatever the number of micro-batches. So
        passes have the time that they take with updates after them, and what updates beside them
        add is counted as seconds of the update. With one micro-batch both together are the
        simulator's seconds of the step, as in `castor estimate`.
        """
        apart, alone = self._simulate(recorded, "none", places)
        beside = apart
        if self._overlap != "none" and not self._cluster.on_host:
            beside, _ = self._simulate(recorded, self._overlap, places)
        self._alone = alone
        layout = self._layout
        copied = apart["h2d_bytes"] + apart["d2h_bytes"]
        moved = apart["busy_seconds"]["dram"] * _NO_DRAM_WALL
        again = layout.microbatches / layout.simulated_microbatches - 1
        self.dram_bytes = moved + copied * again
        self.slowdown = max(1.0, apart["passes_seconds"] / alone) if alone else 1.0
        held_up = max(0.0, beside["passes_seconds"] - apart["passes_seconds"])
        self.update = held_up + beside["step_seconds"] - beside["passes_seconds"]
        return apart

    def _simulate(
        self, recorded: SimulatedRank, overlap: Overlap, places: dict[str, int]
    ) -> tuple[dict[str, Any], float]:
        """Returns the simulator's figures of the simulated passes, and their seconds alone."""
        layout, cluster = self._layout, self._cluster
        seconds = {
            stage: seconds_of(one, cluster, layout) for stage, one in recorded.passes.items()
        }
        order = _C.pipeline_order(
            *(layout.style, layout.dims.pp, layout.stages_per_rank),
            *(layout.simulated_microbatches, self._rank),
        )
        events: Events = []
        computing: list[float] = []
        under_way: dict[tuple[int, int], int] = {}
        for stage, microbatch, what in order:
            one, own = recorded.passes[stage], seconds[stage]
            trace, takes, left = {
                "forward": (one.forward, own.forward, one.kept_bytes),
                "backward": (one.backward, own.backward, 0),
                "of_inputs": (one.backward, own.backward, one.kept_for_weights),
                "of_weights": (one.of_weights, own.of_weights, 0),
            }[what]
            under_way.pop((stage, microbatch), None)
            held = sum(under_way.values())
            for event in trace:
                events.append((event.kind, event.position, event.nonmodel_bytes + held, 0))
            computing += takes
            if left:
                under_way[stage, microbatch] = left
        options = simulator.options(
            cluster.machine,
            overlap=overlap,
            num_ranks=layout.dims.same_shard,
            reduced_on=cluster.reduced_on,
            gathering_ranks=gathering_ranks(layout, cluster),
        )
        options |= {
            "device_bytes": max(1, cluster.machine.device_bytes - self._communicators),
            "dram_bytes_per_second": _NO_DRAM_WALL,
            "update_bytes_per_second": cluster.machine.updates or cluster.machine.dram,
        }
        return recorded.simulator.run(events, computing, options | places), sum(computing)


def seconds_of(one: StagePass, cluster: Cluster, layout: Layout) -> _Seconds:
    """Returns the seconds of a micro-batch's events: operators and collectives."""
    exchange = waiting = 0.0

    def of(trace: Sequence[TraceEvent]) -> list[float]:
        nonlocal exchange, waiting
        found = []
        for event in trace:
            computing = simulator.seconds_of(event, cluster.machine)
            all_of, idle = _collective_seconds(event, cluster, layout, computing)
            exchange += all_of
            waiting += idle
            found.append(computing + all_of)
        return found

    forward, backward, of_weights = of(one.forward), of(one.backward), of(one.of_weights)
    return _Seconds(
        forward=forward,
        backward=backward,
        of_weights=of_weights,
        exchange=exchange,
        waiting=waiting,
    )


def _collective_seconds(
    event: TraceEvent, cluster: Cluster, layout: Layout, computing: float
) -> tuple[float, float]:
    """Returns the seconds of an event's collectives, and how many of them nothing is sent in.

    A ring shift overlaps with the computing on the shard received before, except for the last
    one; only the rest of its time counts. A ring shift through host memory does not overlap, and on
    the host both need the same processors.
    """
    total = waiting = passed = 0.0
    for sent in event.sent:
        shares = layout.dims.cp if sent.group == SEQUENCE else layout.dims.layer_shards
        apart = layout.dims.layer_shards * (layout.dims.cp if sent.group == SEQUENCE else 1)
        link = cluster.between(apart)
        seconds = link.collective(sent.operation, sent.num_bytes, shares)
        if sent.operation == "ring_shift" and cluster.rings_overlap:
            passed += seconds
            continue
        total += seconds
        waiting += link.waiting(sent.operation, shares)
    behind = computing * (layout.dims.cp - 1) / layout.dims.cp
    return total + max(0.0, passed - behind), waiting


def cost_of(
    layout: Layout, stages: Sequence[StagePass], ends: Sequence[End], cluster: Cluster
) -> LayoutCost:
    """Returns the cost of a step.

    Args:
        layout: The layout of the ranks.
        stages: The pass of a micro-batch through each stage of the model.
        ends: The pipeline's first rank, which has the most micro-batches under way, and its last
            one, which has the logits. A single rank is there once.
        cluster: The cluster.
    """
    slowdown = max(end.slowdown for end in ends)
    in_memory, update_in_memory = (
        max(of) for of in zip(*(end.in_memory for end in ends), strict=True)
    )
    link = cluster.between(layout.dims.layer_shards * layout.dims.cp * layout.dims.pp)
    seconds = [seconds_of(one, cluster, layout) for one in stages]
    each = [
        (
            sum(own.forward) * slowdown,
            (sum(own.backward) + sum(own.of_weights)) * slowdown,
            link.seconds(one.sent_bytes) if one.sent_bytes else 0.0,
            sum(own.of_weights) * slowdown,
        )
        for one, own in zip(stages, seconds, strict=True)
    ]
    passes = _C.pipeline_seconds(
        layout.style, layout.dims.pp, layout.stages_per_rank, layout.microbatches, each
    )
    # The shares of the busiest rank are reported.
    busiest = max(
        range(layout.dims.pp),
        key=lambda rank: sum(sum(each[i][:2]) for i in layout.stages_of(rank)),
    )
    mine = layout.stages_of(busiest)
    exchange = layout.microbatches * sum(seconds[i].exchange for i in mine)
    working = layout.microbatches * sum(sum(each[i][:2]) for i in mine)
    computing = working / slowdown
    copies = computing * (in_memory - 1)
    reduce = max(end.reduce for end in ends)
    update = max(end.update for end in ends)
    # The node's memory is a wall for what runs at a time: ordered sums come behind passes.
    of_replicas = max(end.dram_of_replicas for end in ends)
    beside = max(end.dram_bytes for end in ends)
    dram_bytes = beside + of_replicas
    overlapped = passes + update
    if cluster.reduces_on_gpus:
        beside, overlapped = dram_bytes, overlapped + reduce
    dram = max(0.0, cluster.dram_seconds(beside) - overlapped)
    seconds_alone = passes + reduce + update + dram
    # A waiting rank leaves its processor to others: all ranks of a node share its processors.
    busy_in_all = sum(
        sum(one[:2]) * in_memory / slowdown - own.waiting
        for one, own in zip(each, seconds, strict=True)
    )
    each_works = layout.microbatches * busy_in_all / layout.dims.pp
    needed = (each_works + reduce + update_in_memory) * cluster.ranks_per_node / cluster.at_once
    busy = {
        "compute": computing - exchange,
        "exchange": exchange,
        "copies": copies,
        "bubble": max(0.0, passes - working),
        "reduce": reduce,
        "update": update_in_memory,
        "nvme": computing * (slowdown - in_memory) + update - update_in_memory,
        "processors": max(0.0, needed - seconds_alone),
        "dram": dram,
    }
    return LayoutCost(
        layout=layout,
        device_bytes=max(end.device_bytes for end in ends),
        host_bytes=max(end.host_bytes for end in ends),
        nvme_bytes=max(end.nvme_bytes for end in ends),
        nvme_weight_bytes=max(end.nvme_weight_bytes for end in ends),
        seconds=max(seconds_alone, needed),
        reduction=cast(Reduction, cluster.reduction),
        reduced_on=cluster.reduced_on,
        dram_bytes=round(dram_bytes * cluster.ranks_per_node),
        dram_seconds=cluster.dram_seconds(dram_bytes),
        busy=busy,
    )
