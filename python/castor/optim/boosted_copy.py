"""Makes ordinary copies of boosted optimizers, over ordinary parameters."""

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
        optimizer: The boosted optimizer.
        base: Class that it had before boost, which the copy gets.
        engine: Engine of its model.
        fused: Whether its state lies in chunks.
        memo: Memo of copy.deepcopy: the copy uses parameters that were copied already, with their
            model.

    Returns:
        An optimizer in memory, with the same groups and state, over copies of the parameters.

    Raises:
        UsageError: The copy could not hold the float32 masters, or the run is broken.
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
    """Checks that an ordinary optimizer of a class can hold the state of a boosted one.

    Args:
        base: Class that the optimizer had before boost.
        engine: Engine of its model.
        fused: Whether its state lies in chunks.
        what: Beginning of the message, which names the action: "a copy of ".
        instead: Advice at the end of the message.

    Raises:
        UsageError: The class cannot hold the float32 masters.
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
    """Makes an ordinary optimizer's state of one parameter, in memory of its own.

    Args:
        twin: The ordinary optimizer.
        param: Its parameter.
        engine: Engine of the boosted model.
        index: Position of the parameter in the boosted model.
        entry: State of the parameter in the boosted optimizer.
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
