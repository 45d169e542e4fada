"""Gives a boosted model a new optimizer, without a new layout of its chunks."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.optim import Optimizer

from castor.config import GeminiConfig
from castor.errors import UsageError
from castor.optim.boosted import boost_optimizer, class_before
from castor.optim.boosted_state import reset_states
from castor.optim.rules import rules_of
from castor.optim.step_driver import ModelStep, StepDriver
from castor.runtime.engine import Engine


def has_place_for(engine: Engine, made: Optimizer) -> bool:
    """Whether the present chunks have the gradients and states that an optimizer needs."""
    params = [param for param in _params(made) if param.requires_grad]
    indices = [engine.index_of[param] for param in params]  # type: ignore[index]
    if not all(engine.trained[index] for index in indices):
        return False
    (rule,) = rules_of([made])
    ruled = {engine.ruled[index] for index in indices}
    return ruled == {False} or (ruled == {True} and rule is engine.rule)


@torch.no_grad()
def take_over(
    engine: Engine, config: GeminiConfig, before: list[Optimizer], made: Optimizer
) -> None:
    """Lets a new optimizer step a boosted model, with new states. Collective.

    Args:
        engine: Engine of the model.
        config: Settings of the plugin.
        before: Boosted optimizers with some of its parameters. They become ordinary optimizers
            without states, and their state_dict raises from then on.
        made: Optimizer that is not boosted, and for which has_place_for() is true.
    """
    with engine.session.turn("a new optimizer"):
        engine.session.settle()
        known: list[StepDriver] = [one._castor for one in engine.optimizers]  # type: ignore[attr-defined]
        for one in before:
            _make_room(one, engine)
        fused = False
        for param in _params(made):
            index = engine.index_of[param]  # type: ignore[index]
            fused |= engine.ruled[index]
            if engine.ruled[index] and engine.session.steps[index] > 0:  # a former optimizer's
                reset_states(engine, index, param)
        step = known[0].model_step if known else None
        if step is None:
            seed = config.seed or 0
            step = ModelStep(engine, config, [made], own=not fused, seed=seed)
        taken = {driver.position for driver in step.drivers}
        free = (i for i in range(step.num_optimizers) if i not in taken)
        position = next(free, None) if step.num_optimizers > 1 else None
        rule = engine.rule if fused else None
        boost_optimizer(made, StepDriver(made, step, rule=rule, position=position))


def _make_room(optimizer: Optimizer, engine: Engine) -> None:
    driver: StepDriver = optimizer._castor  # type: ignore[attr-defined]
    optimizer.state.clear()
    driver.take_up_states(optimizer)  # resets the states in chunks
    engine.optimizers.discard(optimizer)
    driver.model_step.drivers.discard(driver)
    optimizer.__dict__.pop("step", None)
    optimizer.__class__ = class_before(type(optimizer))
    del optimizer.__dict__["_castor"]
    optimizer.register_state_dict_pre_hook(_refuse_state)


def _params(optimizer: Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _refuse_state(optimizer: Optimizer, *_: Any) -> NoReturn:
    raise UsageError(
        f"the states of this {type(optimizer).__name__} have made room for those of an optimizer "
        "that was made for the same parameters since: save it before the model is called again"
    )
