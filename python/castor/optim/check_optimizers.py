"""Checks whether optimizers can be boosted with the settings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from castor.config import GeminiConfig
from castor.errors import UsageError
from castor.optim.boosted import boosted_class
from castor.optim.own_step import patched_step_of
from castor.runtime.rules import CLASSES, FusedRule


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
