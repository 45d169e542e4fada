"""torch's layouts of a model and its optimizers: nested dicts, and files of torch.save."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from castor.checkpoint.container import ComputedTensor, SavedTensor, check_savable
from castor.checkpoint.contents import (
    Contents,
    accompanying_files,
    copy_files,
    in_files,
    listed,
)
from castor.checkpoint.documents import decode, encode, read_sealed, seal
from castor.checkpoint.files import write_file
from castor.checkpoint.manifest import PART_MANIFEST, read_hub, verify
from castor.checkpoint.model import seal_part
from castor.checkpoint.optimizer import FORMAT, OptimizerState
from castor.errors import CheckpointError
from castor.runtime.rules import ADAM, CLASSES, RULES, FusedRule, rule_like, rule_with

MODEL_FILE = "model.pt"
_OPTIMIZER_FILE = re.compile(r"optimizer(-\d+)?\.pt")
_CONTENTS = "castor-contents.json"
_CONTENTS_FORMAT = "castor-contents-1"


# --- from castor's layout -----------------------------------------------------------------------


def in_memory_of_files(contents: Contents, staging: Path) -> Contents:
    """Returns the contents with all tensors in mapped files, as torch's writers take all at once.

    Raises:
        OSError: The disk refuses.
    """
    tensors: dict[str, SavedTensor] = {f"model {k}": v for k, v in contents.weights.items()}
    for i, state in enumerate(contents.optimizers):
        tensors |= {f"{i} {key}": tensor for key, tensor in state.tensors.items()}
    backed = in_files(tensors, staging / "computed.safetensors")
    return replace(
        contents,
        weights={key: backed[f"model {key}"] for key in contents.weights},
        optimizers=[
            replace(state, tensors={key: backed[f"{i} {key}"] for key in state.tensors})
            for i, state in enumerate(contents.optimizers)
        ],
    )


def model_state(contents: Contents) -> dict[str, SavedTensor]:
    """Returns the weights as model.state_dict() does, tied ones under each of their keys."""
    tied = {alias: contents.weights[key] for alias, key in contents.tied.items()}
    return contents.weights | tied


def by_name(states: Sequence[OptimizerState]) -> dict[str, Any]:
    """Merges states into one dict, as torch.distributed.checkpoint.state_dict makes it."""
    state: dict[str, dict[str, Any]] = {}
    groups = []
    for one in states:
        for key, tensor in one.tensors.items():
            name, _, entry = key.rpartition(".")
            state.setdefault(name, {})[entry] = tensor
        for name, numbers in one.description["state"].items():
            state.setdefault(name, {}).update(decode(numbers))
        for group in one.description["groups"]:
            options = _defaults(one.description["optimizer"]) | decode(group["options"])
            groups.append({**options, "params": list(group["params"])})
    return {"state": state, "param_groups": groups}


def by_position(state: OptimizerState) -> dict[str, Any]:
    """Returns the state as optimizer.state_dict() does, with parameters' names in the groups."""
    document = by_name([state])
    position: dict[str, int] = {}
    for group in document["param_groups"]:
        names = group["params"]
        group["params"] = [position.setdefault(name, len(position)) for name in names]
        group["param_names"] = names
    document["state"] = {position[name]: entry for name, entry in document["state"].items()}
    return document


def _defaults(optimizer: str) -> dict[str, Any]:
    """Returns the default options of the torch class that an optimizer's state is for.

    The result is empty where no such class is known.
    """
    for rule in RULES:
        maker = rule.classes.get(optimizer)
        if maker is not None:
            return dict(maker([nn.Parameter(torch.zeros(1))]).defaults)
    return {}


# --- to castor's layout -------------------------------------------------------------------------


def states_of(
    document: dict[str, Any], directory: Path | None, names: Sequence[str] | None, where: str
) -> list[OptimizerState]:
    """Converts a state dict of torch's layout into the states of its optimizers.

    Args:
        document: State dict, as by_name or optimizer.state_dict() makes it.
        directory: Directory where castor may have written facts that torch's layout does not hold;
            None: there is none.
        names: Names of the parameters in the optimizer's order, for a state dict without names.
        where: Name of the state dict, for errors.

    Raises:
        CheckpointError: Names are missing, or no known update rule has such states.
    """
    document = _named(document, names, where)
    if directory is None or not listed(directory, _CONTENTS):
        return [_foreign_state(document, where)]
    return [
        OptimizerState(
            tensors={
                f"{name}.{entry}": value
                for group in description["groups"]
                for name in group["params"]
                for entry, value in document["state"].get(name, {}).items()
                if isinstance(value, torch.Tensor | ComputedTensor)
            },
            description=description,
        )
        for description in read_sealed(directory / _CONTENTS, _CONTENTS_FORMAT)["optimizers"]
    ]


def trainer_of(directory: Path) -> dict[str, Any] | None:
    """Returns the trainer document that castor wrote beside torch's layout; None: there is none."""
    if not listed(directory, _CONTENTS):
        return None
    trainer: dict[str, Any] | None = read_sealed(directory / _CONTENTS, _CONTENTS_FORMAT)["trainer"]
    return trainer


def _named(document: dict[str, Any], names: Sequence[str] | None, where: str) -> dict[str, Any]:
    """Returns the state dict with parameters' names in place of their positions."""
    groups = document.get("param_groups")
    state = document.get("state")
    if not (
        isinstance(state, dict)
        and isinstance(groups, list)
        and all(isinstance(group, dict) and "params" in group for group in groups)
    ):
        raise CheckpointError(f"{where} is no state dict of a torch optimizer")
    positions = [position for group in groups for position in group["params"]]
    if all(isinstance(position, str) for position in positions):
        if names is not None:
            raise CheckpointError(f"{where} has the parameters' names; leave --names out")
        return document
    if names is None and all("param_names" in group for group in groups):
        names = [name for group in groups for name in group["param_names"]]
    if names is None:
        raise CheckpointError(
            f"{where} knows its {len(positions)} parameters by position alone; build the optimizer "
            "over model.named_parameters(), or give --names: a file with the parameters' names in "
            "the optimizer's order, one a line"
        )
    if len(names) != len(positions) or len(set(names)) != len(names):
        raise CheckpointError(
            f"{where} has {len(positions)} parameters, and {len(names)} names "
            f"({len(set(names))} different ones) were given; give one for each, in its order"
        )
    name_of = dict(zip(positions, names, strict=True))
    return {
        "state": {
            name_of[position]: state[key]
            for position in positions
            for key in (position, str(position))  # torch.distributed.checkpoint has strings
            if key in state
        },
        "param_groups": [
            {**group, "params": [name_of[position] for position in group["params"]]}
            for group in groups
        ],
    }


def _foreign_state(document: dict[str, Any], where: str) -> OptimizerState:
    tensors: dict[str, SavedTensor] = {}
    numbers: dict[str, dict[str, Any]] = {}
    state = {  # torch.optim.SGD wrote a momentum_buffer of None before it left such entries out
        name: {entry: value for entry, value in entries.items() if value is not None}
        for name, entries in document["state"].items()
    }
    for name, entries in state.items():
        for entry, value in entries.items():
            if isinstance(value, torch.Tensor | ComputedTensor):
                tensors[f"{name}.{entry}"] = value
            else:
                what = f"optimizer state '{entry}' of '{name}'"
                numbers.setdefault(name, {})[entry] = encode(value, what)
    found = {entry for entries in state.values() for entry in entries}
    groups = document["param_groups"]
    rule = rule_like(groups, found) or rule_with(found)
    if rule is None:
        raise CheckpointError(
            f"{where} has states {sorted(found)}; states of {', '.join(CLASSES)} are converted, "
            "which have "
            + "; ".join(" ".join(sorted(rule.entries)) for rule in RULES if rule.entries)
        )
    description = {
        "format": FORMAT,
        "optimizer": _class_of(rule, groups),
        "groups": [
            {
                "params": list(group["params"]),
                "options": encode(
                    {k: v for k, v in group.items() if k not in ("params", "param_names")},
                    f"param_groups[{i}]",
                ),
            }
            for i, group in enumerate(groups)
        ],
        "state": numbers,
        "loss_scaler": None,
        "rounding_seed": None,
    }
    return OptimizerState(tensors=tensors, description=description)


def _class_of(rule: FusedRule, groups: Sequence[Mapping[str, Any]]) -> str:
    """Returns the class name of the torch optimizer that wrote a state dict."""
    if rule is ADAM:  # two classes that differ in an option
        decoupled = all(group.get("decoupled_weight_decay", True) for group in groups)
        return "AdamW" if decoupled else "Adam"
    return next(iter(rule.classes))


# --- files --------------------------------------------------------------------------------------


def read_torch(path: Path, names: Sequence[str] | None) -> Contents:
    """Reads a file of torch.save, or a directory with model.pt, optimizer.pt or both.

    Args:
        path: The file or the directory.
        names: Names of the optimizer's parameters in its order, where the state has positions.

    Raises:
        CheckpointError: A file is damaged, cannot be loaded with weights_only=True, or holds
            something else.
    """
    if path.is_file():
        document = _load(path)
        if "param_groups" in document:
            document = {"optimizer": document}
        elif not {"model", "optimizer"} & document.keys():
            document = {"model": document}
        contents, directory = Contents(), None
        model, optimizer = document.pop("model", None), document.pop("optimizer", None)
        optimizers = {} if optimizer is None else {str(path): optimizer}
        left_out = sorted(map(str, document))
    else:
        if (path / PART_MANIFEST).exists():
            verify(path, PART_MANIFEST)
        sealed = (path / PART_MANIFEST).exists()
        contents = Contents(
            files=accompanying_files(path),
            trainer=trainer_of(path),
            hub=read_hub(path, PART_MANIFEST) if sealed else None,
        )
        directory, left_out = path, []
        model = _load(path / MODEL_FILE) if (path / MODEL_FILE).exists() else None
        optimizers = {str(file): _load(file) for file in _optimizer_files(path)}
        if len(optimizers) > 1 and not listed(path, _CONTENTS):
            raise CheckpointError(
                f"{path} has {len(optimizers)} optimizers that castor did not write; convert them "
                f"one by one: give {next(iter(optimizers))} as the source"
            )
    weights, tied = ({}, {}) if model is None else _each_once(model, path)
    merged: dict[str, Any] = {"state": {}, "param_groups": []}
    for where, one in optimizers.items():
        named = _named(one, names, where)
        merged["state"] |= named["state"]
        merged["param_groups"] += named["param_groups"]
    states = states_of(merged, directory, None, str(path)) if optimizers else []
    return replace(contents, weights=weights, tied=tied, optimizers=states, left_out=left_out)


def is_torch_directory(path: Path) -> bool:
    """Whether a directory has files that read_torch takes."""
    return (path / MODEL_FILE).exists() or bool(_optimizer_files(path))


def _optimizer_files(directory: Path) -> list[Path]:
    found = [path for path in directory.iterdir() if _OPTIMIZER_FILE.fullmatch(path.name)]
    return sorted(found, key=lambda path: (len(path.name), path.name))


def _load(path: Path) -> dict[Any, Any]:
    """Loads a file of torch.save; its tensors are mapped from the file."""
    try:
        document = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, ValueError, OSError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"cannot read {path} by torch.load(weights_only=True, mmap=True): {error}"
        ) from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{path} holds a {type(document).__name__}, not a state dict")
    return dict(document)


def _each_once(model: Any, path: Path) -> tuple[dict[str, SavedTensor], dict[str, str]]:
    """Returns (weights, tied keys) of a model's state dict; keys with the same memory are tied."""
    if not isinstance(model, Mapping):
        raise CheckpointError(f"{path} has a {type(model).__name__} as model, not a state dict")
    check_savable(model)
    weights: dict[str, SavedTensor] = {}
    tied: dict[str, str] = {}
    key_of: dict[Any, str] = {}
    for key, tensor in model.items():
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        known = key_of.setdefault(place, key) if tensor.numel() else key
        if known == key:
            weights[key] = tensor
        else:
            tied[key] = known
    return weights, tied


def write_torch(contents: Contents, staging: Path, dtype: torch.dtype | None) -> None:
    """Writes model.pt, optimizer.pt and the files beside them.

    Several optimizers are written to optimizer-0.pt, optimizer-1.pt and so on.

    Raises:
        OSError: The disk refuses.
    """
    contents = in_memory_of_files(contents, staging)
    if contents.weights:
        _save(model_state(contents), staging / MODEL_FILE)
    several = len(contents.optimizers) > 1
    for i, state in enumerate(contents.optimizers):
        name = f"optimizer-{i}.pt" if several else "optimizer.pt"
        _save(by_position(state), staging / name)
    seal_torch(contents, staging, dtype)


def seal_torch(contents: Contents, staging: Path, dtype: torch.dtype | None) -> None:
    """Writes the files beside torch's: configs, castor-contents.json and the manifest.

    castor-contents.json has the facts that torch's layout does not hold.

    Raises:
        OSError: The disk refuses.
    """
    copy_files(contents.files, staging, dtype)
    if contents.optimizers:
        document = {
            "format": _CONTENTS_FORMAT,
            "optimizers": [state.description for state in contents.optimizers],
            "trainer": contents.trainer,
        }
        write_file(staging / _CONTENTS, [seal(document)])
    seal_part(staging, staging, {}, lambda name: False, contents.about)


def _save(document: dict[str, Any], path: Path) -> None:
    with errors_of_torch(path), open(path, "wb") as file:
        torch.save(document, file)


@contextmanager
def errors_of_torch(path: Path) -> Iterator[None]:
    """Raises the cause of a torch writer's failure, which torch hides behind exceptions of its own.

    Raises:
        OSError: The disk refused.
        CheckpointError: The writer failed for another reason.
    """
    try:
        yield
    # torch.save raises RuntimeError, torch.distributed.checkpoint an exception of its own base.
    except (Exception, CheckpointException) as error:
        refusal = _os_error_in(error)
        if refusal is not None:
            raise refusal from error
        raise CheckpointError(f"torch cannot write {path}: {error}") from error


def _os_error_in(error: BaseException | None) -> OSError | None:
    while error is not None:
        if isinstance(error, OSError):
            return error
        if isinstance(error, CheckpointException):
            for failure, _ in error.failures.values():
                return _os_error_in(failure)
        error = error.__cause__ or error.__context__
    return None
