"""What every way to train is to Booster."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

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


def check_one_optimizer(optimizer: Any) -> None:
    """Takes one optimizer, or None.

    Raises:
        NotImplementedError: There are several.
        TypeError: It is something else.
    """
    if isinstance(optimizer, list | tuple):
        names = ", ".join(type(one).__name__ for one in optimizer)
        raise NotImplementedError(
            f"castor steps one optimizer a model, and was given {len(optimizer)} ({names}): give "
            "one with param_groups, or boost with one and step the others, over the parameters "
            "that it does not hold, yourself"
        )
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}; give a torch Optimizer")
