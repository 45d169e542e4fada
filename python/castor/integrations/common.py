"""Code that the adapters of frameworks share; it needs none of the frameworks."""

from __future__ import annotations

import functools
import json
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from castor.booster import Booster, booster_of
from castor.config import LossScalerConfig
from castor.errors import OutOfMemoryError, UsageError
from castor.integrations.several_modules import CalledBySubmodules, boosted_around
from castor.optim.released import has_place_for, take_over
from castor.optim.step_driver import StepDriver
from castor.plugins import GeminiPlugin
from castor.runtime.boosted_model import model_with
from castor.runtime.engine import Engine, engine_of, engines_holding
from castor.runtime.rules import MASTER, params_of

# --- Optimizers that a loop makes for a model that trains already ---------------------------------


def join_or_replace(booster: Booster, model: nn.Module, made: Sequence[Optimizer]) -> None:
    """Boosts optimizers beside those of boosted models, or in the place of some.

    Those that hold one of the same parameters make room: each keeps its states, and takes no more
    steps. Gradients that are there stay what they are. Boosted models, and parameters beside them,
    become one model where the optimizers hold some of each.

    Args:
        booster: That boosts the loop's models.
        model: A boosted model, a part of one, or a module that holds some.
        made: Over its parameters.

    Raises:
        UsageError: The model is on a GPU, or several ranks share it, and the optimizers hold other
            parameters as well.
        NotImplementedError: It is on a GPU, or several ranks share it, and the chunks have no place
            for the states of one.
    """
    engines = engines_holding(model)
    engine = engines[0]
    known = model_with(engine)
    held = {param for one in made for param in params_of(one)}
    before = [
        one
        for each in engines
        for one in sorted(each.optimizers, key=lambda one: one._castor.position or 0)  # type: ignore[attr-defined]
    ]
    stay = [one for one in before if held.isdisjoint(params_of(one))]
    names = ", ".join(type(one).__name__ for one in made)
    foreign = held.union(model.parameters()).difference(engine.params)
    if not lays_out_anew(engine):
        if foreign:
            raise UsageError(
                f"the loop has made a {names} over {len(held)} parameters, and {len(foreign)} of "
                f"them are not of the {type(known).__name__} of which the others train already, on "
                "a GPU or on several ranks: make it before that is called first, or give each "
                "model an optimizer of its own"
            )
        _take_over(booster, known, [one for one in before if one not in stay], made)
        return
    if foreign:
        with _gradients_aside([param for each in engines for param in each.params]):
            booster.boost_around(model, [*stay, *made])
    else:
        lay_out_anew(booster, known, [*stay, *made])
    for one in before:
        if one not in stay:
            for entry in one.state.values():
                entry.pop(MASTER, None)  # of weights that others train from now on
            _refuse_steps(one, names)


def lay_out_anew(booster: Booster, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Reboosts a model between two passes, whose gradients stay what they are.

    Args:
        booster: That boosts the loop's models.
        model: Boosted, in one process, on the CPU device.
        optimizers: Those that train it from now on.
    """
    with _gradients_aside(engine_of(model).params):
        booster.reboost(model, optimizers)


@contextmanager
def _gradients_aside(params: Iterable[torch.Tensor]) -> Iterator[None]:
    """Takes the gradients of parameters off them, and gives them back at the end."""
    grads = {param: param.grad for param in params if param.grad is not None}
    copies = {param: grad.detach().clone() for param, grad in grads.items()}
    for param in copies:
        param.grad = None
    yield
    for param, grad in copies.items():
        param.grad = grad


def lays_out_anew(engine: Engine) -> bool:
    """Whether chunks of a model can be laid out anew: not on a GPU, and not on several ranks."""
    return not (engine.ranks or engine.model_shards or engine.device.type != "cpu")


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
        own = set(params_of(one))
        room = [other for other in before if not own.isdisjoint(params_of(other))]
        take_over(engine, plugin.config, room, one)
        for other in room:
            before.remove(other)
            _refuse_steps(other, names)


_refusals: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()
"""Hooks of optimizers that others have replaced, until they are boosted again."""


def _refuse_steps(optimizer: Optimizer, names: str) -> None:
    refuse = functools.partial(_refuse_step, names)
    _refusals[optimizer] = optimizer.register_step_pre_hook(refuse)


def _refuse_step(names: str, optimizer: Optimizer, *_: Any) -> NoReturn:
    raise UsageError(
        f"this {type(optimizer).__name__} is to step parameters for which the loop has made a "
        f"{names} since: castor run has one optimizer update a parameter; make one, and change "
        "its options in optimizer.param_groups"
    )


# --- Code that the adapters of frameworks share; it needs none of the frameworks ------------------

Class = TypeVar("Class", bound=type)

_SETTINGS = "castor.json"
"""In a run's directory: with which settings it trains."""


class OnCastor:
    """Mixed in before a framework's class: what all that castor enters in this way have."""

    castor_has_trained = False
    """Whether a model and an optimizer have been boosted in any loop of this process."""
    castor_boosts = False
    """Whether a loop's model is being boosted now, rather than one that a script boosts itself."""
    castor: Booster
    _castor_plugin_for: Callable[..., GeminiPlugin]
    """Makes the plugin of what the framework was asked for."""
    _castor_plugin: GeminiPlugin | None = None
    """The plugin that a script gave; None where castor run chose it."""

    def _boost_with(self, model: nn.Module, *optimizers: Optimizer) -> None:
        boost(self.castor, model, optimizers)

    def _check_boosted(self, model: nn.Module) -> None:
        """Lets a loop train a model that is boosted already, with the plugin that it was given.

        Raises:
            UsageError: Another plugin boosted it, so that the loop's would count for nothing.
        """
        known = boosted_around(model)
        if known is not None and self._castor_plugin is not None:
            _check_boosted_with(self._castor_plugin, known)

    @property
    def _super(self) -> Any:
        """The framework's own methods."""
        return super()


def boost(booster: Booster, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Boosts in a framework's loop, which may try a smaller batch when memory is short.

    Args:
        booster: Its own.
        model: As Booster.boost's; one that is boosted, or has boosted parts, gets the optimizers
            besides, or instead.
        optimizers: As Booster.boost's.

    Raises:
        As Booster.boost and join_or_replace.
    """
    OnCastor.castor_boosts = True
    try:
        if optimizers and engines_holding(model):
            join_or_replace(booster, model, optimizers)
        else:
            booster.boost(model, optimizers)
    except OutOfMemoryError as error:
        error.blame_no_batch()
        raise
    finally:
        OnCastor.castor_boosts = False
    if isinstance(model, CalledBySubmodules):
        model.follow_calls()
    for one in optimizers:
        if one in _refusals:  # a Trainer that trains again
            _refusals.pop(one).remove()
    OnCastor.castor_has_trained |= bool(optimizers)


def _check_boosted_with(plugin: GeminiPlugin, model: nn.Module) -> None:
    its = booster_of(model).plugin
    if its is plugin:
        return
    differ = ["another kind of plugin"]
    if isinstance(its, GeminiPlugin):
        asked, had = plugin.arguments, its.arguments
        names = [field.name for field in fields(had)]
        differ = [
            f"{name}={getattr(had, name)!r}, not {getattr(asked, name)!r}"
            for name in names
            if getattr(had, name) != getattr(asked, name)
        ]
    if differ:
        raise UsageError(
            f"the {type(model).__name__} is boosted already, with other settings than this loop's "
            f"plugin has ({'; '.join(differ)}): give the loop the plugin that boosted it, or leave "
            "boosting to the loop"
        )


def check_class(base: Any, known: type, does: str) -> None:
    """Let castor enter a framework's class.

    Args:
        base: The class.
        known: The framework's, from which it derives.
        does: What it then does with castor; for messages.

    Raises:
        UsageError: `base` is no such class, or one of castor's already.
    """
    if not (isinstance(base, type) and issubclass(base, known)):
        package = known.__module__.partition(".")[0]
        raise UsageError(f"{base!r} is not a class of {package}.{known.__name__}'s")
    if issubclass(base, OnCastor):
        raise UsageError(f"{base.__name__} {does} with castor already; castor run made it do so")


def derived(base: Class, mixin: type[OnCastor], plugin_for: Callable[..., GeminiPlugin]) -> Class:
    """A class of a framework's that trains with castor.

    Args:
        base: What it derives from.
        mixin: What it does differently.
        plugin_for: As OnCastor's.
    """
    made: Any = type(base.__name__, (mixin, base), {"__module__": base.__module__})
    made._castor_plugin_for = staticmethod(plugin_for)
    result: Class = made
    return result


def plugin_of(
    settings: Mapping[str, Any], followed: Mapping[str, Any], clips: str, directory: Path | None
) -> GeminiPlugin:
    """The plugin of settings that somebody gave from outside.

    Args:
        settings: GeminiPlugin's arguments, as JSON holds them.
        followed: What the framework was asked for, where the settings are silent.
        clips: As check_plugin's.
        directory: Where all of them are written down; None: nowhere.

    Raises:
        As check_plugin.
    """
    chosen = {**followed, **settings}
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / _SETTINGS).write_text(json.dumps(chosen, indent=2) + "\n")
    plugin = GeminiPlugin(**chosen)
    check_plugin(plugin, clips)
    return plugin


def check_plugin(plugin: GeminiPlugin, clips: str) -> None:
    """A framework's loop can train with it.

    Args:
        plugin: How to train.
        clips: What in the loop clips gradients.

    Raises:
        TypeError: It is another plugin.
        UsageError: Plugin and loop would both do the same, or one before the other.
    """
    if not isinstance(plugin, GeminiPlugin):
        raise TypeError(
            f"a framework's loop trains with GeminiPlugin, and was given a "
            f"{type(plugin).__name__}: for torch's classes use the framework's own"
        )
    config = plugin.config
    if config.loss_scaler != LossScalerConfig():
        raise UsageError(
            f"GeminiPlugin has {config.loss_scaler}, and a framework's loop scales its loss with a "
            "torch.amp.GradScaler: leave initial_scale, growth_interval and their like out, and "
            "give them to the GradScaler (accelerate's GradScalerKwargs)"
        )
    if config.max_norm > 0:
        raise UsageError(
            f"GeminiPlugin has max_norm={config.max_norm}, and {clips} too: leave max_norm out"
        )
    if config.overlap == "backward":
        raise UsageError(
            "overlap='backward' updates parameters before the loop has clipped their gradients: "
            "pass overlap='forward'"
        )


def unwrapped(optimizer: Any) -> Optimizer:
    """The optimizer that accelerate or Lightning has wrapped, or one that they have not."""
    inner: Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


def boosted(optimizer: Any) -> bool:
    """Whether castor steps it, or the one that is wrapped."""
    return isinstance(getattr(unwrapped(optimizer), "_castor", None), StepDriver)
