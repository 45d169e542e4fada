"""Layouts: ways to shard a model and its batch over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from castor.config.names import SPLIT_GATHER, PipelineStyle
from castor.distributed import Mode
from castor.planner.cluster import Cluster
from castor.runtime.parallel_dims import ONE_RANK, ParallelDims

LayoutActivations = Literal["keep", "recompute"]
_MOST_STAGES_PER_RANK = 2
_LARGEST_MICROBATCH = 64


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Layout of ranks: the shards of model and data that each rank has."""

    dims: ParallelDims = ONE_RANK
    """Sizes of the groups of ranks."""
    mode: Mode = "all_to_all"
    """Mode of context parallelism."""
    sequence_parallel: bool = False
    """Whether the tensor-parallel ranks shard the tokens between layers (sequence parallelism)."""
    style: PipelineStyle = "1f1b"
    """Schedule of the pipeline."""
    stages_per_rank: int = 1
    """Number of stages of each rank in a pipeline."""
    microbatches: int = 1
    """Number of micro-batches of a rank's samples."""
    rows: int = 1
    """Number of samples in a micro-batch."""
    activations: LayoutActivations = "keep"
    """Whether the blocks' activations are kept or recomputed."""

    @property
    def simulated_microbatches(self) -> int:
        """Number of micro-batches to simulate: memory and copies repeat after that many."""
        return min(self.microbatches, 2 * self.dims.pp)

    @property
    def sequence_parallelism(self) -> str | None:
        """HybridParallelPlugin's sequence_parallelism_mode; None: no rank shards tokens."""
        if self.sequence_parallel:
            return SPLIT_GATHER
        return self.mode if self.dims.cp > 1 else None

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages of the model."""
        return self.dims.pp * self.stages_per_rank

    def stages_of(self, rank: int) -> list[int]:
        """Returns the numbers of the stages that a rank of a pipeline has."""
        if self.style == "zbv":
            return [rank, 2 * self.dims.pp - 1 - rank]
        return list(range(rank, self.num_stages, self.dims.pp))

    def division(self) -> Layout:
        """Returns the layout with the default schedule; those that differ in schedule share it."""
        return replace(self, style="1f1b", stages_per_rank=1, microbatches=1, rows=1)

    def of_model(self) -> Layout:
        """Returns the layout of one stage and replica; those with the same shards share it."""
        return replace(self.division(), dims=replace(self.dims.one_replica(), pp=1))

    def undivided(self) -> Layout:
        """Returns the layout without context parallelism."""
        return replace(self, dims=replace(self.dims, cp=1), mode=Layout.mode)

    def arguments(self) -> dict[str, Any]:
        """Returns HybridParallelPlugin's arguments for the layout."""
        found: dict[str, Any] = self.dims.arguments() | {"activations": self.activations}
        if self.dims.ep == 1:
            del found["ep_size"]
        if mode := self.sequence_parallelism:
            found["sequence_parallelism_mode"] = mode
        if self.dims.pp > 1 or self.microbatches > 1:
            found |= {"pp_style": self.style, "num_microbatches": self.microbatches}
        if self.stages_per_rank > 1:
            found["num_model_chunks"] = self.stages_per_rank
        return found


def layouts(
    cluster: Cluster, *, batch: int, sequence: int, blocks: int, heads: int, experts: int = 0
) -> Iterator[Layout]:
    """Yields all layouts that castor can train with, whether they fit or not.

    Tensor-, expert- and context-parallel ranks are on one node, where the collectives of every
    layer are cheap.

    Args:
        cluster: The ranks.
        batch: Samples of a step, on all ranks together.
        sequence: Tokens in a sample.
        blocks: Number of blocks that stages are cut from; 0: the model cannot be cut.
        heads: Number of attention heads; 0: they cannot be sharded.
        experts: Number of experts in a layer of experts; 0: the model has no experts.
    """
    for layers in _divisors(min(cluster.ranks, cluster.ranks_per_node)):
        for divided in _divisors(cluster.ranks_per_node // layers):
            share = layers * divided
            if cluster.ranks % share:
                continue
            for stages in _divisors(cluster.ranks // share):
                if stages > 1 and stages > blocks:
                    continue
                for tensor, of_experts in _layer_sizes(layers, heads, experts):
                    dims = ParallelDims.of_one_replica(
                        cp=divided, tp=tensor, pp=stages, ep=of_experts
                    ).in_world(cluster.ranks)
                    samples, rest = divmod(batch, dims.dp)
                    if not rest:
                        for one in _by_tokens(Layout(dims=dims), sequence, heads):
                            yield from _schedules(one, samples, blocks)


def _layer_sizes(ranks: int, heads: int, experts: int) -> list[tuple[int, int]]:
    """Returns the (tensor-parallel, expert-parallel) sizes that `ranks` ranks may have."""
    if ranks == 1:
        return [(1, 1)]
    by_heads = bool(heads) and heads % ranks == 0
    found = [(ranks, 1)] if by_heads else []
    if experts >= ranks:
        found += [(1, ranks), *([(ranks, ranks)] if by_heads else [])]
    return found


def _modes(tensor: int, divided: int, sequence: int, heads: int) -> list[Mode]:
    """Returns the possible modes of context parallelism; the default one for a single rank."""
    if divided == 1:
        return ["all_to_all"]
    if not heads:
        return []
    pieces = {"all_to_all": divided, "all_gather": divided, "ring_attn": 2 * divided}
    return [
        mode
        for mode in get_args(Mode)
        if not sequence % pieces[mode] and (mode != "all_to_all" or not heads % (tensor * divided))
    ]


def _by_tokens(layout: Layout, sequence: int, heads: int) -> Iterator[Layout]:
    """Yields the ways in which a layout's ranks may shard tokens."""
    for mode in _modes(layout.dims.tp, layout.dims.cp, sequence, heads):
        yield replace(layout, mode=mode)
    if layout.dims.tp > 1 and layout.dims.cp == 1 and not sequence % layout.dims.tp:
        yield replace(layout, sequence_parallel=True)


def _schedules(layout: Layout, samples: int, blocks: int) -> Iterator[Layout]:
    """Yields the schedules of a replica's samples through its stages."""
    for rows in _divisors(samples):
        count = samples // rows
        if rows > _LARGEST_MICROBATCH or (count < layout.dims.pp and rows > 1):
            continue
        styles: list[tuple[PipelineStyle, int]] = [("1f1b", 1)]
        if count < layout.dims.pp:
            styles = [("gpipe", 1)]
        elif layout.dims.pp > 1 and count % layout.dims.pp == 0:
            for each in range(2, _MOST_STAGES_PER_RANK + 1):
                if layout.dims.pp * each <= blocks:
                    styles.append(("interleaved", each))
        if layout.dims.pp > 1 and 2 * layout.dims.pp <= blocks:
            styles.append(("zbv", 2))
        for style, each in styles:
            # "zbv" computes weights' gradients later, each of which would need a second forward.
            for activations in ("keep", *(("recompute",) if style != "zbv" else ())):
                yield replace(
                    layout,
                    style=style,
                    stages_per_rank=each,
                    microbatches=count,
                    rows=rows,
                    activations=activations,
                )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
