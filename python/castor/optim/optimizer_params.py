"""Finds the parameters of a model that its optimizers update."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from castor.errors import UsageError
from castor.runtime.rules import FusedRule

_NAMED = 3
"""Number of parameters that a warning names."""


def optimizer_params(
    model: nn.Module, optimizers: Sequence[Optimizer], rules: Sequence[FusedRule | None]
) -> dict[torch.Tensor, bool]:
    """Maps the parameters of optimizers to whether a rule updates them; warns of other parameters.

    Raises:
        UsageError: An optimizer holds parameters that the model lacks, or two hold the same one.
    """
    names = {param: name for name, param in model.named_parameters()}
    held: dict[torch.Tensor, bool] = {}
    holder: dict[torch.Tensor, Optimizer] = {}
    foreign: list[tuple[int, ...]] = []
    for optimizer, rule in zip(optimizers, rules, strict=True):
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            if param not in names:
                foreign.append(tuple(param.shape))
            elif holder.setdefault(param, optimizer) is not optimizer:
                raise UsageError(
                    f"two optimizers hold parameter '{names[param]}'; give it to one of them"
                )
            held[param] = rule is not None
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
        subject = "the optimizer does" if len(optimizers) == 1 else "the optimizers do"
        warnings.warn(
            f"{subject} not hold {len(missing)} parameters that require a gradient "
            f"({listed}): as in plain PyTorch they get gradients, which model.zero_grad() clears, "
            "and no update. Add them to it, or freeze them with requires_grad_(False), which saves "
            "the gradients",
            stacklevel=4,  # past configure and boost
        )
    return held
