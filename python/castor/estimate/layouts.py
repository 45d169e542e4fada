"""Ways to divide a model and its batch among ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from castor.config.names import BETWEEN_LAYERS, PipelineStyle
from castor.distributed import Mode
from castor.estimate.cluster import Cluster

LayoutActivations = Literal["keep", "recompute"]
_MOST_STAGES_PER_RANK = 2
_LARGEST_MICROBATCH = 64


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A layout of ranks: the shards of model and data that each has."""

    tensor: int = 1
    """Ranks that share layers."""
    experts: int = 1
    """... experts: the same ones, where layers are shared, and else each takes other samples."""
    sequence: int = 1
    """... sequences."""
    mode: Mode = "all_to_all"
    """Mode of context parallelism."""
    tokens_between_layers: bool = False
    """Whether the ranks that share layers have their tokens of what lies between."""
    stages: int = 1
    """... the blocks of the model."""
    data: int = 1
    """Copies of the model, which take other samples."""
    style: PipelineStyle = "1f1b"
    stages_per_rank: int = 1
    microbatches: int = 1
    """Number of micro-batches of a rank's samples."""
    rows: int = 1
    """Samples of each."""
    activations: LayoutActivations = "keep"

    @property
    def ranks(self) -> int:
        """Number of ranks of all replicas."""
        return self.of_layers * self.sequence * self.stages * self.data

    @property
    def of_layers(self) -> int:
        """Ranks that have the parts of a layer, or its experts."""
        return max(self.tensor, self.experts)

    @property
    def experts_alone(self) -> int:
        """Ranks that share experts and take other samples."""
        return self.experts if self.tensor == 1 else 1

    @property
    def simulated_microbatches(self) -> int:
        """Memory and copies repeat when all that are ever under way have been."""
        return min(self.microbatches, 2 * self.stages)

    @property
    def replicas(self) -> int:
        """Ranks that have the same parameters."""
        return self.sequence * self.data

    @property
    def sequence_parallelism(self) -> str | None:
        """HybridParallelPlugin's sequence_parallelism_mode; None: nobody has some tokens only."""
        if self.tokens_between_layers:
            return BETWEEN_LAYERS
        return self.mode if self.sequence > 1 else None

    def stages_of(self, rank: int) -> list[int]:
        """Numbers of the stages that a rank of a pipeline has."""
        if self.style == "zbv":
            return [rank, 2 * self.stages - 1 - rank]
        return list(range(rank, self.stages * self.stages_per_rank, self.stages))

    def division(self) -> Layout:
        """The first of the layouts that differ in micro-batches and schedule alone."""
        return replace(self, style="1f1b", stages_per_rank=1, microbatches=1, rows=1)

    def of_model(self) -> Layout:
        """The first of the layouts whose ranks have the same part of each block."""
        return replace(self.division(), stages=1, data=1)

    def undivided(self) -> Layout:
        """The same with whole sequences."""
        return replace(self, sequence=1, mode=Layout.mode)

    def arguments(self) -> dict[str, Any]:
        """HybridParallelPlugin's."""
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
    """All that castor can train with; whether they fit is another question.

    Layers and sequences are divided within a node, where every layer's exchanges are cheap.

    Args:
        cluster: The ranks.
        batch: Samples of a step, on all ranks together.
        sequence: Tokens in a sample.
        blocks: That stages are cut from; 0: the model cannot be cut.
        heads: Of attention; 0: they cannot be divided.
        experts: Of each layer that has some; 0: there are none.
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
                for tensor, of_experts in _parts_of_layers(layers, heads, experts):
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


def _parts_of_layers(ranks: int, heads: int, experts: int) -> list[tuple[int, int]]:
    """Among how many of these ranks layers may be divided, and their experts."""
    if ranks == 1:
        return [(1, 1)]
    by_heads = bool(heads) and heads % ranks == 0
    found = [(ranks, 1)] if by_heads else []
    if experts >= ranks:
        found += [(1, ranks), *([(ranks, ranks)] if by_heads else [])]
    return found


def _modes(tensor: int, divided: int, sequence: int, heads: int) -> list[Mode]:
    """Returns the modes of context parallelism; one without meaning where there is none."""
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
    """Yields the ways in which a layout's ranks may divide tokens."""
    for mode in _modes(layout.tensor, layout.sequence, sequence, heads):
        yield replace(layout, mode=mode)
    if layout.tensor > 1 and layout.sequence == 1 and not sequence % layout.tensor:
        yield replace(layout, tokens_between_layers=True)


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
            # On a V weights' gradients come later, one by one: for each a forward would run again.
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
