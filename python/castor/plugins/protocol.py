"""The interface of all plugins to Booster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import nn
from torch.optim import Optimizer

from castor.runtime.boosted_model import BoostedModel


@runtime_checkable
class Plugin(Protocol):
    """Sets models and their optimizers up for one way to train.

    It turns its own arguments into EngineSettings, or has torch's own classes train: the runtime
    knows no plugin. Booster and checkpoints ask what configure has left, whichever plugin made it.
    """

    @property
    def scales_loss(self) -> bool:
        """Whether backward multiplies the loss, and so has to be given the optimizer."""
        ...

    def configure(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> BoostedModel:
        """Takes a model and the optimizers over it, of which there may be none, in place."""
        ...


def list_of_optimizers(given: Any) -> list[Optimizer]:
    """Returns the optimizers that boost was given as a list: none, one or several.

    Raises:
        TypeError: It is something else.
    """
    optimizers = list(given) if isinstance(given, list | tuple) else [given]
    if given is None:
        return []
    for one in optimizers:
        if not isinstance(one, Optimizer):
            raise TypeError(f"optimizer is a {type(one).__name__}; give a torch Optimizer")
    return optimizers
