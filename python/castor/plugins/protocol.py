"""What every way to train is to Booster."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import nn
from torch.optim import Optimizer

from castor.optim.boosted import StepDriver
from castor.runtime.engine import Engine


@runtime_checkable
class Plugin(Protocol):
    """Sets models and their optimizers up for one way to train.

    It turns its own arguments into EngineSettings: the runtime knows no plugin. Models are saved
    and loaded through their engines, whichever plugin made them.
    """

    @property
    def scales_loss(self) -> bool:
        """Whether backward multiplies the loss, and so has to be given the optimizer."""
        ...

    def configure(
        self, model: nn.Module, optimizer: Optimizer | None
    ) -> tuple[Engine, StepDriver | None]:
        """Takes model and optimizer over, in place.

        Returns:
            The model's engine, and what steps the optimizer; None without one.
        """
        ...
