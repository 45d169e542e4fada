"""Searches for the fastest layouts in which a model trains on a cluster (`castor plan`)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from math import inf
from pathlib import Path
from typing import Any

from castor.config.settings import SHARE_OF_REDUCTION
from castor.errors import UsageError
from castor.estimate.model import without_full_collections
from castor.estimate.operators import Results
from castor.estimate.workload import Workload
from castor.planner.balanced_experts import count_experts
from castor.planner.cluster import Cluster
from castor.planner.layout_bounds import (
    MicroBatchCost,
    ModelInLayout,
    least_lacking,
    least_of_nvme,
    least_of_passes,
    least_of_replicas,
    passing_bytes,
    sends_all,
)
from castor.planner.layout_cost import End, Found, LayoutCost, cost_of, seconds_of
from castor.planner.layouts import Layout, layouts
from castor.planner.replicas import COMMUNICATORS_OF_REPLICAS
from castor.planner.simulated_rank import SimulatedModel, SimulatedRank, StagePass, num_blocks

_WHOLE = Layout()
_WINDOW_OF_REDUCTION = 16 << 20
"""Device bytes through which gradients pass from GPU to GPU (csrc/c10d/device_sums.cc)."""


class LayoutSearch:
    """Model whose layouts are compared. Recorded passes are kept and used again."""

    def __init__(self, config: Path, workload: Workload) -> None:
        """Reads the model.

        Args:
            config: Path of the model's config.json.
            workload: The step of all ranks together. Its activations are not read: each layout
                has its own.

        Raises:
            OSError, ValueError, ModuleNotFoundError: See castor.estimate.model.build.
        """
        self._config = config
        self.workload = workload
        self._models: dict[Layout, SimulatedModel] = {}
        self._results = Results()
        self._ranks: dict[Any, SimulatedRank] = {}
        self._passes: dict[Any, StagePass] = {}
        self._wholes: dict[Any, tuple[MicroBatchCost, MicroBatchCost]] = {}
        whole = self._model(_WHOLE)
        self.model_name = type(whole.model).__name__
        """Name of the model's class."""
        settings: Any = whole.model.config
        self._heads = int(getattr(settings, "num_attention_heads", 0) or 0)
        self._experts = min(count_experts(whole.model).values(), default=0)
        self._blocks = 0
        self.refused: dict[str, str] = {}
        """Kinds of parallelism that the model does not support, with the reasons."""
        try:
            self._blocks = num_blocks(whole.model, whole.plan())
        except NotImplementedError as error:
            self.refused["stages"] = str(error)
        self.parameters = sum(param.numel() for param in whole.model.parameters())
        """Number of the model's parameters."""

    def with_batch(self, batch: int) -> LayoutSearch:
        """Returns a search over the same model with another batch; both share recorded passes."""
        other = copy.copy(self)
        other.workload = replace(self.workload, batch=batch)
        return other

    def layouts(self, cluster: Cluster) -> list[Layout]:
        """Returns all layouts of the workload on a cluster."""
        return list(
            layouts(
                cluster,
                batch=self.workload.batch,
                sequence=self.workload.sequence,
                blocks=self._blocks,
                heads=self._heads,
                experts=self._experts,
            )
        )

    def whole_pass(self, rows: int) -> StagePass:
        """Returns a micro-batch of `rows` samples through the full model on one rank.

        Raises:
            ValueError: The pass cannot be recorded on the meta device.
        """
        return self._rank(Layout(rows=rows), 0, 0).passes[0]

    @without_full_collections()
    def search(
        self,
        cluster: Cluster,
        *,
        shown: int = 5,
        told: Callable[[int, int], None] = lambda _done, _all: None,
    ) -> Found:
        """Finds the fastest layouts of the workload.

        The search is best first, by lower bounds of a step's seconds:

        1. Each layout gets a bound from the time of the full model, divided evenly.
        2. A layout that might be among the fastest gets a bound of its own, which adds context
           parallelism, chunk copies and NVMe.
        3. A layout whose own bound might be among the fastest is recorded and simulated.

        Layouts for which host and NVMe lack room are set aside. If no layout fits, those that may
        lack least are simulated: one of each division, in a schedule that the device has room for,
        if there is one.

        Args:
            cluster: The ranks.
            shown: Number of layouts to find. Of layouts that differ in micro-batches and schedule
                alone, the fastest is taken.
            told: Called with the number of simulated layouts and the number that might be.

        Returns:
            The fastest layouts that fit, or else those that lack least memory.

        Raises:
            UsageError: The batch cannot be sharded over the ranks.
            ValueError: The model's step cannot be recorded on the meta device.
        """
        every = self.layouts(cluster)
        if not every:
            raise UsageError(
                f"{self.workload.batch} samples cannot be sharded over {cluster.ranks} ranks; "
                "give a batch that is a multiple of as many copies of the model as train"
            )
        # (bound of seconds, number, whether the bound is the layout's own, layout)
        queue = [(bound, n, False, layout) for n, layout in enumerate(every)
                 for bound in self._bound(layout.undivided(), layout, cluster)]  # fmt: skip
        heapify(queue)
        possible, done = len(queue), 0
        fitting: dict[Layout, LayoutCost] = {}
        others: dict[Layout, LayoutCost] = {}
        too_large: list[tuple[float, int, Layout]] = []
        while queue:
            seconds, n, own, layout = heappop(queue)
            known = sorted(cost.seconds for cost in fitting.values())
            if len(known) >= shown and known[shown - 1] <= seconds:
                break  # the others are slower still
            best = fitting.get(layout.division())
            if best and best.seconds <= seconds:
                continue  # another schedule of these is faster
            if not own:
                for bound in self._own_bound(layout, cluster):
                    if lacks := least_lacking(self._divided(layout, layout, cluster)):
                        heappush(too_large, (lacks, n, layout))
                    else:
                        heappush(queue, (max(bound, seconds), n, True, layout))
                continue
            told(done, possible)
            done += 1
            limit = min(
                [*(known[shown - 1 : shown]), *([best.seconds] if best else [])], default=inf
            )
            for cost in self._known(layout, cluster, limit):
                if not cost.fits(cluster.machine):
                    self._keep(cost, others, cluster)
                elif best is None or cost.seconds < best.seconds:
                    fitting[layout.division()] = cost
        while too_large and not fitting:
            lacks, _, layout = heappop(too_large)
            least = sorted(cost.lacking(cluster.machine) for cost in others.values())[:shown]
            if len(least) == shown and least[-1] <= lacks:
                break  # the others lack more still
            known_one = others.get(layout.division())
            if known_one and known_one.device_bytes <= cluster.machine.device_bytes:
                continue  # another schedule leaves as much on the host
            told(done, possible)
            done += 1
            for cost in self._known(layout, cluster, inf):
                self._keep(cost, others, cluster)
        if fitting:
            others.clear()
        return Found(
            cluster=cluster,
            fitting=sorted(fitting.values(), key=lambda cost: cost.seconds)[:shown],
            others=sorted(others.values(), key=lambda cost: cost.lacking(cluster.machine))[:shown],
            refused=dict(self.refused),
            compared=len(every),
        )

    @staticmethod
    def _keep(cost: LayoutCost, others: dict[Layout, LayoutCost], cluster: Cluster) -> None:
        """Keeps the layout that lacks least among those that differ in schedule alone."""
        known, machine = others.get(cost.layout.division()), cluster.machine
        if known is None or cost.lacking(machine) < known.lacking(machine):
            others[cost.layout.division()] = cost

    def _bound(self, like: Layout, layout: Layout, cluster: Cluster) -> Iterator[float]:
        """Yields a lower bound of a layout's seconds; nothing if it is refused or too large.

        Args:
            like: The layout, or a similar one that takes no less: without context parallelism.
            layout: The layout.
            cluster: The ranks.
        """
        try:
            of_all = self._divided(layout, like, cluster)
        except (UsageError, NotImplementedError, ValueError) as error:
            self._refuse(like, _refusal(error, like))
            return
        bound = least_of_passes(of_all, like)
        if bound is not None:
            yield bound

    def _own_bound(self, layout: Layout, cluster: Cluster) -> Iterator[float]:
        """Yields the layout's own bound, with the least time of chunk copies and NVMe."""
        for bound in self._bound(layout, layout, cluster):
            of_all = self._divided(layout, layout, cluster)
            yield max(bound, least_of_replicas(of_all), least_of_nvme(of_all))

    def _divided(self, layout: Layout, like: Layout, cluster: Cluster) -> ModelInLayout:
        of_one, of_two = self._whole(like, cluster)
        return ModelInLayout(
            layout=layout, of_one=of_one, of_two=of_two, layers=self._layers_of(layout),
            cluster=cluster, workload=self.workload,
        )  # fmt: skip

    def _layers_of(self, layout: Layout) -> list[int]:
        """Returns the number of blocks of each stage."""
        count = layout.num_stages
        return self._model(_WHOLE).layers_of(count) if count > 1 else [self._blocks]

    def _whole(self, like: Layout, cluster: Cluster) -> tuple[MicroBatchCost, MicroBatchCost]:
        """Returns the full model, with layers and sequences sharded, for one row and for two."""
        key = like.of_model(), cluster.machine, cluster.link
        if key not in self._wholes:
            # A stage for each block is recorded soonest: all middle stages cost the same, so that
            # only the middle one, and one with two blocks, are recorded.
            stages = self._blocks if self._blocks > 3 else 1
            dims = replace(like.dims.one_replica(), pp=stages)
            whole = replace(like.division(), dims=dims)
            of_one, of_two = (self._whole_of(replace(whole, rows=rows), cluster) for rows in (1, 2))
            self._wholes[key] = of_one, of_two
        return self._wholes[key]

    def _whole_of(self, whole: Layout, cluster: Cluster) -> MicroBatchCost:
        tile = cluster.machine.device_bytes
        middle, last = whole.dims.pp // 2, whole.dims.pp - 1
        ranks = {number: self._rank(whole, number, tile) for number in {0, middle, last}}
        ends = {number: rank.passes[number] for number, rank in ranks.items()}
        passes = self._stages(whole, ends, tile)

        def seconds_in(one: StagePass) -> float:
            own = seconds_of(one, cluster, whole)
            return sum(own.forward) + sum(own.backward)

        seconds, kept = sum(map(seconds_in, passes)), sum(one.kept_bytes for one in passes)
        if whole.dims.pp == 1:
            return MicroBatchCost(seconds=seconds, kept_bytes=kept)
        # The difference of the two stages is one block; the rest is a stage's own overhead.
        one, two = passes[middle], self._two_blocks(whole, tile)
        block_seconds = seconds_in(two) - seconds_in(one)
        block_kept = two.kept_bytes - one.kept_bytes
        return MicroBatchCost(
            seconds=seconds - last * (seconds_in(one) - block_seconds),
            kept_bytes=kept - last * (one.kept_bytes - block_kept),
            block_seconds=block_seconds,
            block_kept_bytes=block_kept,
            block_passing_bytes=min(map(passing_bytes, passes)),
            block_bytes=ranks[middle].param_bytes,
            block_sends=sends_all(ranks[middle], middle, cluster),
        )

    def _two_blocks(self, whole: Layout, tile: int) -> StagePass:
        """Returns the pass of a stage of two blocks, the second in the middle of the model."""
        number, layers = whole.dims.pp // 2 - 1, [1] * (whole.dims.pp - 1)
        layers[number] = 2
        return self._record(whole, (number,), tile, layers).passes[number]

    def _known(self, layout: Layout, cluster: Cluster, limit: float) -> Iterator[LayoutCost]:
        """Yields a layout's cost; nothing if the model refuses it or it is not below the limit.

        With a finite limit another layout fits already. A layout that does not fit then yields
        nothing either.
        """
        try:
            costs = self._costs(layout, cluster, limit)
            yield from sorted(costs, key=lambda cost: cost.seconds)[:1]
        except (UsageError, NotImplementedError, ValueError) as error:
            self._refuse(layout, _refusal(error, layout))

    def _refuse(self, layout: Layout, error: Exception) -> None:
        names = {"layers": layout.dims.tp, "experts": layout.dims.ep}
        names |= {"sequences": layout.dims.cp, "stages": layout.dims.pp}
        what = ", ".join(f"{name} among {of}" for name, of in names.items() if of > 1)
        if mode := layout.sequence_parallelism:
            what += f" ({mode})"
        if str(error) not in self.refused.values():
            self.refused.setdefault(what or "one rank", str(error))

    def cost(self, layout: Layout, cluster: Cluster) -> LayoutCost:
        """Returns the cost of a step of the workload in a layout.

        Raises:
            UsageError, NotImplementedError: The model does not support the layout.
            ValueError: The step cannot be recorded on the meta device.
        """
        return min(self._costs(layout, cluster, inf), key=lambda cost: cost.seconds)

    def _costs(self, layout: Layout, cluster: Cluster, limit: float) -> list[LayoutCost]:
        """Returns the costs of a layout that are below the limit, one for each reduction."""
        return [
            self._cost(layout, ends, one)
            for one in (self._placed(layout, each) for each in cluster.with_each_reduction())
            for ends in self._ends(layout, one, limit)
        ]

    def _placed(self, layout: Layout, cluster: Cluster) -> Cluster:
        """Returns the cluster with the place where ranks of a layout reduce gradients.

        As training chooses it for reduce_on="auto". There the memory of communicators is measured;
        here it is cluster.communicator_bytes.
        """
        replicas, device_bytes = layout.dims.same_shard, cluster.machine.device_bytes
        given = cluster.reduction != "ordered" or cluster.reduce_on != "auto"
        if given or not cluster.reduces_on_gpus or replicas == 1:
            return cluster
        buffers = max(
            self._rank(layout, rank, device_bytes, replicas).simulator.gradient_buffer_bytes
            for rank in {0, layout.dims.pp - 1}
        )
        communicators = COMMUNICATORS_OF_REPLICAS * cluster.communicator_bytes
        fits = communicators + _WINDOW_OF_REDUCTION + buffers <= device_bytes // SHARE_OF_REDUCTION
        return replace(cluster, reduce_on="device" if fits else "host")

    def _ends(
        self, layout: Layout, cluster: Cluster, limit: float
    ) -> Iterator[dict[int, tuple[SimulatedRank, End]]]:
        """Yields the first and the last rank of a pipeline; nothing if one exceeds the limit."""
        found = {}
        for rank in sorted({0, layout.dims.pp - 1}):
            tile = cluster.machine.device_bytes
            recorded = self._rank(layout, rank, tile)
            replica = self._rank(layout, rank, tile, layout.dims.same_shard)
            end = End(recorded, replica, layout, cluster, rank, overlap=self.workload.overlap)
            if end.needs_nvme and end.least_seconds < limit:
                end.store()
            if limit < inf and (end.least_seconds >= limit or not end.fits(cluster.machine)):
                return
            found[rank] = recorded, end
        yield found

    def _cost(
        self, layout: Layout, ends: dict[int, tuple[SimulatedRank, End]], cluster: Cluster
    ) -> LayoutCost:
        passes: dict[int, StagePass] = {}
        for recorded, _ in ends.values():
            passes |= recorded.passes
        stages = self._stages(layout, passes, cluster.machine.device_bytes)
        return cost_of(layout, stages, [end for _, end in ends.values()], cluster)

    def _stages(self, layout: Layout, ends: dict[int, StagePass], tile: int) -> list[StagePass]:
        """Returns the pass of each stage. Middle stages with as many blocks share one pass."""
        count = layout.num_stages
        layers = self._model(_WHOLE).layers_of(count) if count > 1 else [0]
        alike = [(blocks, n == 0, n == count - 1) for n, blocks in enumerate(layers)]
        known = {alike[stage]: one for stage, one in ends.items()}
        for stage, kind in enumerate(alike):
            if kind not in known:
                known[kind] = self._between(layout, stage, kind, tile)
        return [known[kind] for kind in alike]

    def _model(self, like: Layout) -> SimulatedModel:
        division = replace(like.of_model(), activations=Layout.activations)
        if division not in self._models:
            self._models[division] = SimulatedModel(
                self._config,
                precision=self.workload.precision,
                state_format=self.workload.state_format,
                rule=self.workload.optimizer,
                dims=division.dims,
                sequence_mode=division.mode,
                sequence_parallel=division.sequence_parallel,
                results=self._results,
            )
        return self._models[division]

    def _between(
        self, layout: Layout, stage: int, kind: tuple[int, bool, bool], tile: int
    ) -> StagePass:
        """Returns the pass of a middle stage, shared by all pipelines with one of this kind."""
        key = (layout.of_model(), kind, layout.style == "zbv", layout.rows, tile)
        if key not in self._passes:
            recorded = self._record(layout, (stage,), tile)
            self._passes[key] = recorded.passes[stage]
        return self._passes[key]

    def _rank(self, layout: Layout, rank: int, tile: int, replicas: int = 1) -> SimulatedRank:
        stages, splits = layout.num_stages, layout.style == "zbv"
        own = tuple(layout.stages_of(rank))
        key = (layout.of_model(), own, stages, splits, layout.rows, tile, replicas)
        if key not in self._ranks:
            self._ranks[key] = (
                self._record(layout, own, tile)
                if replicas == 1
                else self._rank(layout, rank, tile).of_replicas(replicas)
            )
        return self._ranks[key]

    def _record(
        self, layout: Layout, own: tuple[int, ...], tile: int, layers: Sequence[int] | None = None
    ) -> SimulatedRank:
        """Records a rank's stages; `layers` are the blocks of each stage, None: as in training."""
        return self._model(layout).record(
            own,
            len(layers) if layers else layout.num_stages,
            rows=layout.rows,
            sequence=self.workload.sequence,
            tile=tile,
            recomputes=layout.activations == "recompute",
            splits=layout.style == "zbv",
            layers=layers,
        )


def _refusal(error: Exception, layout: Layout) -> Exception:
    """Returns castor's refusal of a layout; raises every other error.

    Attention raises NotImplementedError in its forward for what context parallelism does not
    support; the recorded forward raises ValueError from it.
    """
    if not isinstance(error, ValueError):
        return error
    if layout.dims.cp > 1 and isinstance(error.__cause__, NotImplementedError):
        return error.__cause__
    raise error
