"""Checkpoints of runs: model, optimizer, scheduler, data position and random states together."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from castor.checkpoint import rng
from castor.checkpoint.container import SavedTensor, bytes_of, split
from castor.checkpoint.documents import canonical, decode, encode
from castor.checkpoint.files import OVERHEAD_BYTES, FileEntry, os_errors, write_file
from castor.checkpoint.hub_names import hub_names_of
from castor.checkpoint.manifest import (
    PART_MANIFEST,
    RUN_MANIFEST,
    check_sizes,
    verify,
    write_manifest,
)
from castor.checkpoint.model import (
    INDEX,
    SINGLE_FILE,
    about_model,
    tensors_of,
    write_configs,
    write_model,
)
from castor.checkpoint.model_load import prepare_model
from castor.checkpoint.optimizer import (
    OptimizerState,
    check_all_given,
    state_of_optimizer,
    write_optimizer,
)
from castor.checkpoint.optimizer_load import prepare_optimizer
from castor.checkpoint.ranks import ReadyLoad, contents_of
from castor.checkpoint.reading import Reading, Saving, share_of, taken, write_of
from castor.checkpoint.scheduler import scheduler_document, scheduler_state
from castor.checkpoint.staging import carry_over, delete, recover, recover_all, staged
from castor.errors import CheckpointError, UsageError
from castor.runtime.boosted_model import boosted_models_holding

_STEP = re.compile(r"step-(\d{8,})")
_OPTIMIZER = re.compile(r"optimizer(-\d+)?")
_OURS = re.compile(rf"model|{_OPTIMIZER.pattern}|trainer\.json|{re.escape(RUN_MANIFEST)}")
TRAINER_FORMAT = "castor-trainer-1"


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """The values that booster.load found beside the states."""

    step: int
    """Number of optimizer steps that the run had taken."""
    extra: Any
    """The `extra` that booster.save was given."""
    path: Path
    """Directory that was read."""


def process_state(dataloader: Any) -> dict[str, Any]:
    """Returns a process's own random states and data position, as JSON.

    Raises:
        UsageError: The dataloader has no state_dict.
    """
    return {
        "dataloader": None if dataloader is None else _position_of(dataloader),
        "rng": encode(rng.snapshot(), "rng"),
    }


def save(
    root: Path,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    lr_scheduler: Any,
    processes: list[dict[str, Any]],
    *,
    step: int | None,
    extra: Any,
    keep: int | None,
    max_bytes: int | None,
    reading: Reading | None = None,
) -> Saving:
    """Writes a run's checkpoint; see Booster.save.

    Args:
        root: Directory that gets the checkpoint as `step-<number>`.
        model: Boosted or not.
        optimizers: All optimizers of a boosted model, or none.
        lr_scheduler: Any object with a state_dict, or None.
        processes: process_state of each rank, in rank order.
        step: Number of the step; None: the boosted model's own count.
        extra: Any value that castor.checkpoint.documents.encode takes.
        keep: Number of complete checkpoints to leave in `root`; None: all of them.
        max_bytes: Bytes of tensors in one file; None: one file.
        reading: The snapshot that the save reads, where training goes on meanwhile or several
            ranks write; None: this process writes alone, and training waits.
    """
    number = _step_number(model, step)
    if keep is not None:
        _check_count("keep", keep, 1)
    check_all_given(optimizers)
    share = share_of(reading)
    states = [state_of_optimizer(optimizer, model, share) for optimizer in optimizers]
    states = [replace(state, tensors=taken(reading, state.tensors)) for state in states]
    weights = taken(reading, tensors_of(model, share))
    about = about_model(model, weights, hub_names_of(model), in_files=False)
    trainer = {
        "format": TRAINER_FORMAT,
        "step": number,
        "skipped_steps": sum(one.skipped_steps for one in boosted_models_holding(model)),
        "lr_scheduler": None if lr_scheduler is None else scheduler_document(lr_scheduler),
        "extra": encode(extra, "extra"),
        **processes[0],
        "other_ranks": processes[1:],
    }
    target = root / f"step-{number:08}"
    parts, files = parts_and_files(weights, states, max_bytes)
    needed = bytes_of(weights) + 2 * OVERHEAD_BYTES + sum(state.bytes for state in states)
    if reading is not None and reading.follows:
        yield target
        reading.follow(target, needed, files)
        return
    with os_errors(root, "write"):
        root.mkdir(exist_ok=True)
    recover_all(root)
    with staged(target, needed) as staging:
        for part in parts:
            (staging / part).mkdir()
        write_configs(model, staging / "model", None)
        yield target
        seal_run(staging, target, parts, states, trainer, about, write_of(reading)(staging, files))
    if keep is not None:
        _prune(root, number, keep)


Parts = dict[str, dict[str, dict[str, SavedTensor]]]
"""Tensors by directory of the run and file in it."""


def parts_and_files(
    weights: Mapping[str, SavedTensor], states: Sequence[OptimizerState], max_bytes: int | None
) -> tuple[Parts, dict[str, dict[str, SavedTensor]]]:
    """Returns a run's tensors twice: by directory and file, and by path of the file."""
    parts = {"model": split(weights, "model", max_bytes)}
    for part, state in zip(_parts_of(states), states, strict=True):
        parts[part] = state.files(max_bytes)
    files = {f"{part}/{name}": of for part, shards in parts.items() for name, of in shards.items()}
    return parts, files


def seal_run(
    staging: Path,
    previous: Path,
    parts: Parts,
    states: Sequence[OptimizerState],
    trainer: dict[str, Any],
    about: Mapping[str, Any],
    written: Mapping[str, FileEntry],
) -> None:
    """Completes a run's directory: descriptions, trainer.json, the user's files and manifests.

    Args:
        staging: Directory that already has the files of `parts`, and the configs.
        previous: Directory that will be replaced.
        parts: Tensors that were written, by directory and file.
        states: States of the optimizers.
        trainer: Document of trainer.json.
        about: See about_model.
        written: Manifest entries of the written files, by path.

    Raises:
        OSError: The disk refuses.
    """

    def entries_of(part: str) -> dict[str, FileEntry]:
        return {name: written[f"{part}/{name}"] for name in parts[part]}

    entries = {
        f"model/{PART_MANIFEST}": write_model(
            parts["model"], entries_of("model"), staging / "model", previous / "model", about
        )
    }
    for part, state in zip(_parts_of(states), states, strict=True):
        entries[f"{part}/{PART_MANIFEST}"] = write_optimizer(
            state, entries_of(part), staging / part, previous / part
        )
    entries["trainer.json"] = write_file(staging / "trainer.json", [canonical(trainer)])
    carry_over(previous, staging, lambda name: bool(_OURS.fullmatch(name)))
    write_manifest(staging, RUN_MANIFEST, entries)


def _parts_of(optimizers: Sequence[Any]) -> list[str]:
    """Returns the directory of each optimizer's state, in order."""
    if len(optimizers) == 1:
        return ["optimizer"]
    return [f"optimizer-{i}" for i in range(len(optimizers))]


def _step_number(model: nn.Module, step: int | None) -> int:
    if step is None:
        boosted = boosted_models_holding(model)
        if not boosted:
            raise UsageError(
                f"this {type(model).__name__} is not boosted and counts no steps: give step="
            )
        return boosted[0].num_steps
    _check_count("step", step, 0)
    return step


def _check_count(name: str, value: Any, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{name} is {value!r}; give a whole number from {minimum}")


def _position_of(dataloader: Any) -> dict[str, Any]:
    if not hasattr(dataloader, "state_dict"):
        raise UsageError(
            f"the {type(dataloader).__name__} does not know its position: give the DataLoader to "
            "booster.boost, or use one with state_dict (torchdata's StatefulDataLoader)"
        )
    state = encode(dataloader.state_dict(), "dataloader state")
    return {"class": _position_class(dataloader), "state": state}


def _position_class(dataloader: Any) -> str:
    """Returns the name of the class that writes the state_dict.

    A loader that wraps another one may pass on the inner loader's state.
    """
    return str(getattr(dataloader, "position_class", type(dataloader).__name__))


def _whole_steps(root: Path) -> list[tuple[int, Path]]:
    """Returns (step, path) of each complete checkpoint in `root`, lowest step first."""
    found = []
    for path in root.iterdir():
        match = _STEP.fullmatch(path.name)
        if match and _is_whole(path):
            found.append((int(match[1]), path))
    return sorted(found)


def _is_whole(path: Path) -> bool:
    try:
        check_sizes(path, RUN_MANIFEST)
    except CheckpointError:
        return False
    return True


def _prune(root: Path, newest: int, keep: int) -> None:
    """Deletes all but the `keep` last checkpoints up to step `newest`; leaves later steps alone."""
    steps = [(number, path) for number, path in _whole_steps(root) if number <= newest]
    for _, path in steps[:-keep]:
        with os_errors(path, "delete"):
            delete(path)


def latest(root: Path) -> Path | None:
    """Returns the complete checkpoint of the highest step in `root`; see Booster.latest."""
    if not root.is_dir():
        return None
    recover_all(root)
    steps = _whole_steps(root)
    return steps[-1][1] if steps else None


def prepare_load(
    path: Path,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    lr_scheduler: Any,
    dataloader: Any,
    *,
    rank: int,
) -> ReadyLoad[CheckpointInfo]:
    """Checks a run's checkpoint, and returns the load that applies it; see Booster.load."""
    directory = find(path)
    verify(directory, RUN_MANIFEST)
    trainer = read_trainer(directory)
    file = directory / "trainer.json"
    check_all_given(optimizers)
    model_load = prepare_model(model, directory / "model", strict=True)
    parts = _parts_of(optimizers)
    saved = optimizer_parts(directory)
    if optimizers and set(saved) != set(parts):
        raise CheckpointError(
            f"{directory} was saved with {len(saved)} optimizers, and {len(optimizers)} were given "
            "to load"
            if saved
            else f"{directory} was saved without an optimizer; load without one"
        )
    optimizer_loads = [
        prepare_optimizer(optimizer, directory / part, model)
        for optimizer, part in zip(optimizers, parts, strict=True)
    ]
    scheduler = _part(trainer, "lr_scheduler", lr_scheduler, file)
    if scheduler is not None:
        scheduler = scheduler_state(scheduler, lr_scheduler, file)
    processes = [trainer, *trainer.get("other_ranks", [])]
    own = processes[rank] if rank < len(processes) else None
    position = _part(own or trainer, "dataloader", dataloader, file)
    if position is not None:
        position = _checked_position(position, dataloader, file)
    states = None if own is None else decode(own["rng"])
    if states is not None:
        rng.check(states)
    info = CheckpointInfo(step=trainer["step"], extra=decode(trainer["extra"]), path=directory)

    def apply() -> CheckpointInfo:
        model_load.apply(with_optimizer=bool(optimizer_loads))
        for optimizer_load in optimizer_loads:
            optimizer_load.apply()
        if scheduler is not None:
            lr_scheduler.load_state_dict(scheduler)
        for boosted in boosted_models_holding(model):
            boosted.num_steps = info.step
            boosted.skipped_steps = trainer["skipped_steps"]
        if states is not None:
            rng.restore(states)
        if position is not None:
            dataloader.load_state_dict(position)  # after rng: it returns to these random states
        return info

    facts = {
        "the checkpoint that is loaded": contents_of(directory, RUN_MANIFEST),
        "the number of optimizers that are loaded": len(optimizers),
        "whether a scheduler is loaded": lr_scheduler is not None,
        "whether a dataloader is loaded": dataloader is not None,
    }
    return ReadyLoad(facts=facts, apply=apply)


def read_trainer(directory: Path) -> dict[str, Any]:
    """Reads trainer.json of a run's directory, which has been verified.

    Raises:
        CheckpointError: The file has another format.
    """
    file = directory / "trainer.json"
    trainer: dict[str, Any] = json.loads(file.read_bytes())
    if trainer.get("format") != TRAINER_FORMAT:
        raise CheckpointError(
            f"{file} has format {trainer.get('format')!r}; this version reads {TRAINER_FORMAT!r}"
        )
    return trainer


def optimizer_parts(directory: Path) -> list[str]:
    """Returns the directory names of a run's optimizers, in their order."""
    names = [part.name for part in directory.iterdir() if _OPTIMIZER.fullmatch(part.name)]
    return sorted(names, key=lambda name: (len(name), name))


def find(path: Path) -> Path:
    """Returns the checkpoint that a path stands for: the path itself, or the newest step in it.

    Raises:
        CheckpointError: There is no complete checkpoint.
    """
    recover(path)
    if (path / RUN_MANIFEST).exists() or _STEP.fullmatch(path.name):
        return path
    newest = latest(path)
    if newest is None:
        if any((path / name).exists() for name in (SINGLE_FILE, INDEX)):
            raise CheckpointError(f"{path} holds weights alone; booster.load_model reads them")
        raise CheckpointError(f"{path} holds no whole checkpoint; save one with booster.save")
    return newest


def _part(trainer: dict[str, Any], name: str, given: Any, file: Path) -> Any:
    if given is None:
        return None
    if trainer[name] is None:
        raise CheckpointError(f"{file} was saved without a {name}; load without one")
    return trainer[name]


def _checked_position(position: dict[str, Any], dataloader: Any, file: Path) -> Any:
    kind = _position_class(dataloader)
    if position["class"] != kind or not hasattr(dataloader, "state_dict"):
        raise CheckpointError(
            f"{file} holds the position of a {position['class']}; the dataloader is a {kind}"
            + ("" if hasattr(dataloader, "state_dict") else ", which booster.boost was not given")
        )
    state = decode(position["state"])
    if hasattr(dataloader, "check_state_dict"):
        dataloader.check_state_dict(state)
    return state
