"""Descriptions of the optimizers that run fused on chunks, one for each update rule.

All code that steps, shows, saves, loads or converts their states uses these descriptions. Names of
states and state formats are those of the rule itself (csrc/optim), which also checks the options.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import SGD, Adam, AdamW, Optimizer

from castor import _C
from castor.config import StateFormat

Group = Mapping[str, Any]
"""Options of a parameter group, as torch has them."""
RuleGroup = dict[str, float | bool]
"""Options of a parameter group, by the names of an update rule."""

MASTER = "master"
"""Entry of a saved state: the float32 weights of a 16-bit parameter."""
EXACT_ONLY = frozenset({"scales"})
"""Entries with which one state format restores its state bit for bit; others ignore them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FusedRule:
    """An update rule, and the optimizers that it computes exactly."""

    name: str
    """Name under which csrc/optim/update_rules.cc registers the rule."""
    classes: Mapping[str, Callable[..., Optimizer] | None]
    """Names of the optimizers, each with the class of plain torch that has the same state_dict;
    None: only the optimizer itself has it."""
    group_keys: tuple[str, ...]
    """Options that every group of these optimizers has."""
    options: Callable[[Group], RuleGroup]
    """Converts the options of a group, without a check; see `checked`."""
    without: tuple[str, ...] = ()
    """Options of a group that the rule does not support: they must be false."""
    fits: Callable[[Group], bool] = lambda _: True
    """Whether the rule computes what a group of these optimizers asks for."""
    counts_steps: bool = False
    """Whether a parameter's state has a "step"."""
    others: frozenset[str] = frozenset()
    """Entries of a state that these optimizers may have and the rule does not keep."""
    holds_masters: str | None = None
    """Name in `classes` of the optimizer that keeps float32 masters of 16-bit parameters also
    without chunks; None: there is none."""

    @functools.cached_property
    def states(self) -> tuple[str, ...]:
        """Names of the tensors of a parameter's state that have the parameter's shape."""
        names = _C.rule_state_names(self.name, self.formats[0])
        return tuple(name for name in names if name not in EXACT_ONLY)

    @functools.cached_property
    def formats(self) -> tuple[StateFormat, ...]:
        """State formats that the rule supports."""
        return tuple(_C.rule_formats(self.name))

    @property
    def entries(self) -> frozenset[str]:
        """Keys of a parameter's state after its first step."""
        return frozenset((*self.states, *(("step",) if self.counts_steps else ())))

    @property
    def known(self) -> frozenset[str]:
        """Entries that a saved state may have."""
        return self.entries | self.others | {MASTER}

    def checked(self, groups: Iterable[Group]) -> list[RuleGroup]:
        """Returns the converted options of every group.

        Raises:
            ValueError: An option is out of range; the message says in which group.
        """
        found = [self.options(group) for group in groups]
        _C.check_rule_options(self.name, found)
        return found

    def takes(self, groups: Iterable[Group]) -> bool:
        """Whether the rule computes exactly what its optimizers would with these groups."""
        return all(
            self.fits(group) and not any(group.get(option) for option in self.without)
            for group in groups
        )

    def steps_of(self, entry: Mapping[str, Any]) -> float:
        """Returns the steps of a state in torch's layout; 0 or 1 if the rule counts no steps."""
        if self.counts_steps:
            return float(entry.get("step", 0.0))
        return float(any(entry.get(name) is not None for name in self.states))


def _adam(group: Group) -> RuleGroup:
    return {
        "lr": float(group["lr"]),
        "beta1": float(group["betas"][0]),
        "beta2": float(group["betas"][1]),
        "eps": float(group["eps"]),
        "weight_decay": float(group["weight_decay"]),
        "decoupled": bool(group["decoupled_weight_decay"]),
        "maximize": bool(group.get("maximize", False)),  # HybridAdam's groups need not have it
    }


def _lion(group: Group) -> RuleGroup:
    return {
        "lr": float(group["lr"]),
        "beta1": float(group["betas"][0]),
        "beta2": float(group["betas"][1]),
        "weight_decay": float(group["weight_decay"]),
    }


def _sgd(group: Group) -> RuleGroup:
    return {
        "lr": float(group["lr"]),
        "momentum": float(group["momentum"]),
        "dampening": float(group["dampening"]),
        "weight_decay": float(group["weight_decay"]),
        "nesterov": bool(group["nesterov"]),
        "maximize": bool(group["maximize"]),
    }


ADAM = FusedRule(
    name="adam",
    classes={"Adam": Adam, "AdamW": AdamW, "HybridAdam": AdamW},
    group_keys=("lr", "betas", "eps", "weight_decay"),
    options=_adam,
    without=("amsgrad", "differentiable"),
    counts_steps=True,
    others=frozenset({"max_exp_avg_sq"}),
    holds_masters="HybridAdam",
)
LION = FusedRule(
    name="lion",
    classes={"Lion": None},
    group_keys=("lr", "betas", "weight_decay"),
    options=_lion,
)
_SGD_KEYS = ("lr", "momentum", "dampening", "weight_decay", "nesterov")
# SGD without momentum has no state: a separate rule takes no memory for it.
PLAIN_SGD = FusedRule(
    name="sgd",
    classes={"SGD": SGD},
    group_keys=_SGD_KEYS,
    options=_sgd,
    without=("differentiable",),
    fits=lambda group: not group["momentum"],
)
MOMENTUM_SGD = FusedRule(
    name="sgd_momentum",
    classes={"SGD": SGD},
    group_keys=_SGD_KEYS,
    options=_sgd,
    without=("differentiable",),
)

RULES = (ADAM, LION, PLAIN_SGD, MOMENTUM_SGD)
"""Update rules; the first that fits is used."""

CLASSES = tuple(dict.fromkeys(name for rule in RULES for name in rule.classes))
"""Names of the optimizers that run fused."""


TENSORS = frozenset(name for rule in RULES for name in (*rule.states, *rule.others))
"""Entries of saved states that have their parameter's shape, without masters."""


def rule_like(groups: Sequence[Group], entries: Iterable[str] = ()) -> FusedRule | None:
    """Returns the rule that fits an optimizer's options, whatever its class; None: none does.

    Args:
        groups: Parameter groups of the optimizer.
        entries: Names of the entries of its parameters' states.
    """
    found = frozenset(entries) - EXACT_ONLY
    for rule in RULES:
        fits = all(_has_options(group, rule) and rule.fits(group) for group in groups)
        if fits and found <= rule.known:
            return rule
    return None


def rule_with(entries: Iterable[str]) -> FusedRule | None:
    """Returns the rule that a parameter's state with these entries belongs to; None: not clear."""
    found = frozenset(entries) - EXACT_ONLY
    return next(
        (rule for rule in RULES if rule.entries and rule.entries <= found <= rule.known), None
    )


def _has_options(group: Group, rule: FusedRule) -> bool:
    return all(key in group for key in rule.group_keys)


def params_of(optimizer: Optimizer) -> list[Any]:
    """Returns the parameters of all groups of an optimizer, which are tensors."""
    return [param for group in optimizer.param_groups for param in group["params"]]
