"""Finds the update rule that runs an optimizer on chunks (castor.runtime.rules has them)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from castor.optim.hybrid_adam import HybridAdam
from castor.optim.lion import Lion
from castor.optim.own_step import patched_step_of
from castor.runtime.rules import RULES, TENSORS, FusedRule

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
