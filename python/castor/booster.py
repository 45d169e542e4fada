"""The one object a training script talks to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from castor.errors import UsageError
from castor.optim.boosted import StepDriver
from castor.plugins.gemini import GeminiPlugin
from castor.runtime.engine import Engine, engine_of
from castor.runtime.report import MemoryReport, MemoryUse

Model = TypeVar("Model", bound=nn.Module)


class Booster:
    """Boosts models with one plugin; the forward, the loss and the loop stay the user's own.

    Args:
        plugin: How to train.

    Raises:
        TypeError: `plugin` is not a plugin.
    """

    def __init__(self, plugin: GeminiPlugin) -> None:
        if not isinstance(plugin, GeminiPlugin):
            raise TypeError(f"plugin is a {type(plugin).__name__}; give a GeminiPlugin")
        self.plugin = plugin
        self._latest: Engine | None = None

    def boost(
        self,
        model: Model,
        optimizer: Optimizer | None = None,
        criterion: Any = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
    ) -> tuple[Model, Any, Any, Any, Any]:
        """Prepares a training run, in place: every object returned is the one given.

        Args:
            model: Any module on the CPU.
            optimizer: An optimizer over the model's trainable parameters. Adam, AdamW and
                HybridAdam run fused on the chunks; others run their own step on the host copies
                (float32 only).
            criterion: Returned as it is.
            dataloader: Returned as it is.
            lr_scheduler: Returned as it is; it may have been made before.

        Returns:
            (model, optimizer, criterion, dataloader, lr_scheduler), None for what was not given.

        Raises:
            UsageError: See GeminiPlugin.configure.
            OutOfMemoryError: A budget is too small; nothing was changed.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is a {type(model).__name__}; give a torch.nn.Module")
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer is a {type(optimizer).__name__}; give a torch Optimizer")
        self._latest, _ = self.plugin.configure(model, optimizer)
        return model, optimizer, criterion, dataloader, lr_scheduler

    def backward(self, loss: torch.Tensor, optimizer: Optimizer | None = None) -> None:
        """Runs backward; in fp16 with the loss scaled, otherwise as `loss.backward()` does.

        Args:
            loss: Scalar tensor.
            optimizer: A boosted optimizer; needed for fp16.

        Raises:
            UsageError: `optimizer` is not boosted, or fp16 has none.
        """
        driver = getattr(optimizer, "_castor", None)
        if optimizer is not None and not isinstance(driver, StepDriver):
            raise UsageError("booster.backward was given an optimizer that is not boosted")
        if driver is None:
            if self.plugin.config.precision == "fp16":
                raise UsageError(
                    "fp16 needs the loss scale: call booster.backward(loss, optimizer)"
                )
            loss.backward()
            return
        session = driver.engine.session
        driver.engine.history.loss_given(loss)
        session.set_loss_scale(driver.loss_scale)
        try:
            (loss * driver.loss_scale if driver.scaler else loss).backward()
        finally:
            session.set_loss_scale(1.0)

    @contextmanager
    def no_sync(self, model: nn.Module, optimizer: Optimizer | None = None) -> Iterator[None]:
        """Accumulates gradients without synchronising ranks; with one process, plain backward."""
        engine_of(model)
        yield

    def report(self, model: nn.Module | None = None) -> MemoryReport:
        """What memory did since boost.

        Args:
            model: A boosted model; by default the one boosted last.

        Raises:
            UsageError: Nothing has been boosted.
        """
        return self._engine(model).report()

    def memory(self, model: nn.Module | None = None) -> MemoryUse:
        """What device and host hold at this moment.

        Args:
            model: A boosted model; by default the one boosted last.

        Raises:
            UsageError: Nothing has been boosted.
        """
        return MemoryUse(**self._engine(model).session.memory())

    def save_trace(self, path: str | Path, model: nn.Module) -> None:
        """Writes the trace of the model's step as JSON, for GeminiPlugin(trace_file=...).

        Raises:
            UsageError: The model is not boosted, or has not finished a step.
        """
        engine_of(model).save_trace(Path(path), model)

    def _engine(self, model: nn.Module | None) -> Engine:
        if model is not None:
            return engine_of(model)
        if self._latest is None:
            raise UsageError("nothing has been boosted yet")
        return self._latest
