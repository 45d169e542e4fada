"""The fastest ways to train a model on a cluster (`castor plan`)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from castor.errors import UsageError
from castor.estimate.cluster import Cluster
from castor.estimate.layout_cost import LayoutCost, cost_of, seconds_of
from castor.estimate.layouts import Layout, layouts
from castor.estimate.rank_on_paper import (
    ModelOnPaper,
    RankOnPaper,
    StagePass,
    num_blocks,
)
from castor.estimate.workload import Workload

_Division = tuple[int, int, bool]
"""Ranks that share layers, ranks that share sequences, and whether blocks are recomputed."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search knows of a model's layouts."""

    fitting: list[LayoutCost]
    """Fastest first."""
    others: list[LayoutCost]
    """For which there is no room, that which lacks least first."""
    refused: dict[str, str]
    """Ways of dividing that the model does not take, and why."""
    compared: int
    """Layouts that there are."""


@dataclass(frozen=True, kw_only=True)
class _Bound:
    """Less than which a layout does not take."""

    seconds: float
    device_bytes: int


@dataclass(frozen=True, kw_only=True)
class _Whole:
    """A micro-batch through all of a model, alone."""

    seconds: float
    block_seconds: float
    """Of these, in a block; 0: it has none that stages are cut from."""
    kept_bytes: int


class LayoutSearch:
    """A model whose layouts are compared; what is recorded of it is kept."""

    def __init__(self, config: Path, workload: Workload) -> None:
        """Reads the model.

        Args:
            config: A config.json.
            workload: Of all ranks together; its activations are not read, layouts have theirs.

        Raises:
            OSError, ValueError, ModuleNotFoundError: See castor.estimate.model.build.
        """
        self._config = config
        self.workload = workload
        self._models: dict[_Division, ModelOnPaper] = {}
        self._ranks: dict[Any, RankOnPaper] = {}
        self._wholes: dict[Any, tuple[_Whole, _Whole]] = {}
        whole = self._model((1, 1, False))
        settings: Any = whole.model.config
        self._heads = int(getattr(settings, "num_attention_heads", 0) or 0)
        self._blocks = 0
        self.refused: dict[str, str] = {}
        try:
            self._blocks = num_blocks(whole.model, whole.plan())
        except NotImplementedError as error:
            self.refused["stages"] = str(error)
        self.parameters = sum(param.numel() for param in whole.model.parameters())

    def with_batch(self, batch: int) -> LayoutSearch:
        """The same model with other samples in a step; both keep what is recorded."""
        other = copy.copy(self)
        other.workload = replace(self.workload, batch=batch)
        return other

    def layouts(self, cluster: Cluster) -> list[Layout]:
        """All that there are for the workload."""
        return list(
            layouts(
                cluster,
                batch=self.workload.batch,
                sequence=self.workload.sequence,
                blocks=self._blocks,
                heads=self._heads,
            )
        )

    def whole_pass(self, rows: int) -> StagePass:
        """A micro-batch through all of the model on one rank.

        Raises:
            ValueError: It cannot be recorded on the meta device.
        """
        return self._rank(Layout(rows=rows), 0, 0).passes[0]

    def search(
        self,
        cluster: Cluster,
        *,
        shown: int = 5,
        told: Callable[[int, int], None] = lambda _done, _all: None,
    ) -> Found:
        """The fastest layouts of the workload.

        All are bounded by what the whole model takes, divided evenly. Those that might be among the
        fastest are recorded and simulated, in the order of their bounds.

        Args:
            cluster: Where.
            shown: How many are asked for. Of those that differ in micro-batches and schedule alone
                the fastest is taken.
            told: Is called with how many are simulated, and how many might be.

        Raises:
            UsageError: The batch cannot be divided at all.
            ValueError: The model's step cannot be recorded on the meta device.
        """
        every = self.layouts(cluster)
        if not every:
            raise UsageError(
                f"{self.workload.batch} samples cannot be divided among {cluster.ranks} ranks; "
                "give a batch that is a multiple of as many copies of the model as train"
            )
        bounds = [(bound, layout) for layout in every for bound in self._bound(layout, cluster)]
        room = cluster.machine.device_bytes
        possible = [(bound.seconds, n, layout) for n, (bound, layout) in enumerate(bounds)
                    if bound.device_bytes <= room]  # fmt: skip
        fitting: dict[Layout, LayoutCost] = {}
        others: list[LayoutCost] = []
        for done, (seconds, _, layout) in enumerate(sorted(possible)):
            told(done, len(possible))
            known = sorted(cost.seconds for cost in fitting.values())
            if len(known) >= shown and known[shown - 1] <= seconds:
                break  # the others are slower still
            for cost in self._known(layout, cluster):
                division = layout.division()
                if not cost.fits(cluster.machine):
                    others.append(cost)
                elif division not in fitting or cost.seconds < fitting[division].seconds:
                    fitting[division] = cost
        return Found(
            fitting=sorted(fitting.values(), key=lambda cost: cost.seconds)[:shown],
            others=sorted(others, key=lambda cost: _lacking(cost, cluster))[:shown],
            refused=dict(self.refused),
            compared=len(every),
        )

    def _bound(self, layout: Layout, cluster: Cluster) -> Iterator[_Bound]:
        """Less than which it does not take; none where the model refuses it."""
        try:
            of_one, of_two = self._whole(layout, cluster)
        except (UsageError, NotImplementedError) as error:
            self._refuse(layout, error)
            return

        def of_rows(measure: Callable[[_Whole], float]) -> float:
            # What an operator takes is the larger of two that are in proportion to rows, and
            # something that is not: from two rows on it grows at least as from one to two.
            one, two = measure(of_one), measure(of_two)
            return (one + (layout.rows - 1) * (two - one)) / layout.sequence

        each = of_rows(lambda whole: whole.seconds)
        block = of_rows(lambda whole: whole.block_seconds)
        count = layout.stages * layout.stages_per_rank
        layers = self._model((1, 1, False)).layers_of(count) if count > 1 else [0]
        most = max(sum(layers[rank :: layout.stages]) for rank in range(layout.stages))
        working = layout.microbatches * max(each / layout.stages, block * most)
        under_way = min(layout.microbatches, layout.stages) / layout.stages
        yield _Bound(
            seconds=working + each * (layout.stages - 1) / count,
            device_bytes=int(of_rows(lambda whole: whole.kept_bytes) * under_way),
        )

    def _whole(self, layout: Layout, cluster: Cluster) -> tuple[_Whole, _Whole]:
        """The model with layers divided so, for one row and for two."""
        key = (layout.tensor, layout.activations)
        if key not in self._wholes:
            # A stage for each block is recorded soonest: those in between take as much as others.
            whole = replace(layout.division(), sequence=1, stages=max(1, self._blocks), data=1)
            of_one, of_two = (self._whole_of(replace(whole, rows=rows), cluster) for rows in (1, 2))
            self._wholes[key] = of_one, of_two
        return self._wholes[key]

    def _whole_of(self, whole: Layout, cluster: Cluster) -> _Whole:
        passes = self._stages(whole, {}, cluster.machine.device_bytes)
        of = [seconds_of(one, cluster, whole) for one in passes]
        seconds = [sum(one.forward) + sum(one.backward) for one in of]
        return _Whole(
            seconds=sum(seconds),
            block_seconds=min(seconds) if len(seconds) > 2 else 0.0,
            kept_bytes=sum(one.kept_bytes for one in passes),
        )

    def _known(self, layout: Layout, cluster: Cluster) -> Iterator[LayoutCost]:
        """Its cost; none where the model refuses it."""
        try:
            yield self.cost(layout, cluster)
        except (UsageError, NotImplementedError) as error:
            self._refuse(layout, error)

    def _refuse(self, layout: Layout, error: Exception) -> None:
        names = {"layers": layout.tensor, "sequences": layout.sequence, "stages": layout.stages}
        what = ", ".join(f"{name} among {of}" for name, of in names.items() if of > 1)
        self.refused.setdefault(what or "one rank", str(error))

    def cost(self, layout: Layout, cluster: Cluster) -> LayoutCost:
        """What a step of the workload takes in a layout.

        Raises:
            UsageError, NotImplementedError: The model cannot be divided so.
            ValueError: Its step cannot be recorded on the meta device.
        """
        tile = cluster.machine.device_bytes
        last = layout.stages - 1
        ends = [self._rank(layout, rank, tile) for rank in sorted({0, last})]
        passes: dict[int, StagePass] = {}
        for end in ends:
            passes |= end.passes
        stages = self._stages(layout, passes, tile)
        return cost_of(layout, stages, ends, cluster, overlap=self.workload.overlap)

    def _stages(self, layout: Layout, ends: dict[int, StagePass], tile: int) -> list[StagePass]:
        """A micro-batch in each stage. Of those in between, as many blocks take as much."""
        count = layout.stages * layout.stages_per_rank
        layers = self._model((1, 1, False)).layers_of(count) if count > 1 else [0]
        known: dict[tuple[int, bool, bool], StagePass] = {}
        found = []
        for stage, blocks in enumerate(layers):
            alike = (blocks, stage == 0, stage == count - 1)
            if alike not in known:
                own = ends.get(stage)
                known[alike] = own or self._rank(layout, stage % layout.stages, tile).passes[stage]
            found.append(known[alike])
        return found

    def _model(self, division: _Division) -> ModelOnPaper:
        if division not in self._models:
            tensor, sequence, recomputes = division
            self._models[division] = ModelOnPaper(
                self._config,
                precision=self.workload.precision,
                state_format=self.workload.state_format,
                rule=self.workload.optimizer,
                tensor_size=tensor,
                sequence_size=sequence,
                recomputes=recomputes,
            )
        return self._models[division]

    def _rank(self, layout: Layout, rank: int, tile: int) -> RankOnPaper:
        division = (layout.tensor, layout.sequence, layout.activations == "recompute")
        pipeline = (rank, layout.stages, layout.stages_per_rank)
        key = (division, pipeline, layout.rows, tile)
        if key not in self._ranks:
            self._ranks[key] = self._model(division).record(
                *pipeline, rows=layout.rows, sequence=self.workload.sequence, tile=tile
            )
        return self._ranks[key]


def _lacking(cost: LayoutCost, cluster: Cluster) -> int:
    machine = cluster.machine
    return max(0, cost.device_bytes - machine.device_bytes) + max(
        0, cost.host_bytes - machine.host_bytes
    )
