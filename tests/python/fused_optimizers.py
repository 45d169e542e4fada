"""Optimizers that run fused besides Adam, and models boosted with them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from castor.optim import Lion
from helpers import Boosted, boost
from zoo import tower

Make = Callable[[Any], Optimizer]
MAKERS: dict[str, Make] = {
    "plain": lambda params: SGD(params, lr=0.1),
    "decay": lambda params: SGD(params, lr=0.1, weight_decay=0.03),
    "momentum": lambda params: SGD(params, lr=0.1, momentum=0.9),
    "dampening": lambda params: SGD(params, lr=0.1, momentum=0.7, dampening=0.3, weight_decay=0.01),
    "nesterov": lambda params: SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "maximize": lambda params: SGD(params, lr=1e-3, momentum=0.9, maximize=True, weight_decay=0.01),
    "lion": lambda params: Lion(params, lr=1e-3, weight_decay=0.1),
}


def boosted_with(make: Make, model: nn.Module | None = None, **settings: Any) -> Boosted:
    model = tower() if model is None else model
    return boost(model, optimizer=make(model.parameters()), **settings)


def states_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Whole ones, in the parameters' order."""
    state = optimizer.state_dict()["state"]
    return [value.clone() for i in sorted(state) for _, value in sorted(state[i].items())]
