"""Saves of optimizer state, in the layout of torch.optim and by parameter name."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.optim import Optimizer

from castor import _C
from castor.checkpoint.container import (
    ComputedTensor,
    SavedTensor,
    bytes_of,
    check_savable,
    split,
)
from castor.checkpoint.documents import canonical, encode
from castor.checkpoint.files import OVERHEAD_BYTES, FileEntry, write_file
from castor.checkpoint.model import seal_part
from castor.checkpoint.reading import Reading, Saving, share_of, taken, write_of
from castor.checkpoint.shares import Share
from castor.checkpoint.snapshot import (
    Shard,
    full_dtensors,
    full_names,
    full_optimizer_state,
    shape_of_scales,
    shard_of_weights,
    snapshot,
)
from castor.checkpoint.staging import staged
from castor.errors import CheckpointError, UsageError
from castor.runtime.engine import Engine
from castor.runtime.rules import params_of

DESCRIPTION = "optimizer.json"
FORMAT = "castor-optimizer-1"
_RECONCILED = 2**18
"""Number of elements reconciled at once; temporaries of them take a fraction of a piece."""

_OURS = re.compile(
    r"optimizer(-\d{5}-of-\d{5})?\.safetensors|optimizer\.json|castor-manifest\.json"
)


class Scaler(Protocol):
    """The loss scaler's interface to checkpoints."""

    def state_dict(self) -> dict[str, float | int]: ...  # noqa: D102
    def load_state_dict(self, state: dict[str, float | int]) -> None: ...  # noqa: D102


class Driver(Protocol):
    """The interface of a boosted optimizer's StepDriver to checkpoints."""

    engine: Engine
    fused: bool
    num_optimizers: int
    scaler: Scaler | None

    def take_up_edits(self, optimizer: Optimizer) -> None: ...  # noqa: D102


def driver_of(optimizer: Optimizer) -> Driver | None:
    """Returns the driver of a boosted optimizer, None for any other."""
    return cast("Driver | None", getattr(optimizer, "_castor", None))


def check_all_given(optimizers: Sequence[Optimizer]) -> None:
    """Checks that all optimizers of a boosted model are given, or none of them.

    Raises:
        UsageError: An optimizer of the model is missing.
    """
    drivers = [driver for optimizer in optimizers if (driver := driver_of(optimizer)) is not None]
    given = Counter(driver.engine for driver in drivers)
    for driver in drivers:
        if given[driver.engine] != driver.num_optimizers:
            raise UsageError(
                f"the model was boosted with {driver.num_optimizers} optimizers, and "
                f"{given[driver.engine]} of them were given; give all, in a list"
            )


def names_of(optimizer: Optimizer, model: nn.Module | None) -> dict[torch.Tensor, str]:
    """Returns the names of the optimizer's parameters in the model; states are saved under them.

    Args:
        optimizer: Boosted or not.
        model: Names the parameters of an optimizer that is not boosted; None: its groups do.

    Raises:
        UsageError: Nothing tells the names, or a parameter is not the model's.
    """
    driver = driver_of(optimizer)
    params = params_of(optimizer)
    if driver is not None:
        known: dict[torch.Tensor, str] = dict(
            zip(driver.engine.params, full_names(driver.engine), strict=True)
        )
    elif model is not None:
        known = {param: name for name, param in model.named_parameters()}
    elif all("param_names" in group for group in optimizer.param_groups):
        known = dict(
            zip(params, (n for g in optimizer.param_groups for n in g["param_names"]), strict=True)
        )
    else:
        raise UsageError(
            f"this {type(optimizer).__name__} is not boosted and does not know its parameters' "
            "names; give model="
        )
    for param in params:
        if param not in known:
            raise UsageError(
                f"the optimizer holds a parameter of shape {tuple(param.shape)} that is not in the "
                "model; give the model that it trains"
            )
    return {param: known[param] for param in params}


@dataclass(frozen=True, kw_only=True)
class OptimizerState:
    """The state of an optimizer, ready to be written."""

    tensors: dict[str, SavedTensor]
    """Tensors by "<parameter>.<entry>": the optimizer's own, or made from these."""
    description: dict[str, Any]
    """Document of optimizer.json, without the names of the files."""

    @property
    def bytes(self) -> int:
        """Upper bound of the bytes that a save writes."""
        return bytes_of(self.tensors) + len(canonical(self.description)) + OVERHEAD_BYTES

    def files(self, max_bytes: int | None) -> dict[str, dict[str, SavedTensor]]:
        """Returns the tensors by file name; `max_bytes` bounds a file's tensors, see split."""
        return split(self.tensors, "optimizer", max_bytes)


def state_of_optimizer(
    optimizer: Optimizer, model: nn.Module | None, share: Share | None = None
) -> OptimizerState:
    """Collects the state of an optimizer for a save. Collective where ranks have shards.

    States in a boosted model's chunks are read when they are written, one tensor at a time. Split
    state formats become float32 then; those of a standalone HybridAdam become float32 here.

    In 16-bit precisions the state has the float32 masters ("<parameter>.master"), with the user's
    edits of the weights.

    Args:
        optimizer: Boosted or not.
        model: Names the parameters of an optimizer that is not boosted.
        share: This rank's share of the work; None: this process does all of it.

    Raises:
        CheckpointError: The state holds something other than tensors, numbers and strings.
        UsageError: The parameters have no names (see names_of), or ranks have shards of a model
            and the optimizer is not boosted.
    """
    driver = driver_of(optimizer)
    if driver is None and share is not None:
        raise UsageError(
            f"this {type(optimizer).__name__} is not boosted, and ranks with shards of a model "
            "write states of optimizers that booster.boost was given with it; where it trains "
            "another model, give that as model="
        )
    names = names_of(optimizer, model)
    own, numbers = tensors_and_numbers(optimizer, model)
    tensors = full_dtensors(model, own, "optimizer")
    groups: Sequence[Sequence[str]] = [
        [names[param] for param in group["params"]] for group in optimizer.param_groups
    ]
    if driver is not None and driver.engine.model_shards is not None:
        assert share is not None
        params = {name: param for param, name in names.items()}
        tensors, numbers, groups = full_optimizer_state(
            *(driver.engine, tensors, numbers, groups),
            lambda key: params[key.rpartition(".")[0]],
            share,
        )
    description = {
        "format": FORMAT,
        "optimizer": type(optimizer).__name__,
        "groups": [
            _describe_group(i, group, names)
            for i, (group, names) in enumerate(zip(optimizer.param_groups, groups, strict=True))
        ],
        "state": numbers,
        "loss_scaler": driver.scaler.state_dict() if driver and driver.scaler else None,
        "rounding_seed": getattr(optimizer, "rounding_seed", None),
    }
    if others := _of_no_parameter(optimizer):
        description["state_of_no_parameter"] = encode(others, "optimizer.state")
    return OptimizerState(tensors=tensors, description=description)


def tensors_and_numbers(
    optimizer: Optimizer, model: nn.Module | None
) -> tuple[dict[str, SavedTensor], dict[str, dict[str, Any]]]:
    """Returns this process's state: tensors by "<parameter>.<entry>", other entries by parameter.

    Raises:
        CheckpointError: See state_of_optimizer.
        UsageError: See names_of.
    """
    driver = driver_of(optimizer)
    if driver is not None:
        driver.take_up_edits(optimizer)
        driver.engine.session.move_to_host()
    tensors: dict[str, SavedTensor] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for param, name in names_of(optimizer, model).items():
        for key, value in _entries(optimizer, param).items():
            if not isinstance(key, str) or "." in key:
                raise CheckpointError(f"the state of '{name}' has an entry called {key!r}")
            if isinstance(value, torch.Tensor | ComputedTensor):
                tensors[f"{name}.{key}"] = value
            else:
                where = f"optimizer state '{key}' of '{name}'"
                numbers.setdefault(name, {})[key] = encode(value, where)
        if (
            driver is not None
            and driver.fused
            and driver.engine.trained_index(param) is not None
            and param.dtype != torch.float32
        ):
            tensors[f"{name}.master"] = _master(driver.engine, param)
    check_savable(tensors)
    return tensors, numbers


def _of_no_parameter(optimizer: Optimizer) -> dict[Any, Any]:
    """Returns the values in `state` that belong to no parameter, such as a counter."""
    state: dict[Any, Any] = optimizer.state
    return {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}


def _entries(optimizer: Optimizer, param: torch.Tensor) -> dict[Any, Any]:
    """Returns a parameter's state in torch's layout, whichever one the optimizer keeps it in."""
    driver = driver_of(optimizer)
    if driver is not None:
        own = optimizer.state.get(param, {})
        return _portable(driver, param, own) if driver.fused else own
    portable = getattr(optimizer, "portable_state", None)
    entries: dict[Any, Any] = (
        optimizer.state.get(param, {}) if portable is None else portable(param)
    )
    return entries


def _portable(driver: Driver, param: torch.Tensor, entry: dict[Any, Any]) -> dict[Any, Any]:
    """Returns a boosted parameter's state in float32, read when it is written."""
    if not entry:
        return entry
    engine, index = driver.engine, driver.engine.index_of[param]  # type: ignore[index]
    session = engine.session
    names = session.state_names(index)

    def full(name: str) -> torch.Tensor:
        return _in_float32(session, index, session.saved_states(index), name)

    def shard(name: str) -> Shard:
        first, _ = session.saved_piece(index)
        shard = _in_float32(session, index, session.saved_states_of_piece(index), name)
        return (first // _C.MOMENT_BLOCK * 2 if name == "scales" else first), shard

    # Look at the keys alone: the value of a stored entry would be read from NVMe.
    portable: dict[Any, Any] = {key: entry[key] for key in entry if key not in names}
    for name in names:
        shape = shape_of_scales(param.shape) if name == "scales" else None
        portable[name] = snapshot(
            engine, index, partial(full, name), partial(shard, name), shape=shape
        )
    return portable


def _in_float32(
    session: _C.Session, index: int, tensors: list[torch.Tensor], name: str
) -> torch.Tensor:
    """Returns state `name` of a parameter in float32; `tensors` are all states of it."""
    states = dict(zip(session.state_names(index), tensors, strict=True))
    if states[name].dtype == torch.float32:
        return states[name]
    scales = states.get("scales")  # only Adam's moments are rounded
    moments = _C.load_moments(
        session.state_format(index),
        states["exp_avg"],
        states["exp_avg_sq"],
        None if scales is None else scales.view(-1, 2),
    )
    return moments[0] if name == "exp_avg" else moments[1]


def _master(engine: Engine, param: torch.Tensor) -> SavedTensor:
    """Returns the float32 values of a boosted 16-bit parameter, with the user's edits."""
    index = engine.index_of[param]  # type: ignore[index]
    session = engine.session

    def full() -> torch.Tensor:
        master = session.saved_master(index)
        assert master is not None
        edited = session.state_format(index) == "fp32"
        return _reconcile(session.saved_weights(index), master) if edited else master

    def shard() -> Shard:
        first, weights = shard_of_weights(engine, index)
        master = session.saved_master_of_piece(index)
        assert master is not None
        edited = session.state_format(index) == "fp32"
        return first, _reconcile(weights, master) if edited else master

    return snapshot(engine, index, full, shard)


def _describe_group(position: int, group: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    return {
        "params": list(names),
        "options": encode(options, f"param_groups[{position}]"),
    }


@torch.no_grad()
def _reconcile(param: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    """Puts the user's edits of the 16-bit weights into the master, as the next update would do.

    An element has been edited where the master does not round to it. Changes the master in place
    and returns it.
    """
    weights = param.detach().cpu()
    flat = weights.as_strided((weights.numel(),), (1,), weights.storage_offset())
    flat_master = master.as_strided((master.numel(),), (1,), master.storage_offset())
    scratch = torch.empty_like(flat[:_RECONCILED])
    for own, exact in zip(flat.split(_RECONCILED), flat_master.split(_RECONCILED), strict=True):
        rounded = scratch[: own.numel()]
        _C.round_to_param(rounded, exact)
        if not torch.equal(rounded, own):
            edited = rounded != own
            exact[edited] = own[edited].float()
    return master


def save_optimizer(
    optimizer: Optimizer,
    directory: Path,
    *,
    model: nn.Module | None,
    max_bytes: int | None,
    reading: Reading | None = None,
) -> Saving:
    """Writes an optimizer to a directory of its own; see Booster.save_optimizer.

    Args:
        optimizer: Boosted or not.
        directory: Directory to write; replaced as a whole if it exists, but files that castor did
            not write stay.
        model: Names the parameters of an optimizer that is not boosted.
        max_bytes: Bytes of tensors in one file; None: one file.
        reading: The snapshot that the save reads, where training goes on meanwhile or several
            ranks write; None: this process writes alone, and training waits.

    Raises:
        CheckpointError: The state cannot be saved.
        IoError: The disk refuses; `directory` is what it was.
        UsageError: See names_of.
    """
    state = state_of_optimizer(optimizer, model, share_of(reading))
    state = replace(state, tensors=taken(reading, state.tensors))
    shards = state.files(max_bytes)
    if reading is not None and reading.follows:
        yield directory
        reading.follow(directory, state.bytes, shards)
        return
    with staged(directory, state.bytes) as staging:
        yield directory
        entries = write_of(reading)(staging, shards)
        write_optimizer(state, entries, staging, directory)


def write_optimizer(
    state: OptimizerState, entries: dict[str, FileEntry], staging: Path, previous: Path
) -> FileEntry:
    """Completes an optimizer's directory: optimizer.json, the user's files, the manifest.

    Args:
        state: State of the optimizer.
        entries: Manifest entries of the tensors' files, which have been written.
        staging: Directory that has these files.
        previous: Directory that will be replaced.

    Returns:
        The entry of the directory's manifest.

    Raises:
        OSError: The disk refuses.
    """
    description = {**state.description, "files": list(entries)}
    entries[DESCRIPTION] = write_file(staging / DESCRIPTION, [canonical(description)])
    return seal_part(staging, previous, entries, lambda name: _OURS.fullmatch(name) is not None)
