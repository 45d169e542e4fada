"""The cost of a step in a layout, for each rank: memory, and time.

A rank's stages are recorded on the meta device (castor.estimate.simulated_rank). Chunks move as the
simulator of one rank has it, over the passes that the schedule runs; the schedule, and what ranks
exchange, come on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from castor import _C
from castor.activations.block_profile import Events
from castor.estimate import simulator
from castor.estimate.cluster import Cluster
from castor.estimate.copies import ranks_of_homes, reduced
from castor.estimate.layouts import Layout
from castor.estimate.machine import Machine
from castor.estimate.metatrace import Moment
from castor.estimate.simulated_rank import SEQUENCE, SimulatedRank, StagePass
from castor.estimate.workload import Overlap

NO_NVME = 2**62
"""Host bytes, so that nothing goes elsewhere: whether all fits is asked afterwards."""
ROUNDING = 1 - 1e-9
"""Factor of bounds of seconds."""


class _Needs:
    """Needs of memory on a machine."""

    device_bytes: int
    host_bytes: int
    nvme_bytes: int

    def lacking(self, machine: Machine) -> int:
        """Bytes that a rank's device, its part of the host and of NVMe have not."""
        lacks = max(0, self.device_bytes - machine.device_bytes)
        lacks += max(0, self.host_bytes - machine.host_bytes)
        room = machine.nvme_bytes
        return lacks + (0 if room is None else max(0, self.nvme_bytes - room))

    def fits(self, machine: Machine) -> bool:
        """Whether all of these have room."""
        return self.lacking(machine) == 0


@dataclass(frozen=True, kw_only=True)
class LayoutCost(_Needs):
    """Cost of a step: bytes and seconds of the rank that takes most."""

    layout: Layout
    device_bytes: int
    """Device bytes that it needs at least, with streamed chunks."""
    host_bytes: int
    """Windows on what is on NVMe included."""
    nvme_bytes: int
    """Bytes that the host has no room for."""
    nvme_weight_bytes: int
    """Share of these for parameters and gradients."""
    seconds: float
    busy: dict[str, float]
    """Seconds of "compute", "exchange" (between ranks that share a model), "reduce" (gradients and
    weights, between ranks with other samples), "copies" (chunks that computing waits for),
    "update", "nvme" (that computing and updates wait for), "bubble" (a stage that waits for
    others), "processors" (that other ranks compute on)."""

    @property
    def bound(self) -> str:
        """Resource that takes longest."""
        return max(self.busy, key=lambda name: self.busy[name])


@dataclass(frozen=True, kw_only=True)
class Found:
    """The result of a search over a model's layouts."""

    cluster: Cluster
    """Cluster of the layouts."""
    fitting: list[LayoutCost]
    """Fastest first."""
    others: list[LayoutCost]
    """Layouts if none fits, with the least lack first."""
    refused: dict[str, str]
    """Ways of dividing that the model does not take, and why."""
    compared: int
    """Layouts that there are."""


@dataclass(frozen=True, kw_only=True)
class _Seconds:
    """Seconds of a micro-batch in a stage."""

    forward: list[float]
    backward: list[float]
    of_weights: list[float]
    exchange: float
    waiting: float
    """Seconds of these in which nothing is sent."""


class End(_Needs):
    """The first or the last rank of the pipeline: its memory, and what its chunks cost."""

    def __init__(
        self,
        recorded: SimulatedRank,
        layout: Layout,
        cluster: Cluster,
        rank: int,
        *,
        overlap: Overlap,
    ) -> None:
        """Simulates it.

        Args:
            recorded: The rank.
            layout: How ranks are divided.
            cluster: Where.
            rank: Its number in the pipeline.
            overlap: As GeminiPlugin's.
        """
        self._layout, self._cluster, self._rank, self._overlap = layout, cluster, rank, overlap
        figures, self._alone = self._simulate(recorded, overlap, host_bytes=NO_NVME)
        self.device_bytes = figures["smallest_budget_bytes"]
        whole = int(figures["host_bytes"])
        homes = 2 * recorded.param_bytes  # and gradients
        sharing = ranks_of_homes(layout, cluster)
        self.host_bytes = homes // sharing + max(0, whole - homes) // layout.replicas
        self.nvme_bytes = self.nvme_weight_bytes = 0
        self.slowdown: float = self._slowdown_of(figures)
        self.update: float = figures["step_seconds"] - figures["passes_seconds"]
        self.in_memory = self.slowdown, self.update
        """These two, did nothing wait for NVMe."""
        settled = cluster.between(layout.of_layers).collective(
            "all_reduce", recorded.settled_bytes, layout.experts_alone
        )
        whole_reduced = reduced(layout, cluster, recorded.param_bytes, recorded.element_bytes)
        self.reduce = whole_reduced + settled

    @property
    def least_seconds(self) -> float:
        """Lower bound of a step's seconds, whatever other ranks do."""
        layout = self._layout
        passes = layout.microbatches / layout.simulated_microbatches * self._alone * self.slowdown
        return (passes + self.reduce + self.update) * ROUNDING

    @property
    def needs_nvme(self) -> bool:
        """Whether the host has no room, and there is NVMe.

        Chunks that ranks share in host memory are not planned to be there.
        """
        machine = self._cluster.machine
        if machine.nvme is None or ranks_of_homes(self._layout, self._cluster) > 1:
            return False
        return self.host_bytes > machine.host_bytes

    def store(self, recorded: SimulatedRank) -> None:
        """Puts on NVMe what the host has no room for, as a session does.

        Parameters there are not trained by several ranks: where they had to be, nothing changes.

        Args:
            recorded: The rank, in chunks made for its replicas.
        """
        host_bytes = self._cluster.machine.host_bytes
        # Updates beside the first forwards hold these up once, however many micro-batches follow.
        apart, _ = self._simulate(recorded, "none", host_bytes=host_bytes)
        if apart["nvme_weight_bytes"] and self._layout.replicas > 1:
            return
        beside = apart
        if self._overlap != "none" and not self._cluster.on_host:
            beside, _ = self._simulate(recorded, self._overlap, host_bytes=host_bytes)
        self.device_bytes = apart["smallest_budget_bytes"]
        self.host_bytes, self.nvme_bytes = apart["host_bytes"], apart["nvme_bytes"]
        self.nvme_weight_bytes = apart["nvme_weight_bytes"]
        held_up = max(0.0, beside["passes_seconds"] - apart["passes_seconds"])
        update = held_up + beside["step_seconds"] - beside["passes_seconds"]
        self.slowdown = max(self.slowdown, self._slowdown_of(apart))
        self.update = max(self.update, update)

    def _slowdown_of(self, figures: dict[str, Any]) -> float:
        return max(1.0, figures["passes_seconds"] / self._alone) if self._alone else 1.0

    def _simulate(
        self, recorded: SimulatedRank, overlap: Overlap, *, host_bytes: int
    ) -> tuple[dict[str, Any], float]:
        """The simulator's figures of the passes that it repeats, and what they take alone."""
        layout, cluster = self._layout, self._cluster
        seconds = {
            stage: seconds_of(one, cluster, layout) for stage, one in recorded.passes.items()
        }
        order = _C.pipeline_order(
            *(layout.style, layout.stages, layout.stages_per_rank),
            *(layout.simulated_microbatches, self._rank),
        )
        events: Events = []
        computing: list[float] = []
        under_way: dict[tuple[int, int], int] = {}
        for stage, microbatch, what in order:
            one, own = recorded.passes[stage], seconds[stage]
            moments, takes, left = {
                "forward": (one.forward, own.forward, one.kept_bytes),
                "backward": (one.backward, own.backward, 0),
                "of_inputs": (one.backward, own.backward, one.kept_for_weights),
                "of_weights": (one.of_weights, own.of_weights, 0),
            }[what]
            under_way.pop((stage, microbatch), None)
            held = sum(under_way.values())
            for moment in moments:
                events.append((moment.kind, moment.position, moment.nonmodel_bytes + held, 0))
            computing += takes
            if left:
                under_way[stage, microbatch] = left
        options = simulator.options(
            cluster.machine, overlap=overlap, num_ranks=layout.replicas, on_host=cluster.on_host
        )
        options["host_bytes"] = host_bytes
        return recorded.simulator.run(events, computing, options), sum(computing)


def seconds_of(one: StagePass, cluster: Cluster, layout: Layout) -> _Seconds:
    """Returns the seconds of a micro-batch's events: operators, and waits for other ranks."""
    exchange = waiting = 0.0

    def of(moments: Sequence[Moment]) -> list[float]:
        nonlocal exchange, waiting
        found = []
        for moment in moments:
            computing = simulator.seconds_of(moment, cluster.machine)
            all_of, idle = _exchanged(moment, cluster, layout, computing)
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


def _exchanged(
    moment: Moment, cluster: Cluster, layout: Layout, computing: float
) -> tuple[float, float]:
    """Seconds of what ranks send each other, and of these those in which nothing is sent.

    What is passed on in a ring travels while a rank computes with what has come, all but the last:
    the rest of it is waited for. Through host memory it is waited for in full, and on the host
    both need the same processors.
    """
    total = waiting = passed = 0.0
    for sent in moment.sent:
        shares = layout.sequence if sent.among == SEQUENCE else layout.of_layers
        apart = layout.of_layers * (layout.sequence if sent.among == SEQUENCE else 1)
        link = cluster.between(apart)
        seconds = link.collective(sent.operation, sent.num_bytes, shares)
        if sent.operation == "ring_shift" and cluster.rings_overlap:
            passed += seconds
            continue
        total += seconds
        waiting += link.waiting(sent.operation, shares)
    behind = computing * (layout.sequence - 1) / layout.sequence
    return total + max(0.0, passed - behind), waiting


def cost_of(
    layout: Layout, stages: Sequence[StagePass], ends: Sequence[End], cluster: Cluster
) -> LayoutCost:
    """Returns the cost of a step.

    Args:
        layout: How ranks are divided.
        stages: A micro-batch in each stage of the model.
        ends: The pipeline's first rank, which keeps most micro-batches under way, and its last,
            which has the logits; one where there is one.
        cluster: Where.
    """
    slowdown = max(end.slowdown for end in ends)
    in_memory, update_in_memory = (
        max(of) for of in zip(*(end.in_memory for end in ends), strict=True)
    )
    link = cluster.between(layout.of_layers * layout.sequence * layout.stages)
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
        layout.style, layout.stages, layout.stages_per_rank, layout.microbatches, each
    )
    # Of the rank with most to do.
    busiest = max(
        range(layout.stages),
        key=lambda rank: sum(sum(each[i][:2]) for i in layout.stages_of(rank)),
    )
    mine = layout.stages_of(busiest)
    exchange = layout.microbatches * sum(seconds[i].exchange for i in mine)
    working = layout.microbatches * sum(sum(each[i][:2]) for i in mine)
    computing = working / slowdown
    copies = computing * (in_memory - 1)
    reduce = max(end.reduce for end in ends)
    update = max(end.update for end in ends)
    seconds_alone = passes + reduce + update
    # Who waits leaves its processor to others: of all there is no more than they can do.
    busy_in_all = sum(
        sum(one[:2]) * in_memory / slowdown - own.waiting
        for one, own in zip(each, seconds, strict=True)
    )
    each_works = layout.microbatches * busy_in_all / layout.stages
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
    }
    return LayoutCost(
        layout=layout,
        device_bytes=max(end.device_bytes for end in ends),
        host_bytes=max(end.host_bytes for end in ends),
        nvme_bytes=max(end.nvme_bytes for end in ends),
        nvme_weight_bytes=max(end.nvme_weight_bytes for end in ends),
        seconds=max(seconds_alone, needed),
        busy=busy,
    )
