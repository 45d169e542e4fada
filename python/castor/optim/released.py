"""Makes boosted optimizers ordinary ones again, and gives a boosted model a new one."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer

from castor.config import GeminiConfig
from castor.errors import UsageError
from castor.optim.boosted import (
    boost_optimizer,
    check_holds_masters,
    class_before,
    ordinary_entry,
    track_step,
)
from castor.optim.boosted_state import reset_states
from castor.optim.hybrid_adam import HybridAdam
from castor.optim.rules import rules_of
from castor.optim.step_driver import ModelStep, StepDriver
from castor.runtime.engine import Engine
from castor.runtime.rules import MASTER, params_of

# --- Makes boosted optimizers ordinary ones again, in place ---------------------------------------


@dataclass(frozen=True, kw_only=True)
class RunCounts:
    """Counters of a run, carried over when a model's chunks are laid out anew."""

    steps: int
    skipped_steps: int
    scaler: dict[str, float | int] | None
    """The state of fp16's loss scaler."""
    rounding_seed: int

    @classmethod
    def of(cls, engine: Engine, optimizers: Sequence[Any]) -> RunCounts:
        """Reads the counts of a boosted model and its optimizers, at least one."""
        step = optimizers[0]._castor.model_step if optimizers else None
        return cls(
            steps=engine.num_steps,
            skipped_steps=engine.skipped_steps,
            scaler=step.scaler.state_dict() if step and step.scaler else None,
            rounding_seed=step.seed if step else 0,
        )

    def give(self, engine: Engine, optimizers: Sequence[Any]) -> None:
        """Makes a boosted model continue from these counts."""
        engine.num_steps, engine.skipped_steps = self.steps, self.skipped_steps
        if optimizers:
            step = optimizers[0]._castor.model_step
            step.seed = self.rounding_seed
            if step.scaler and self.scaler:
                step.scaler.load_state_dict(self.scaler)


def release_optimizers(engine: Engine, *, drop_states: bool, with_masters: bool = False) -> None:
    """Gives a model's optimizers their classes back, and their states memory of their own.

    Args:
        engine: Engine of the model; no update of it may be under way.
        drop_states: Whether the optimizers lose their states, and are as new.
        with_masters: Whether float32 masters become entries of the state ("master"), also in
            classes that do not use them; for optimizers that are boosted again.

    Raises:
        UsageError: The class of an optimizer cannot hold all of its state; nothing was changed.
    """
    optimizers: list[Any] = list(engine.optimizers)
    for optimizer in optimizers if not (drop_states or with_masters) else ():
        check_holds_masters(
            class_before(type(optimizer)),
            engine,
            fused=optimizer._castor.fused,
            what="released, ",
            instead="drop the state (drop_states=True)",
        )
    for optimizer in optimizers:
        _release(optimizer, optimizer._castor, drop_states=drop_states, with_masters=with_masters)
    engine.optimizers.clear()


@torch.no_grad()
def _release(
    optimizer: Optimizer, driver: StepDriver, *, drop_states: bool, with_masters: bool
) -> None:
    driver.take_up_states(optimizer)  # groups may hold new parameters, for the next boost
    engine = driver.engine
    state: dict[Any, Any] = dict(optimizer.state)
    if drop_states:
        state = {}
    elif driver.fused:
        state = {
            param: ordinary_entry(optimizer, param, engine, engine.index_of[param], entry)  # type: ignore[index]
            if isinstance(param, torch.Tensor)
            else entry
            for param, entry in state.items()
        }
    own_step = optimizer.__dict__.pop("step", None)
    optimizer.__class__ = class_before(type(optimizer))
    del optimizer.__dict__["_castor"]
    if with_masters and driver.fused:
        for param, entry in _masters(optimizer, engine).items():
            state[param] = {**state.get(param, {}), MASTER: entry}
    if isinstance(optimizer, HybridAdam):
        optimizer.requested_nvme = (0.0, None)  # its state is in memory
    if driver.patched_step is not None:
        optimizer.step = driver.patched_step  # type: ignore[method-assign]
    elif getattr(own_step, "_wrapped_by_lr_sched", False):
        track_step(optimizer)
    optimizer.state.clear()
    optimizer.state.update(state)


def _masters(optimizer: Optimizer, engine: Engine) -> dict[torch.Tensor, torch.Tensor]:
    """Returns copies of the float32 masters of an optimizer's 16-bit parameters in chunks."""
    found = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            index = engine.index_of.get(param)
            if index is not None and engine.ruled[index] and param.dtype != torch.float32:
                master = engine.session.master(index)
                if master is not None:
                    found[param] = master.clone()
    return found


# --- Gives a boosted model a new optimizer, without a new layout of its chunks --------------------


def has_place_for(engine: Engine, made: Optimizer) -> bool:
    """Whether the present chunks have the gradients and states that an optimizer needs."""
    params = [param for param in params_of(made) if param.requires_grad]
    indices = [engine.index_of[param] for param in params]
    if not all(engine.trained[index] for index in indices):
        return False
    (rule,) = rules_of([made])
    ruled = {engine.ruled[index] for index in indices}
    return ruled == {False} or (ruled == {True} and rule is engine.rule)


_refusals: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()
"""Hooks of optimizers whose states have made room, until they step a boosted model again."""


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
        for param in params_of(made):
            index = engine.index_of[param]
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
        if made in _refusals:
            _refusals.pop(made).remove()


def _make_room(optimizer: Optimizer, engine: Engine) -> None:
    driver: StepDriver = optimizer._castor  # type: ignore[attr-defined]
    optimizer.state.clear()
    driver.take_up_states(optimizer)  # resets the states in chunks
    engine.optimizers.discard(optimizer)
    driver.model_step.drivers.discard(driver)
    optimizer.__dict__.pop("step", None)
    optimizer.__class__ = class_before(type(optimizer))
    del optimizer.__dict__["_castor"]
    _refusals[optimizer] = optimizer.register_state_dict_pre_hook(_refuse_state)


def _refuse_state(optimizer: Optimizer, *_: Any) -> NoReturn:
    raise UsageError(
        f"the states of this {type(optimizer).__name__} have made room for those of an optimizer "
        "that was made for the same parameters since: save it before the model is called again"
    )
