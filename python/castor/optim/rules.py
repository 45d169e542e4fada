"""Which optimizers run fused on chunks: each is an update rule of csrc/optim."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch.optim import Adam, AdamW, Optimizer

from castor.optim.hybrid_adam import HybridAdam, checked_options


@dataclass(frozen=True, kw_only=True)
class FusedRule:
    """An update rule, and the optimizers that it computes exactly."""

    name: str
    """As csrc/optim/update_rules.cc registers it."""
    classes: tuple[type[Optimizer], ...]
    """Not their subclasses, which may do otherwise."""
    without: tuple[str, ...]
    """Options of a group that it does not know: they must be false."""
    options: Callable[[Optimizer], list[dict[str, float | bool]]]
    """Those of every group, as the rule calls them; ValueError where one is out of range."""


RULES = (
    FusedRule(
        name="adam",
        classes=(Adam, AdamW, HybridAdam),
        without=("amsgrad", "maximize", "differentiable"),
        options=checked_options,
    ),
)


def rule_of(optimizer: Optimizer) -> FusedRule | None:
    """The rule that computes exactly what `optimizer` would, None where it runs its own step."""
    for rule in RULES:
        if type(optimizer) in rule.classes and not any(
            group.get(option) for group in optimizer.param_groups for option in rule.without
        ):
            return rule
    return None
