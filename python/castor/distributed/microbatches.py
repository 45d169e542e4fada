"""Batches in parts that follow each other, whoever runs them."""

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
"""(the model's outputs, the micro-batch) -> loss, a scalar"""


NO_LOSS = (
    "there is no loss: give labels with the batch, or a criterion(outputs, batch) to "
    "booster.execute_pipeline"
)


_INPUTS = ("input_ids", "inputs_embeds", "pixel_values")
"""Arguments of a model, one of which has the rows that a batch is divided by."""
_ITEMS = "num_items_in_batch"


@dataclass(frozen=True, kw_only=True)
class Microbatches:
    """Into how many a batch is divided, or how many rows one has; the other one is None."""

    count: int | None
    size: int | None

    def of(self, batch: Mapping[str, Any], device: torch.device) -> list[dict[str, Any]]:
        """Divides the rows of a batch. Tensors of another first dimension go to each as they are.

        A micro-batch's num_items_in_batch is its share of the batch's, since the mean of the
        micro-batches' losses is taken.

        Args:
            batch: Tensors by name, and what else there is.
            device: Tensors come there.

        Raises:
            UsageError: There are no rows, or they cannot be divided evenly.
        """
        tensors = {
            name: x for name, x in batch.items() if isinstance(x, torch.Tensor) and x.ndim > 0
        }
        if not tensors:
            raise UsageError("the batch holds no tensor, so nothing can be divided")
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
        parts = [dict(brought) for _ in range(count)]
        for name, value in brought.items():
            if isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == rows:
                for part, own in zip(parts, value.chunk(count), strict=True):
                    part[name] = own
        return parts


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The work on a batch."""

    criterion: Criterion | None
    """Computes the loss; None: the model does, of its labels."""
    scale: float
    """Factor of losses before backward."""
    loss: bool
    """Whether all ranks learn the loss."""
    outputs: bool
    """Whether the last stage's ranks keep what the model returns."""

    @property
    def needs_loss(self) -> bool:
        """Backward does as well."""
        return self.loss or torch.is_grad_enabled()

    def loss_of(self, outputs: Any, part: Mapping[str, Any]) -> torch.Tensor:
        """Computes the loss of a micro-batch.

        Raises:
            UsageError: There is neither a criterion nor a loss of the model's, or it has no
                gradient.
            TypeError: It is no scalar.
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
    """The results of a run of the schedule."""

    loss: torch.Tensor | None
    """The mean over the micro-batches, on every rank; None: nobody asked for it."""
    outputs: list[Any] | None
    """The model's, of each micro-batch, on ranks with the last stage; None: nobody asked."""


class Schedule(Protocol):
    """Runs the micro-batches of a boosted model."""

    def start(self) -> None:
        """After boost: schedule_of finds it."""
        ...

    def run(self, batch: Any, asked: Asked) -> Pass:
        """All micro-batches of a batch, and back if there are gradients; see PipelineSchedule."""
        ...


class Accumulation:
    """The schedule of a model that is one stage: micro-batches one after the other."""

    def __init__(
        self,
        model: nn.Module,
        microbatches: Microbatches,
        *divided: GivesLogits | None,
    ) -> None:
        """Nothing is run.

        Args:
            model: Boosted.
            microbatches: How batches are divided.
            divided: See giving_logits.
        """
        self._model = weakref.ref(model)
        self._microbatches = microbatches
        self._divided = divided

    def start(self) -> None:
        """See Schedule."""
        put_schedule(self._model(), self)

    def run(self, batch: Any, asked: Asked) -> Pass:
        """See PipelineSchedule."""
        model = self._model()
        assert model is not None
        (engine,) = engines_holding(model)
        parts = self._microbatches.of(named(batch), engine.device)
        losses, kept = [], []
        for part in parts:
            with giving_logits(asked, *self._divided):
                outputs = model(**part)
            if asked.outputs:
                kept.append(outputs)
            if asked.needs_loss:
                loss = asked.loss_of(outputs, part)
                losses.append(loss.item())
                if torch.is_grad_enabled():
                    (loss / len(parts) * asked.scale).backward()
        mean = sum(one / len(parts) for one in losses)
        return Pass(
            loss=torch.tensor(mean) if asked.loss else None,
            outputs=kept if asked.outputs else None,
        )


class GivesLogits(Protocol):
    """Leaves out logits where a model computes its loss, unless a criterion needs them."""

    gives_logits: bool
    """Whether it gives them nevertheless."""


@contextmanager
def giving_logits(asked: Asked, *divided: GivesLogits | None) -> Iterator[None]:
    """In it a model gives a criterion all logits, of all tokens and of the full vocabulary.

    Args:
        asked: Whether there is a criterion.
        divided: What would leave some out; None: nothing.
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
    """The batch, which has to be a mapping.

    Raises:
        TypeError: It is none.
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
    """From now on schedule_of finds it."""
    assert model is not None
    _schedules[model] = schedule


def schedule_of(model: nn.Module) -> Schedule:
    """Returns the schedule of a boosted model.

    Raises:
        UsageError: There is none.
    """
    found = _schedules.get(model) or _schedules.get(beneath_adapters(model))
    if found is None:
        raise UsageError(
            f"nothing says how batches of this {type(model).__name__} are divided: boost it with "
            "HybridParallelPlugin(num_microbatches=..., pp_size=...), or call it as ever"
        )
    return found
