"""Checks of optimizers before they are boosted: parameters, settings, and the update rule."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from castor.config import GeminiConfig
from castor.errors import UsageError
from castor.optim.boosted import boosted_class
from castor.optim.hybrid_adam import HybridAdam
from castor.optim.lion import Lion
from castor.optim.own_step import patched_step_of
from castor.runtime.rules import CLASSES, RULES, TENSORS, FusedRule, params_of

# --- Finds the parameters of a model that its optimizers update -----------------------------------

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
        for param in params_of(optimizer):
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


# --- Finds the update rule that runs an optimizer on chunks (castor.runtime.rules has them) -------

_OWN: dict[str, type[Optimizer]] = {"HybridAdam": HybridAdam, "Lion": Lion}


def rules_of(optimizers: Sequence[Optimizer]) -> list[FusedRule | None]:
    """Returns the rule that runs each optimizer of one model; None where it runs its own step.

    The chunks of a model have one rule: the one that computes most of the optimizers exactly, and
    of several such rules the first.
    """
    rule = max(RULES, key=lambda rule: sum(_computes(rule, one) for one in optimizers))
    return [rule if _computes(rule, optimizer) else None for optimizer in optimizers]


def _is_of(rule: FusedRule, optimizer: Optimizer) -> bool:
    """Whether an optimizer's class is one of the rule's; subclasses are not, as they may differ."""
    name = type(optimizer).__name__
    return name in rule.classes and type(optimizer) is (
        _OWN.get(name) or getattr(torch.optim, name)
    )


def _computes(rule: FusedRule, optimizer: Optimizer) -> bool:
    if not _is_of(rule, optimizer) or not rule.takes(optimizer.param_groups):
        return False
    if patched_step_of(optimizer) is not None:
        return False  # it may compute something else
    # States of steps before boost are kept.
    held = {
        entry
        for state in optimizer.state.values()
        if isinstance(state, dict)  # other entries belong to no parameter
        for entry in state
    }
    return held & TENSORS <= rule.known


# --- Checks whether optimizers can be boosted with the settings -----------------------------------


def check_optimizers(
    optimizers: Sequence[Optimizer], rules: Sequence[FusedRule | None], config: GeminiConfig
) -> None:
    """Checks that the optimizers of a model can be boosted, before anything is changed.

    Raises:
        NotImplementedError: A setting does not go with several optimizers, or with an optimizer
            that runs its own step.
        UsageError: An optimizer is boosted already.
    """
    for optimizer, rule in zip(optimizers, rules, strict=True):
        _check_optimizer(optimizer, rule, config)
    if len(optimizers) < 2:
        return
    names = ", ".join(type(one).__name__ for one in optimizers)
    if config.overlap != "none":
        raise NotImplementedError(
            f"overlap={config.overlap!r} updates chunks beside what follows one optimizer's step, "
            f"and boost was given {len(optimizers)} ({names}): pass overlap='none'"
        )
    if config.nvme_paths:
        raise NotImplementedError(
            f"the NVMe tier holds the states of one optimizer, and boost was given "
            f"{len(optimizers)} ({names}): leave nvme_path out"
        )


def _check_optimizer(optimizer: Optimizer, rule: FusedRule | None, config: GeminiConfig) -> None:
    name = type(optimizer).__name__
    if hasattr(optimizer, "_castor"):
        raise UsageError(f"this {name} is boosted already; use what boost returned")
    boosted_class(type(optimizer))
    if rule is not None:
        return
    if isinstance(optimizer, torch.optim.LBFGS) and config.precision == "fp16":
        raise NotImplementedError(
            "LBFGS evaluates its closure inside step, where a step whose gradients overflow in "
            "fp16 cannot be skipped: use precision='bf16' or 'fp32'"
        )
    instead = f"{', '.join(CLASSES[:-1])} or {CLASSES[-1]} ({_WITHOUT})"
    generic = f"{name} with these options runs its own step"
    if patched_step_of(optimizer) is not None:
        generic = f"{name}.step was replaced on this object before boost, and runs as it is"
    if config.device_update_fraction:
        raise NotImplementedError(
            f"device_update_fraction={config.device_update_fraction!r} shares the updates of a "
            f"fused optimizer with the GPU, and {generic}; leave it out, or use {instead}"
        )
    if config.overlap != "none":
        raise NotImplementedError(
            f"overlap={config.overlap!r} needs a step of castor's own, and {generic}; use "
            f"overlap='none', or {instead}"
        )
    if config.nvme_paths:
        raise NotImplementedError(
            f"the NVMe tier holds the states of castor's own steps, and {generic}; leave nvme_path "
            f"out, or use {instead}"
        )


_WITHOUT = "without amsgrad and differentiable, one kind a model"
"""Conditions under which the fused classes run fused."""
