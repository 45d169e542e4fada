"""Divides a model among tensor-, context-, expert- and pipeline-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from castor.activations import DeferringForward, defer_logits, tiled_vocab_parallel_loss
from castor.config import GeminiConfig
from castor.config.names import PipelineStyle, StateFormat
from castor.distributed import (
    Accumulation,
    ContextParallel,
    ExpertParallel,
    Generators,
    Microbatches,
    Mode,
    ModelParallelGroup,
    ParallelGroups,
    PipelineParallel,
    Plan,
    Schedule,
    TensorParallel,
    beneath_adapters,
    check_blocks,
    find_pipeline_plan,
    find_plan,
    with_expert_parallel,
)
from castor.errors import UsageError
from castor.optim.rules import rules_of
from castor.runtime.engine import WORKING_DTYPES, Engine
from castor.runtime.parallel_dims import ONE_RANK, ParallelDims
from castor.runtime.rank_group import RankGroup
from castor.runtime.rules import CLASSES


@dataclass(frozen=True, kw_only=True)
class ParallelizedModel:
    """A model that ParallelConfig.parallelize has sharded; `start` makes it work on an engine."""

    layers: TensorParallel | None = None
    sequences: ContextParallel | None = None
    stages: PipelineParallel | None = None
    schedule: Schedule | None = None
    everyone: RankGroup | None = None
    """All ranks, where each has a shard of the model; None: each has the full model."""

    @property
    def unsharded(self) -> bool:
        """Whether every rank has the full model, and full sequences."""
        return not (self.layers or self.sequences or self.stages)

    @property
    def sharing(self) -> list[ModelParallelGroup]:
        """Groups of ranks that exchange tensors within blocks."""
        return [parallel.ranks for parallel in (self.layers, self.sequences) if parallel]

    def start(self, engine: Engine) -> None:
        """Connects the sharded model to its engine. Collective; called after the engine is made."""
        engine.model_shards = self.stages or self.layers
        if engine.model_shards:
            engine.everyone = self.everyone
            engine.session.refuse_gradient_edits()
        if isinstance(self.layers, ExpertParallel):
            engine.ep_group = self.layers.ranks
        if self.layers:
            self.layers.start(
                Generators(engine.device), self.stages.modules.own_blocks if self.stages else None
            )
        if self.sequences:
            engine.cp_group = self.sequences.ranks
            self.sequences.start()
        if self.stages:
            self.stages.start(WORKING_DTYPES[engine.settings.precision], engine.device)
        if self.schedule:
            self.schedule.start()

    def defer_logits(self, engine: Engine, head: nn.Linear, config: GeminiConfig) -> None:
        """Leaves the logits of training forwards to the loss; see castor.activations."""
        if self.layers and self.layers.loss:
            forward = DeferringForward(engine, head, config)
            self.layers.loss.leave_logits(forward.deferred, tiled_vocab_parallel_loss)
        else:
            defer_logits(engine, head, config)


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """The division of a model into pipeline stages."""

    chunks: int
    """Number of stages of each rank."""
    style: PipelineStyle
    microbatches: Microbatches
    layers: Sequence[int] | None
    """Number of blocks of each stage; None: chosen by their cost."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The sharding of a model over ranks."""

    dims: ParallelDims = ONE_RANK
    """Sizes of the groups of one replica."""
    sequence_mode: Mode = "all_to_all"
    """Mode of context parallelism."""
    plan: Plan | None = None
    """Tensor-parallel plan; None: castor's or transformers' own."""
    loss: bool = False
    """Whether each rank computes the loss from its shard of the vocabulary."""
    sequence_parallel: bool = False
    """Whether tensor-parallel ranks shard the tokens between layers (sequence parallelism)."""
    stages: PipelineConfig | None = None
    """Pipeline stages; None: neither the model nor batches are split."""

    def parallelize(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        groups: ParallelGroups,
        *,
        state_format: StateFormat,
    ) -> ParallelizedModel:
        """Leaves this rank's shards and stages in the model.

        Collective: every rank calls it, as the last thing before the engine is made.

        Raises:
            UsageError: A size does not fit, or an optimizer has states of full parameters; nothing
                has changed.
            NotImplementedError: There is no plan for the model, or its sequences cannot be sharded.
                Or the optimizer would not update a shard as it does the full parameter, or a model
                in stages has several optimizers. Nothing has changed.
        """
        sequences, layers, stages = None, None, None
        schedule: Schedule | None = None
        called = model
        if not self.dims.is_one_rank:
            model = beneath_adapters(called)
            if called is not model and self.sequence_parallel:
                raise NotImplementedError(
                    "adapters of PEFT are not trained with "
                    "sequence_parallelism_mode='split_gather', and this is a "
                    f"{type(called).__name__}: leave it out, or train the model without adapters"
                )
        if groups.cp:
            sequences = ContextParallel(
                model, groups.cp, tensor_size=self.dims.tp, mode=self.sequence_mode
            )
        if groups.layers:
            _check_updates(optimizers, self._asked_of_layers)
            kind = TensorParallel if self.dims.tp > 1 else ExpertParallel
            layers = kind(
                model,
                self._plan_of_layers(model),
                groups.layers,
                vocab_parallel_loss=self.loss,
                sequence_parallel=self.sequence_parallel,
            )
            if state_format == "split_int8":
                check_blocks(model, layers.shard_specs, groups.layers)
        if groups.pp and groups.pp_group and self.stages:
            if len(optimizers) > 1:
                names = ", ".join(type(one).__name__ for one in optimizers)
                raise NotImplementedError(
                    f"pp_size={groups.pp.size} ranks write the states of one optimizer "
                    f"together, and boost was given {len(optimizers)} ({names}): give one with "
                    "param_groups"
                )
            check_states(optimizers, f"the full model, which pp_size={groups.pp.size}")
            stages = PipelineParallel(
                model,
                find_pipeline_plan(model),
                groups.pp,
                subset_of_pp=groups.subset_of_pp,
                group=groups.pp_group,
                chunks=self.stages.chunks,
                folded=self.stages.style == "zbv",
                layers=self.stages.layers,
            )
            stages.tensor, stages.sequences = layers, sequences
            stages.apply(optimizers, called)
            if groups.layers and self.stages.style == "zbv":
                # A Python function would compute weights' gradients in the first half of backward.
                groups.layers.entered.sums_beside = False
            # Imported only here: torch's pipelining takes as long to import as all of castor.
            from castor.distributed.pipeline_schedule import PipelineSchedule

            schedule = PipelineSchedule(model, stages, self.stages.style, self.stages.microbatches)
        elif self.stages:
            schedule = Accumulation(
                model, self.stages.microbatches, sequences, layers.loss if layers else None
            )
        if layers:
            layers.apply()
        return ParallelizedModel(
            layers=layers,
            sequences=sequences,
            stages=stages,
            schedule=schedule,
            everyone=groups.everyone,
        )

    @property
    def _asked_of_layers(self) -> str:
        dims = self.dims
        return f"tp_size={dims.tp}" if dims.tp > 1 else f"ep_size={dims.ep}"

    def _plan_of_layers(self, model: nn.Module) -> dict[str, tuple[str, ...]]:
        dims = self.dims
        plan = find_plan(model, dims.tp, self.plan) if dims.tp > 1 else {}
        return with_expert_parallel(model, plan, dims.ep) if dims.ep > 1 else plan


def _check_updates(optimizers: Sequence[Optimizer], asked: str) -> None:
    for optimizer, rule in zip(optimizers, rules_of(optimizers), strict=True):
        if rule is None:
            raise NotImplementedError(
                f"with {asked} a {type(optimizer).__name__} would step shards of "
                f"matrices as if they were full ones; use one of {', '.join(CLASSES)}, which step "
                "elements, and of several one kind"
            )
    check_states(optimizers, f"full parameters, which {asked}")


def check_states(optimizers: Sequence[Optimizer], of_what: str) -> None:
    """Raises UsageError if an optimizer has states already, of full parameters."""
    for optimizer in optimizers:
        if optimizer.state:
            raise UsageError(
                f"the {type(optimizer).__name__} has states of {of_what} ranks are about to "
                "shard; boost it before its first step, and load a checkpoint afterwards"
            )
