"""Boosted optimizers that become ordinary ones again, in place."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from castor.optim.boosted import class_before, track_step
from castor.optim.boosted_copy import check_holds_masters, ordinary_entry
from castor.optim.hybrid_adam import HybridAdam
from castor.optim.step_driver import StepDriver
from castor.runtime.engine import Engine


def release_optimizers(engine: Engine, *, drop_states: bool) -> None:
    """Gives a model's optimizers their classes back, and their states memory of their own.

    Args:
        engine: Of the model, of which no update is under way.
        drop_states: Whether they are to be as new instead.

    Raises:
        UsageError: The class of one cannot hold all of its state; nothing was changed.
    """
    optimizers: list[Any] = list(engine.optimizers)
    for optimizer in optimizers if not drop_states else ():
        check_holds_masters(
            class_before(type(optimizer)),
            engine,
            fused=optimizer._castor.fused,
            what="released, ",
            instead="drop the state (drop_states=True)",
        )
    for optimizer in optimizers:
        _release(optimizer, optimizer._castor, drop_states=drop_states)
    engine.optimizers.clear()


@torch.no_grad()
def _release(optimizer: Optimizer, driver: StepDriver, *, drop_states: bool) -> None:
    engine, state = driver.engine, dict(optimizer.state)
    if drop_states:
        state = {}
    elif driver.fused:
        state = {
            param: ordinary_entry(optimizer, param, engine, engine.index_of[param], entry)  # type: ignore[index]
            for param, entry in state.items()
        }
    own_step = optimizer.__dict__.pop("step", None)
    optimizer.__class__ = class_before(type(optimizer))
    del optimizer.__dict__["_castor"]
    if isinstance(optimizer, HybridAdam):
        optimizer.requested_nvme = (0.0, None)  # its state is in memory
    if getattr(own_step, "_wrapped_by_lr_sched", False):
        track_step(optimizer)
    optimizer.state.clear()
    optimizer.state.update(state)
