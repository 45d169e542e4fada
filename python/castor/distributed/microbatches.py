"""Micro-batches of a batch, and the schedules that run them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from castor.distributed.adapters import beneath_adapters
from castor.errors import UsageError
from castor.runtime.engine import engines_holding

Criterion = Callable[[Any, Mapping[str, Any]], torch.Tensor]
"""A loss function: (the model's outputs, the micro-batch) -> loss, a scalar."""


NO_LOSS = (
    "there is no loss: give labels with the batch, or a criterion(outputs, batch) to "
    "booster.execute_pipeline"
)


_INPUTS = ("input_ids", "inputs_embeds", "pixel_values")
"""Arguments of a model; the first that is there says how many rows the batch has."""
_ITEMS = "num_items_in_batch"


@dataclass(frozen=True, kw_only=True)
class Microbatches:
    """The division of batches into micro-batches, by `count` or by `size`; the other is None."""

    count: int | None
    """Number of micro-batches of a batch."""
    size: int | None
    """Number of rows of a micro-batch."""

    def of(self, batch: Mapping[str, Any], device: torch.device) -> list[dict[str, Any]]:
        """Splits a batch into micro-batches by rows.

        Tensors whose first dimension is not the number of rows go to each micro-batch unchanged. A
        micro-batch's num_items_in_batch is its share of the batch's, since the mean of the
        micro-batches' losses is taken.

        Args:
            batch: Tensors and other values, by name.
            device: Device that tensors are moved to.

        Raises:
            UsageError: The batch has no tensor or no rows, or rows cannot be divided evenly.
        """
        tensors = {
            name: x for name, x in batch.items() if isinstance(x, torch.Tensor) and x.ndim > 0
        }
        if not tensors:
            raise UsageError("the batch holds no tensor, so there is nothing to split")
        inputs = next((name for name in _INPUTS if name in tensors), next(iter(tensors)))
        rows = len(tensors[inputs])
        count = rows // self.size if self.size else self.count
        asked = f"microbatch_size={self.size}" if self.size else f"num_microbatches={self.count}"
        if not (rows and count) or rows % count or (self.size and rows % self.size):
            raise UsageError(
                f"a batch of {rows} rows cannot be divided evenly by {asked}; give another batch "
                "size (drop_last=True leaves a smaller last batch out)"
            )
        brought = {
            name: value.to(device) if isinstance(value, torch.Tensor) else value
            for name, value in batch.items()
        }
        if brought.get(_ITEMS) is not None:
            brought[_ITEMS] = brought[_ITEMS] / count
        microbatches = [dict(brought) for _ in range(count)]
        for name, value in brought.items():
            if isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == rows:
                for part, own in zip(microbatches, value.chunk(count), strict=True):
                    part[name] = own
        return microbatches


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Options of one run of a batch."""

    criterion: Criterion | None
    """Computes the loss; None: the model computes it from labels."""
    scale: float
    """Factor of the losses before backward (the loss scale)."""
    loss: bool
    """Whether all ranks get the loss."""
    outputs: bool
    """Whether ranks with the last stage return the model's outputs."""

    @property
    def needs_loss(self) -> bool:
        """Whether the loss is computed: it was asked for, or backward needs it."""
        return self.loss or torch.is_grad_enabled()

    def loss_of(self, outputs: Any, part: Mapping[str, Any]) -> torch.Tensor:
        """Computes the loss of a micro-batch.

        Raises:
            UsageError: There is neither a criterion nor a loss of the model, or the loss has no
                gradient.
            TypeError: The loss is no scalar.
        """
        given: Any = getattr(outputs, "loss", None)
        if self.criterion:
            given = self.criterion(outputs, part)
        elif given is None:
            raise UsageError(NO_LOSS)
        is_tensor = isinstance(given, torch.Tensor)
        if not is_tensor or given.numel() != 1:
            who = "the criterion" if self.criterion else "the model"
            what = f"of shape {tuple(given.shape)}" if is_tensor else type(given).__name__
            raise TypeError(f"{who} gave a loss {what}; let it give a tensor with one element")
        loss: torch.Tensor = given
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise UsageError(
                "the loss has no gradient: compute it of the outputs, without detach() and item(), "
                "or evaluate under torch.no_grad()"
            )
        return loss


@dataclass(frozen=True, kw_only=True)
class Pass:
    """The results of one run of a schedule."""

    loss: torch.Tensor | None
    """Mean loss over the micro-batches, on every rank; None: it was not asked for."""
    outputs: list[Any] | None
    """The model's outputs for each micro-batch, on ranks with the last stage; None: they were not
    asked for, or another rank has them."""


class Schedule(Protocol):
    """Runs the micro-batches of a boosted model."""

    def start(self) -> None:
        """Has schedule_of find this schedule, after boost."""
        ...

    def run(self, batch: Any, asked: Asked) -> Pass:
        """Runs all micro-batches, and backward too with gradients; see PipelineSchedule."""
        ...


class Accumulation:
    """The schedule of a model with one stage: runs micro-batches one after the other."""

    def __init__(
        self,
        model: nn.Module,
        microbatches: Microbatches,
        *divided: GivesLogits | None,
    ) -> None:
        """Prepares the schedule; runs nothing.

        Args:
            model: The boosted model.
            microbatches: Division of batches into micro-batches.
            divided: Losses that leave out logits; see giving_logits.
        """
        self._model = weakref.ref(model)
        self._microbatches = microbatches
        self._divided = divided

    def start(self) -> None:
        """Has schedule_of find this schedule, after boost."""
        put_schedule(self._model(), self)

    def run(self, batch: Any, asked: Asked) -> Pass:
        """Runs all micro-batches, and backward too with gradients; see PipelineSchedule.run."""
        model = self._model()
        assert model is not None
        (engine,) = engines_holding(model)
        microbatches = self._microbatches.of(named(batch), engine.device)
        losses, kept = [], []
        for part in microbatches:
            with giving_logits(asked, *self._divided):
                outputs = model(**part)
            if asked.outputs:
                kept.append(outputs)
            if asked.needs_loss:
                loss = asked.loss_of(outputs, part)
                losses.append(loss.item())
                if torch.is_grad_enabled():
                    (loss / len(microbatches) * asked.scale).backward()
        mean = sum(one / len(microbatches) for one in losses)
        return Pass(
            loss=torch.tensor(mean) if asked.loss else None,
            outputs=kept if asked.outputs else None,
        )


class GivesLogits(Protocol):
    """Leaves out logits if the model computes its loss, unless a criterion needs them."""

    gives_logits: bool
    """Whether forwards give full logits all the same."""


@contextmanager
def giving_logits(asked: Asked, *divided: GivesLogits | None) -> Iterator[None]:
    """Has the model give logits of all tokens and the full vocabulary, if there is a criterion.

    Args:
        asked: Options of the run, with or without a criterion.
        divided: Objects that would leave out logits; None is skipped.
    """
    those = [one for one in divided if one is not None]
    for one in those:
        one.gives_logits = asked.criterion is not None
    try:
        yield
    finally:
        for one in those:
            one.gives_logits = False


def named(batch: Any) -> Mapping[str, Any]:
    """Returns the batch, after a check that it is a mapping.

    Raises:
        TypeError: The batch is no mapping.
    """
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"the batch is a {type(batch).__name__}; give the model's arguments by name, as a dict "
            "of tensors"
        )
    return batch


_schedules: weakref.WeakKeyDictionary[nn.Module, Schedule] = weakref.WeakKeyDictionary()
"""Schedules of boosted models."""


def put_schedule(model: nn.Module | None, schedule: Schedule) -> None:
    """Has schedule_of find the schedule of a model."""
    assert model is not None
    _schedules[model] = schedule


def schedule_of(model: nn.Module) -> Schedule:
    """Returns the schedule of a boosted model.

    Raises:
        UsageError: The model has no schedule.
    """
    found = _schedules.get(model) or _schedules.get(beneath_adapters(model))
    if found is None:
        raise UsageError(
            f"nothing says how batches of this {type(model).__name__} are split: boost it with "
            "HybridParallelPlugin(num_microbatches=..., pp_size=...), or call it as ever"
        )
    return found
