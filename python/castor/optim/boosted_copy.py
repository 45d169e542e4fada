"""Copies of a boosted optimizer: ordinary ones, over ordinary parameters."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from torch.optim import Optimizer

from castor.errors import UsageError
from castor.optim.boosted_state import StoredState
from castor.optim.hybrid_adam import HybridAdam
from castor.optim.state_formats import from_portable, to_portable
from castor.runtime.engine import Engine


@torch.no_grad()
def ordinary_copy(
    optimizer: Optimizer,
    base: type[Optimizer],
    engine: Engine,
    *,
    fused: bool,
    memo: dict[int, Any],
) -> Optimizer:
    """Makes the ordinary optimizer that copy.deepcopy gives for a boosted one.

    Args:
        optimizer: The boosted one.
        base: The class that it had before; that of the copy.
        engine: Of its model.
        fused: Whether its state lies in chunks.
        memo: As copy.deepcopy has it: parameters that were copied already (with their model) are
            those of the copy.

    Returns:
        An optimizer in memory, with the same groups and state, over copies of the parameters.

    Raises:
        UsageError: It could not hold the float32 masters, or the run is broken.
    """
    check_holds_masters(
        base,
        engine,
        fused=fused,
        what="a copy of ",
        instead="write the state with booster.save_optimizer",
    )
    engine.session.settle()
    twin = base.__new__(base)
    memo[id(optimizer)] = twin
    own: dict[str, Any] = base.__getstate__(optimizer)
    state = own.pop("state")
    if issubclass(base, HybridAdam):
        own["requested_nvme"] = (0.0, None)  # its state is in memory
    twin.__setstate__({**copy.deepcopy(own, memo), "state": defaultdict(dict)})
    param: Any
    for param, entry in state.items():
        if not isinstance(param, torch.Tensor):
            twin.state[param] = copy.deepcopy(entry, memo)
        elif fused:
            mine: torch.Tensor = copy.deepcopy(param, memo)
            index = engine.index_of[param]  # type: ignore[index]
            twin.state[mine] = ordinary_entry(twin, mine, engine, index, entry)
        else:
            twin.state[copy.deepcopy(param, memo)] = copy.deepcopy(entry, memo)
    return twin


def check_holds_masters(
    base: type[Optimizer], engine: Engine, *, fused: bool, what: str, instead: str
) -> None:
    """Whether an ordinary optimizer of a class can hold what a boosted one of it has.

    Args:
        base: The class that it had before.
        engine: Of its model.
        fused: Whether its state lies in chunks.
        what: For the message: what would become of it.
        instead: For the message: what else there is to do.

    Raises:
        UsageError: It cannot hold the float32 masters.
    """
    precision = engine.settings.precision
    if precision != "fp32" and not issubclass(base, HybridAdam):
        holder = engine.rule.holds_masters if fused and engine.rule else None
        other = f"boost castor.{holder}, which keeps them, or " if holder else ""
        raise UsageError(
            f"{what}this boosted {base.__name__} would lose the float32 masters of its {precision} "
            f"parameters, which a plain {base.__name__} cannot hold: {other}{instead}"
        )


def ordinary_entry(
    twin: Optimizer, param: torch.Tensor, engine: Engine, index: int, entry: dict[str, Any]
) -> dict[str, Any]:
    """The state of an ordinary optimizer's `param`, in memory of its own.

    Args:
        twin: That optimizer.
        param: Its own parameter.
        engine: Of the boosted model.
        index: The parameter's there.
        entry: The boosted optimizer's state of it.
    """
    held = entry.loaded() if isinstance(entry, StoredState) else entry
    if not isinstance(twin, HybridAdam):
        return {
            key: value.detach().to(value.device if key == "step" else param.device, copy=True)
            for key, value in held.items()
        }
    portable = to_portable(param, held)
    master = engine.session.master(index) if param.dtype != torch.float32 else None
    if master is not None:
        portable["master"] = master
    return from_portable(param, portable, twin.format_of(param))
