"""The division of a model among ranks, and the checks that come before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from castor.activations import DeferringForward, defer_logits, tiled_divided_loss
from castor.config import GeminiConfig
from castor.config.names import PipelineStyle, StateFormat
from castor.distributed import (
    Accumulation,
    ExpertParallel,
    Generators,
    Microbatches,
    Mode,
    PipelineParallel,
    Plan,
    RankLayout,
    Schedule,
    SequenceParallel,
    TensorParallel,
    TensorRanks,
    beneath_adapters,
    check_blocks,
    find_pipeline_plan,
    find_plan,
    with_whole_experts,
)
from castor.errors import UsageError
from castor.optim.rules import rules_of
from castor.runtime.engine import WORKING_DTYPES, Engine
from castor.runtime.ranks import Peers
from castor.runtime.rules import CLASSES


@dataclass(frozen=True, kw_only=True)
class Divided:
    """A model whose division begins with its engine."""

    layers: TensorParallel | None = None
    sequences: SequenceParallel | None = None
    stages: PipelineParallel | None = None
    schedule: Schedule | None = None
    everyone: Peers | None = None
    """All ranks, where they have parts of the model."""

    @property
    def whole(self) -> bool:
        """Whether every rank has all of the model, and whole sequences."""
        return not (self.layers or self.sequences or self.stages)

    @property
    def sharing(self) -> list[TensorRanks]:
        """Groups of ranks that exchange something within blocks."""
        return [divided.ranks for divided in (self.layers, self.sequences) if divided]

    def start(self, engine: Engine) -> None:
        """After boost. Collective."""
        engine.parts = self.stages or self.layers
        if engine.parts:
            engine.everyone = self.everyone
            engine.session.refuse_gradient_edits()
        if isinstance(self.layers, ExpertParallel):
            engine.among = self.layers.ranks
        if self.layers:
            self.layers.start(
                Generators(engine.device), self.stages.modules.own_blocks if self.stages else None
            )
        if self.sequences:
            engine.beside = self.sequences.ranks
            self.sequences.start()
        if self.stages:
            self.stages.start(WORKING_DTYPES[engine.settings.precision], engine.device)
        if self.schedule:
            self.schedule.start()

    def defer_logits(self, engine: Engine, head: nn.Linear, config: GeminiConfig) -> None:
        """Leaves the logits of training forwards to the loss; see castor.activations."""
        if self.layers and self.layers.loss:
            forward = DeferringForward(engine, head, config)
            self.layers.loss.leave_logits(forward.deferred, tiled_divided_loss)
        else:
            defer_logits(engine, head, config)


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The division of a model into pipeline stages."""

    size: int
    """Ranks; 1: the model is whole, and batches are divided alone."""
    chunks: int
    """Stages of each."""
    style: PipelineStyle
    microbatches: Microbatches
    layers: Sequence[int] | None
    """Blocks of each stage; None: by what they cost."""


@dataclass(frozen=True, kw_only=True)
class Division:
    """Among how many ranks."""

    tensor_size: int = 1
    """Layers."""
    expert_size: int = 1
    """Experts: the same ranks where layers are divided as well."""
    sequence_size: int = 1
    """Sequences."""
    sequence_mode: Mode = "all_to_all"
    plan: Plan | None = None
    """Tensor-parallel plan; None: castor's or transformers' own."""
    loss: bool = False
    """Whether the loss is computed of each rank's part of the vocabulary."""
    tokens_between_layers: bool = False
    """Whether the ranks that divide layers divide tokens of what lies between."""
    stages: Stages | None = None
    """Into which ranks divide the model; None: it is whole, and so are batches."""

    @property
    def ranks(self) -> int:
        """Number of ranks that take the same data."""
        return self.tensor_size * self.sequence_size * self.num_ranks_of_stages

    @property
    def experts_alone(self) -> int:
        """Ranks that divide experts and nothing else of layers: each has data of its own."""
        return self.expert_size if self.tensor_size == 1 else 1

    @property
    def num_ranks_of_layers(self) -> int:
        """Number of ranks that shard each layer, or its experts."""
        return max(self.tensor_size, self.expert_size)

    @property
    def num_ranks_of_stages(self) -> int:
        """Number of ranks that have the stages of a model."""
        return self.stages.size if self.stages else 1

    def layout(self) -> RankLayout:
        """Makes the layout of all ranks. Collective.

        Raises:
            UsageError: Their number does not fit.
        """
        sizes = {"tp_size": self.tensor_size, "ep_size": self.expert_size}
        sizes |= {"sp_size": self.sequence_size, "pp_size": self.num_ranks_of_stages}
        return RankLayout.find(
            *(self.num_ranks_of_layers, self.sequence_size, self.num_ranks_of_stages),
            asked=", ".join(f"{name}={of}" for name, of in sizes.items() if of > 1),
        )

    def divide(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        layout: RankLayout,
        *,
        state_format: StateFormat,
    ) -> Divided:
        """Leaves this rank's parts in the model. Collective; call it last before the engine.

        Raises:
            UsageError: A size does not fit, or an optimizer has states of the whole; nothing has
                changed.
            NotImplementedError: There is no plan, sequences cannot be divided, the optimizer's
                update of a part is not a part of its update, or there are several of a model in
                stages; likewise.
        """
        sequences, layers, stages = None, None, None
        schedule: Schedule | None = None
        called = model
        if self.ranks > 1 or self.expert_size > 1:
            model = beneath_adapters(called)
            if called is not model and self.tokens_between_layers:
                raise NotImplementedError(
                    "adapters of PEFT are not trained with "
                    "sequence_parallelism_mode='split_gather', and this is a "
                    f"{type(called).__name__}: leave it out, or train the model without adapters"
                )
        if layout.sequence:
            sequences = SequenceParallel(
                model, layout.sequence, tensor_size=self.tensor_size, mode=self.sequence_mode
            )
        if layout.tensor:
            _check_updates(optimizers, self._asked_of_layers)
            kind = ExpertParallel if self.experts_alone > 1 else TensorParallel
            layers = kind(
                model,
                self._plan_of_layers(model),
                layout.tensor,
                divide_loss=self.loss,
                divide_tokens=self.tokens_between_layers,
            )
            if state_format == "split_int8":
                check_blocks(model, layers.cuts, layout.tensor)
        if layout.stages and layout.between_stages and self.stages:
            if len(optimizers) > 1:
                names = ", ".join(type(one).__name__ for one in optimizers)
                raise NotImplementedError(
                    f"pp_size={layout.stages.size} ranks write the states of one optimizer "
                    f"together, and boost was given {len(optimizers)} ({names}): give one with "
                    "param_groups"
                )
            check_states(optimizers, f"the whole model, which pp_size={layout.stages.size}")
            stages = PipelineParallel(
                model,
                find_pipeline_plan(model),
                layout.stages,
                among=layout.among_stages,
                group=layout.between_stages,
                chunks=self.stages.chunks,
                folded=self.stages.style == "zbv",
                layers=self.stages.layers,
            )
            stages.tensor, stages.sequences = layers, sequences
            stages.apply(optimizers, called)
            # Not before: torch's pipelining takes as long to import as all of castor.
            from castor.distributed.pipeline_schedule import PipelineSchedule

            schedule = PipelineSchedule(model, stages, self.stages.style, self.stages.microbatches)
        elif self.stages:
            schedule = Accumulation(
                model, self.stages.microbatches, sequences, layers.loss if layers else None
            )
        if layers:
            layers.apply()
        return Divided(
            layers=layers,
            sequences=sequences,
            stages=stages,
            schedule=schedule,
            everyone=layout.everyone,
        )

    @property
    def _asked_of_layers(self) -> str:
        layers = self.tensor_size > 1
        return f"tp_size={self.tensor_size}" if layers else f"ep_size={self.expert_size}"

    def _plan_of_layers(self, model: nn.Module) -> dict[str, tuple[str, ...]]:
        plan = find_plan(model, self.tensor_size, self.plan) if self.tensor_size > 1 else {}
        return with_whole_experts(model, plan, self.expert_size) if self.expert_size > 1 else plan


def _check_updates(optimizers: Sequence[Optimizer], asked: str) -> None:
    for optimizer, rule in zip(optimizers, rules_of(optimizers, "cpu"), strict=True):
        if rule is None:
            raise NotImplementedError(
                f"with {asked} a {type(optimizer).__name__} would step shards of "
                f"matrices as if they were full ones; use one of {', '.join(CLASSES)}, which step "
                "elements, and of several one kind"
            )
    check_states(optimizers, f"full parameters, which {asked}")


def check_states(optimizers: Sequence[Optimizer], of_what: str) -> None:
    """Raises UsageError of an optimizer that has stepped full parameters."""
    for optimizer in optimizers:
        if optimizer.state:
            raise UsageError(
                f"the {type(optimizer).__name__} has states of {of_what} ranks are about to "
                "shard; boost it before its first step, and load a checkpoint afterwards"
            )
