"""The history of training steps: loss, time, tokens, bytes."""

from __future__ import annotations

import inspect
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from castor.runtime.hooks import ModuleHook

MAX_RECORDS = 10_000
RECENT_RECORDS = 2_000
_MAX_UNREAD = 256


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """Figures of one optimizer step."""

    step: int
    """Number of the step, from 1."""
    loss: float | None
    """Sum of the losses given to booster.backward. Without those, the mean of the losses that the
    forward passes returned. None if neither is known."""
    seconds: float | None
    """Time from the first forward of the step to the end of its update. None without a forward of
    the boosted module itself."""
    samples: int
    """Number of rows of the inputs of all forward passes."""
    tokens: int
    """Number of elements of `input_ids`; 0 where the model takes none."""
    skipped: bool
    """Whether the update was left out because a gradient was not finite."""
    learning_rate: float | None
    """Learning rate of the optimizer's first group; None where it has no "lr"."""
    gradient_norm: float | None
    """L2 norm of all gradients before max_norm clips them; None where nothing needs it (max_norm=0
    and nonfinite="ignore")."""
    peak_device_bytes: int
    h2d_bytes: int
    d2h_bytes: int


@dataclass(frozen=True, kw_only=True)
class HistoryTotals:
    """Sums over all steps, those without a record included."""

    steps: int = 0
    skipped_steps: int = 0
    tokens: int = 0
    samples: int = 0
    seconds: float = 0.0
    """Sum of the step times that are known."""


class StepHistory:
    """The history of one boosted model's steps.

    Losses on the CPU are read at once, which keeps no memory of the step alive. Losses on a GPU are
    copied to one tensor there. They are read when `records` is, or when 256 have gathered, so that
    no step waits for the device. Beyond `MAX_RECORDS` records, all but the last `RECENT_RECORDS`
    are thinned out evenly: memory is bounded, and the whole run stays visible.
    """

    def __init__(self) -> None:
        self.totals = HistoryTotals()
        self._records: list[StepRecord] = []
        self._stride = 1
        self._unread: list[int] = []
        self._unread_losses: torch.Tensor | None = None
        self._started: float | None = None
        self._samples = 0
        self._tokens = 0
        self._given: list[float | torch.Tensor] = []
        self._returned: list[float | torch.Tensor] = []
        self._h2d_bytes = 0
        self._d2h_bytes = 0

    @property
    def records(self) -> list[StepRecord]:
        """Records of the steps so far, oldest first; reads losses that are still on the device."""
        self._read()
        return list(self._records)

    def watch(self, model: nn.Module) -> None:
        """Hooks `model`: one Python call before and one after each of its forward passes."""
        owner = weakref.ref(model)
        first_argument = next(iter(inspect.signature(model.forward).parameters), "")

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if module is owner() and torch.is_grad_enabled():
                named = {first_argument: args[0]} if args else {}
                self._forward_begins({**named, **kwargs})

        def after(module: nn.Module, _: Any, output: Any) -> None:
            if module is owner() and torch.is_grad_enabled():
                loss = _loss_of(output)
                if loss is not None:
                    self._returned.append(_reading(loss))

        model.register_forward_pre_hook(ModuleHook(before), with_kwargs=True)
        model.register_forward_hook(ModuleHook(after))

    def loss_given(self, loss: torch.Tensor) -> None:
        """Notes the loss that a backward pass is about to differentiate, unscaled."""
        if _is_loss(loss):
            self._given.append(_reading(loss))

    def step_ended(
        self,
        figures: tuple[int, int, int],
        *,
        skipped: bool,
        learning_rate: float | None,
        gradient_norm: float | None,
    ) -> None:
        """Adds the record of a step that has ended.

        Args:
            figures: Peak device bytes of the step, and the bytes copied to and from the device
                since boost.
            skipped: Whether the update was left out.
            learning_rate: See StepRecord.
            gradient_norm: See StepRecord.
        """
        peak_device_bytes, h2d_bytes, d2h_bytes = figures
        seconds = None if self._started is None else time.perf_counter() - self._started
        losses = self._given or [value / len(self._returned) for value in self._returned]
        loss = sum(losses[1:], start=losses[0]) if losses else None
        self.totals = HistoryTotals(
            steps=self.totals.steps + 1,
            skipped_steps=self.totals.skipped_steps + skipped,
            tokens=self.totals.tokens + self._tokens,
            samples=self.totals.samples + self._samples,
            seconds=self.totals.seconds + (seconds or 0.0),
        )
        step = self.totals.steps
        if isinstance(loss, torch.Tensor):
            self._keep(step, loss)
            loss = None
        self._records.append(
            StepRecord(
                step=step,
                loss=loss,
                seconds=seconds,
                samples=self._samples,
                tokens=self._tokens,
                skipped=skipped,
                learning_rate=learning_rate,
                gradient_norm=gradient_norm,
                peak_device_bytes=peak_device_bytes,
                h2d_bytes=h2d_bytes - self._h2d_bytes,
                d2h_bytes=d2h_bytes - self._d2h_bytes,
            )
        )
        self._h2d_bytes, self._d2h_bytes = h2d_bytes, d2h_bytes
        self._started, self._samples, self._tokens = None, 0, 0
        self._given, self._returned = [], []
        if len(self._unread) >= _MAX_UNREAD:
            self._read()
        if len(self._records) > MAX_RECORDS:
            self._thin_out()

    def _thin_out(self) -> None:
        """Keeps every n-th older record; doubles n until these fill at most half of their room."""
        older, recent = self._records[:-RECENT_RECORDS], self._records[-RECENT_RECORDS:]
        room = (MAX_RECORDS - RECENT_RECORDS) // 2
        while len(older) > room:
            self._stride *= 2
            older = [record for record in older if (record.step - 1) % self._stride == 0]
        self._records = older + recent

    def _forward_begins(self, inputs: Mapping[str, Any]) -> None:
        """Counts the rows and tokens of a forward's inputs, and starts the step's clock.

        Args:
            inputs: First positional argument and all keyword arguments, by name.
        """
        if self._started is None:
            self._started = time.perf_counter()
        ids = inputs.get("input_ids")
        if isinstance(ids, torch.Tensor) and not ids.is_floating_point():
            self._tokens += ids.numel()
        for value in (ids, *inputs.values()):
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                self._samples += value.shape[0]
                break

    def _keep(self, step: int, loss: torch.Tensor) -> None:
        losses = self._unread_losses
        if losses is None or losses.device != loss.device:
            self._read()
            with torch.inference_mode(False):
                losses = torch.empty(_MAX_UNREAD, device=loss.device)
        losses[len(self._unread)].copy_(loss)
        self._unread_losses = losses
        self._unread.append(step)

    def _read(self) -> None:
        if self._unread:
            assert self._unread_losses is not None
            values = self._unread_losses[: len(self._unread)].tolist()
            losses = dict(zip(self._unread, values, strict=True))
            self._unread = []
            self._records = [
                replace(record, loss=losses[record.step]) if record.step in losses else record
                for record in self._records
            ]


def _loss_of(output: Any) -> torch.Tensor | None:
    """Returns the loss in a model's output: the output itself, its `loss`, or its first element."""
    candidate = output
    if isinstance(output, Mapping):
        candidate = output.get("loss")
    elif isinstance(output, tuple):
        candidate = getattr(output, "loss", output[0] if output else None)
    elif not isinstance(output, torch.Tensor):
        candidate = getattr(output, "loss", None)
    return candidate if _is_loss(candidate) else None


def _is_loss(value: Any) -> bool:
    return (
        type(value) is torch.Tensor
        and value.numel() == 1
        and value.is_floating_point()
        and not value.is_meta
        and not torch._C._functorch.is_functorch_wrapped_tensor(value)
    )


def _reading(loss: torch.Tensor) -> float | torch.Tensor:
    return loss.item() if loss.device.type == "cpu" else loss.detach().reshape(())
