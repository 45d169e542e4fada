"""Which parameters of a model an optimizer updates."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.optim import Optimizer

from castor.errors import UsageError

_NAMED = 3
"""Parameters that a warning names, of many."""


def held_params(model: nn.Module, optimizer: Optimizer) -> set[torch.Tensor]:
    """What the optimizer updates; warns of what it does not.

    Raises:
        UsageError: It holds parameters that the model lacks.
    """
    names = {param: name for name, param in model.named_parameters()}
    held = {param for group in optimizer.param_groups for param in group["params"]}
    foreign = [tuple(param.shape) for param in held if param not in names]
    if foreign:
        raise UsageError(
            f"the optimizer holds {len(foreign)} parameters that the model lacks, the first of "
            f"shape {foreign[0]}; build the optimizer from this model's parameters()"
        )
    missing = [
        f"'{name}'" for param, name in names.items() if param.requires_grad and param not in held
    ]
    if missing:  # before anything is changed: warnings may be errors
        listed = ", ".join(missing[:_NAMED]) + (", ..." if len(missing) > _NAMED else "")
        warnings.warn(
            f"the optimizer does not hold {len(missing)} parameters that require a gradient "
            f"({listed}): as in plain PyTorch they get gradients, which model.zero_grad() clears, "
            "and no update. Add them to it, or freeze them with requires_grad_(False), which saves "
            "the gradients",
            stacklevel=4,  # past configure and boost
        )
    return held
