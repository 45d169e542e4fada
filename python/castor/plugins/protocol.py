"""The interface of all plugins to Booster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import nn
from torch.optim import Optimizer

from castor.runtime.boosted_model import BoostedModel


@runtime_checkable
class Plugin(Protocol):
    """One way to train, for which it sets up models and their optimizers.

    A plugin turns its own arguments into EngineSettings, or has torch's own classes train; the
    runtime knows no plugin. Booster and checkpoints use the BoostedModel that configure returns,
    whichever plugin made it.
    """

    @property
    def scales_loss(self) -> bool:
        """Whether backward scales the loss, and so needs the optimizer."""
        ...

    def configure(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> BoostedModel:
        """Takes over a model and its optimizers, if any, in place."""
        ...


def list_of_optimizers(given: Any) -> list[Optimizer]:
    """Returns the optimizers that boost was given, as a list: none, one or several.

    Raises:
        TypeError: The argument is no optimizer and no list of optimizers.
    """
    optimizers = list(given) if isinstance(given, list | tuple) else [given]
    if given is None:
        return []
    for one in optimizers:
        if not isinstance(one, Optimizer):
            raise TypeError(f"optimizer is a {type(one).__name__}; give a torch Optimizer")
    return optimizers
