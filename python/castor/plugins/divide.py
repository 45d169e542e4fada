"""What of a model several ranks divide among themselves, and what has to hold before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from castor.config.names import StateFormat
from castor.distributed import (
    Plan,
    RankLayout,
    SequenceParallel,
    TensorParallel,
    TensorRanks,
    find_plan,
)
from castor.errors import UsageError
from castor.optim.rules import rule_of
from castor.runtime.engine import Engine


@dataclass(frozen=True, kw_only=True)
class Divided:
    """A model whose division begins with its engine."""

    layers: TensorParallel | None = None
    sequences: SequenceParallel | None = None

    def start(self, engine: Engine) -> None:
        """After boost. Collective."""
        engine.parts = self.layers
        if self.layers:
            self.layers.start()
        if self.sequences:
            self.sequences.start()


@dataclass(frozen=True, kw_only=True)
class Division:
    """Among how many ranks."""

    tensor_size: int = 1
    """Layers."""
    sequence_size: int = 1
    """Sequences."""
    plan: Plan | None = None
    """How layers are; None: as castor or transformers knows it."""
    loss: bool = False
    """Whether the loss is computed of each rank's part of the vocabulary."""

    @property
    def ranks(self) -> int:
        """That take the same data."""
        return self.tensor_size * self.sequence_size

    def layout(self) -> RankLayout:
        """Of all ranks. Collective.

        Raises:
            UsageError: Their number does not fit.
        """
        return RankLayout.find(self.tensor_size, self.sequence_size)

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
            NotImplementedError: There is no plan, sequences cannot be divided, or the optimizer's
                update of a part is not a part of its update; likewise.
        """
        sequences, layers = None, None
        if layout.sequence:
            sequences = SequenceParallel(model, layout.sequence, tensor_size=self.tensor_size)
        if layout.tensor:
            _check_updates(optimizers, layout.tensor, state_format)
            plan = find_plan(model, self.tensor_size, self.plan)
            layers = TensorParallel(model, plan, layout.tensor, divide_loss=self.loss)
            layers.apply()
        return Divided(layers=layers, sequences=sequences)


def _check_updates(
    optimizers: Sequence[Optimizer], ranks: TensorRanks, state_format: StateFormat
) -> None:
    if state_format == "split_int8":
        raise NotImplementedError(
            f"optim_state_format='split_int8' keeps moments in blocks that tp_size={ranks.size} "
            "ranks would cut; give 'split' or 'split_bf16'"
        )
    for optimizer in optimizers:
        if rule_of(optimizer) is None:
            raise NotImplementedError(
                f"with tp_size={ranks.size} a {type(optimizer).__name__} would step parts of "
                "matrices as if they were whole; use Adam, AdamW or HybridAdam, which step "
                "elements"
            )
        if optimizer.state:
            raise UsageError(
                f"the {type(optimizer).__name__} has states of whole parameters, which tp_size="
                f"{ranks.size} ranks are about to divide; boost it before its first step, and "
                "load a checkpoint afterwards"
            )
