"""Optimizers that a loop makes for a model that trains already."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from castor.booster import Booster
from castor.errors import UsageError
from castor.optim.replaced import has_place_for, take_over
from castor.runtime.engine import engine_of


def join_or_replace(booster: Booster, model: nn.Module, made: Sequence[Optimizer]) -> None:
    """Boosts optimizers beside those of a boosted model, or in the place of some.

    Those that hold one of the same parameters make room: each keeps its states, and takes no more
    steps. Gradients that are there stay what they are.

    Args:
        booster: That boosts the loop's models.
        model: Boosted.
        made: Over its parameters.

    Raises:
        UsageError: They hold other parameters as well.
        NotImplementedError: The model is on a GPU, or several ranks share it, and the chunks have
            no place for the states of one.
    """
    engine, names = engine_of(model), ", ".join(type(one).__name__ for one in made)
    held = {param for one in made for param in _params(one)}
    foreign = held.difference(engine.params)
    if foreign:
        raise UsageError(
            f"the loop has made a {names} over {len(held)} parameters, and {len(foreign)} of them "
            f"are not of the {type(model).__name__} of which the others train already: make it "
            "before that is called first, or give each model an optimizer of its own"
        )
    before = sorted(engine.optimizers, key=lambda one: one._castor.position or 0)  # type: ignore[attr-defined]
    stay = [one for one in before if held.isdisjoint(_params(one))]
    if engine.ranks or engine.model_shards or engine.device.type != "cpu":
        _take_over(booster, model, [one for one in before if one not in stay], made)
        return
    grads = {param: param.grad for param in engine.params if param.grad is not None}
    copies = {param: grad.detach().clone() for param, grad in grads.items()}
    for param in copies:
        param.grad = None
    booster.reboost(model, [*stay, *made])
    for param, grad in copies.items():
        param.grad = grad
    for one in before:
        if one not in stay:
            one.register_step_pre_hook(functools.partial(_refuse_step, names))


def _take_over(
    booster: Booster, model: nn.Module, before: list[Optimizer], made: Sequence[Optimizer]
) -> None:
    """Boosts optimizers where chunks are not laid out anew."""
    engine, names = engine_of(model), ", ".join(type(one).__name__ for one in made)
    if not all(has_place_for(engine, one) for one in made):
        raise NotImplementedError(
            f"the loop has made a {names} for a {type(model).__name__} that trains already, on a "
            "GPU or on several ranks, where castor run does not lay chunks out anew: there a later "
            "optimizer is of the kind of the one before, and of parameters that trained; make any "
            "other before the model is called first"
        )
    plugin: Any = booster.plugin
    for one in made:
        own = set(_params(one))
        room = [other for other in before if not own.isdisjoint(_params(other))]
        take_over(engine, plugin.config, room, one)
        for other in room:
            before.remove(other)
            other.register_step_pre_hook(functools.partial(_refuse_step, names))


def _params(optimizer: Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _refuse_step(names: str, optimizer: Optimizer, *_: Any) -> NoReturn:
    raise UsageError(
        f"this {type(optimizer).__name__} is to step parameters for which the loop has made a "
        f"{names} since: castor run has one optimizer update a parameter; make one, and change "
        "its options in optimizer.param_groups"
    )
