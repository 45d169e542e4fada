"""Layouts: ways to shard a model and its batch over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from castor.config.names import SPLIT_GATHER, PipelineStyle
from castor.distributed import Mode
from castor.planner.cluster import Cluster

LayoutActivations = Literal["keep", "recompute"]
_MOST_STAGES_PER_RANK = 2
_LARGEST_MICROBATCH = 64


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Layout of ranks: the shards of model and data that each rank has."""

    tensor: int = 1
    """Number of tensor-parallel ranks."""
    experts: int = 1
    """Number of expert-parallel ranks: the tensor-parallel ones if `tensor` is above 1, otherwise
    ranks that take different samples."""
    sequence: int = 1
    """Number of context-parallel ranks."""
    mode: Mode = "all_to_all"
    """Mode of context parallelism."""
    sequence_parallel: bool = False
    """Whether the tensor-parallel ranks shard the tokens between layers (sequence parallelism)."""
    stages: int = 1
    """Number of ranks in a pipeline."""
    data: int = 1
    """Number of data-parallel replicas, which take different samples."""
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
    def ranks(self) -> int:
        """Number of ranks of all replicas."""
        return self.of_layers * self.sequence * self.stages * self.data

    @property
    def of_layers(self) -> int:
        """Number of ranks that shard a layer or its experts."""
        return max(self.tensor, self.experts)

    @property
    def experts_alone(self) -> int:
        """Number of expert-parallel ranks that take different samples."""
        return self.experts if self.tensor == 1 else 1

    @property
    def simulated_microbatches(self) -> int:
        """Number of micro-batches to simulate: memory and copies repeat after that many."""
        return min(self.microbatches, 2 * self.stages)

    @property
    def replicas(self) -> int:
        """Number of ranks that have the same parameters."""
        return self.sequence * self.data

    @property
    def sequence_parallelism(self) -> str | None:
        """HybridParallelPlugin's sequence_parallelism_mode; None: no rank shards tokens."""
        if self.sequence_parallel:
            return SPLIT_GATHER
        return self.mode if self.sequence > 1 else None

    def stages_of(self, rank: int) -> list[int]:
        """Returns the numbers of the stages that a rank of a pipeline has."""
        if self.style == "zbv":
            return [rank, 2 * self.stages - 1 - rank]
        return list(range(rank, self.stages * self.stages_per_rank, self.stages))

    def division(self) -> Layout:
        """Returns the layout with the default schedule; those that differ in schedule share it."""
        return replace(self, style="1f1b", stages_per_rank=1, microbatches=1, rows=1)

    def of_model(self) -> Layout:
        """Returns the layout of one stage and replica; those with the same shards share it."""
        return replace(self.division(), stages=1, data=1)

    def undivided(self) -> Layout:
        """Returns the layout without context parallelism."""
        return replace(self, sequence=1, mode=Layout.mode)

    def arguments(self) -> dict[str, Any]:
        """Returns HybridParallelPlugin's arguments for the layout."""
        found: dict[str, Any] = {
            "tp_size": self.tensor,
            "sp_size": self.sequence,
            "pp_size": self.stages,
            "activations": self.activations,
        }
        if self.experts > 1:
            found["ep_size"] = self.experts
        if mode := self.sequence_parallelism:
            found["sequence_parallelism_mode"] = mode
        if self.stages > 1 or self.microbatches > 1:
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
                data = cluster.ranks // (share * stages)
                if stages > 1 and stages > blocks:
                    continue
                for tensor, of_experts in _layer_sizes(layers, heads, experts):
                    whole = Layout(
                        tensor=tensor,
                        experts=of_experts,
                        sequence=divided,
                        stages=stages,
                        data=data,
                    )
                    samples, rest = divmod(batch, data * whole.experts_alone)
                    if not rest:
                        for one in _by_tokens(whole, sequence, heads):
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
    for mode in _modes(layout.tensor, layout.sequence, sequence, heads):
        yield replace(layout, mode=mode)
    if layout.tensor > 1 and layout.sequence == 1 and not sequence % layout.tensor:
        yield replace(layout, sequence_parallel=True)


def _schedules(layout: Layout, samples: int, blocks: int) -> Iterator[Layout]:
    """Yields the schedules of a replica's samples through its stages."""
    for rows in _divisors(samples):
        count = samples // rows
        if rows > _LARGEST_MICROBATCH or (count < layout.stages and rows > 1):
            continue
        styles: list[tuple[PipelineStyle, int]] = [("1f1b", 1)]
        if count < layout.stages:
            styles = [("gpipe", 1)]
        elif layout.stages > 1 and count % layout.stages == 0:
            for each in range(2, _MOST_STAGES_PER_RANK + 1):
                if layout.stages * each <= blocks:
                    styles.append(("interleaved", each))
        if layout.stages > 1 and 2 * layout.stages <= blocks:
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
