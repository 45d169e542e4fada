"""Which optimizers can be boosted, with which settings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from castor.config import GeminiConfig
from castor.errors import UsageError
from castor.optim.rules import rule_of


def check_optimizers(optimizers: Sequence[Optimizer], config: GeminiConfig) -> None:
    """Raises before anything is changed if the optimizers of a model cannot be boosted.

    Raises:
        NotImplementedError: One needs the generic path, which is float32 only, or there are several
            with a setting that takes one.
        UsageError: One is boosted already.
    """
    for optimizer in optimizers:
        _check_optimizer(optimizer, config)
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


def _check_optimizer(optimizer: Optimizer, config: GeminiConfig) -> None:
    name = type(optimizer).__name__
    if hasattr(optimizer, "_castor"):
        raise UsageError(f"this {name} is boosted already; use what boost returned")
    generic = rule_of(optimizer) is None
    if generic and config.precision != "fp32":
        raise NotImplementedError(
            f"{name} with these options runs on castor's generic path, which has no "
            f"{config.precision} master weights; use precision='fp32', or Adam, AdamW or "
            "HybridAdam without amsgrad and maximize"
        )
    if generic and config.device != "cpu":
        raise NotImplementedError(
            f"{name} with these options runs on castor's generic path, on the host copies, which a "
            "GPU would read over the link; use device='cpu', or Adam, AdamW or HybridAdam without "
            "amsgrad and maximize"
        )
    if generic and config.overlap != "none":
        raise NotImplementedError(
            f"overlap={config.overlap!r} needs castor's Adam, and {name} with these options runs "
            "on the generic path; use overlap='none', or Adam, AdamW or HybridAdam without amsgrad "
            "and maximize"
        )
    if generic and config.nvme_paths:
        raise NotImplementedError(
            f"the NVMe tier holds the states of castor's Adam, and {name} with these options runs "
            "on the generic path; leave nvme_path out, or use Adam, AdamW or HybridAdam without "
            "amsgrad and maximize"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise NotImplementedError("LBFGS evaluates the model inside step; castor cannot run it")
