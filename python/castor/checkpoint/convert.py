"""Conversion of checkpoints from one layout to another, tensor by tensor."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

from castor.checkpoint.adapters import CONFIG as ADAPTER_CONFIG
from castor.checkpoint.changes import (
    BuildModel,
    by_parameter,
    check_states,
    hub_names_in,
    in_dtype,
    in_names_of_model,
    in_order,
    with_ties,
)
from castor.checkpoint.container import ComputedTensor, values_of
from castor.checkpoint.contents import (
    Contents,
    files_of_model,
    read_castor_optimizer,
    read_hf,
    read_run,
    room_for,
    write_castor,
    write_hf,
)
from castor.checkpoint.dcp import METADATA, read_dcp, write_dcp
from castor.checkpoint.files import os_errors
from castor.checkpoint.hub_names import HubNames, record_of
from castor.checkpoint.manifest import RUN_MANIFEST
from castor.checkpoint.optimizer import DESCRIPTION
from castor.checkpoint.run import TRAINER_FORMAT
from castor.checkpoint.staging import recover, staged
from castor.checkpoint.torch_layout import is_torch_directory, read_torch, write_torch
from castor.config.names import Precision
from castor.errors import CheckpointError
from castor.runtime.engine import WORKING_DTYPES

Kind = Literal["run", "optimizer", "hf", "dcp", "torch"]
Layout = Literal["hf", "torch", "dcp", "castor"]

_NAMES: dict[Kind, str] = {
    "run": "castor run",
    "optimizer": "castor optimizer",
    "hf": "Hugging Face model",
    "dcp": "torch.distributed.checkpoint",
    "torch": "torch.save",
}
_STEP = re.compile(r"step-\d{8,}")
_ZIP = b"PK\x03\x04"


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """The result of a conversion."""

    kind: str
    """Kind of the source, in words."""
    num_weights: int
    num_states: int
    """Number of parameters with optimizer states."""
    bytes: int
    """Bytes of all tensors."""
    left_out: list[str]
    """Names that the source has and the target lacks."""

    def describe(self, source: Path, target: Path, to: str) -> str:
        """Returns a line for the terminal."""
        held = [f"{self.num_weights} weights"] if self.num_weights else []
        held += [f"states of {self.num_states} parameters"] if self.num_states else []
        text = f"{source} ({self.kind}) -> {target} ({to}): {', '.join(held)}, {self.bytes} bytes"
        return text + (f"; left out: {', '.join(self.left_out)}" if self.left_out else "")


def convert(
    source: Path,
    target: Path,
    to: Layout,
    *,
    dtype: Precision | None = None,
    max_bytes: int | None = None,
    tie: Sequence[str] = (),
    names: Sequence[str] | None = None,
    weights_only: bool = False,
    force: bool = False,
    build: BuildModel | None = None,
) -> Conversion:
    """Writes the checkpoint at `source` to `target`, in another layout.

    The target appears as a whole, or not at all. Beside the kernel's page cache, the conversion
    takes memory for a few tensors.

    Args:
        source: Path of the checkpoint, whose kind is found from its contents.
        target: Directory to write.
        to: Layout of the target.
        dtype: Dtype of the weights. "fp32" replaces weights by their masters, where there are any.
            A 16-bit type rounds float32 weights as a boosted model does, and keeps the exact values
            as masters in the states. None: the weights stay as they are.
        max_bytes: Bytes of tensors in one safetensors file; None: one file.
        tie: Ties as "KEY=OTHER": KEY is another state_dict key of the weight OTHER.
        names: Names of the optimizer's parameters in its order, where the source has none.
        weights_only: Whether to leave out optimizers and everything else of a run.
        force: Whether to replace a checkpoint that is there.
        build: Builds transformers' model of a config.json, where names differ between files and
            model.

    Raises:
        CheckpointError: The source is damaged, of no known kind, or lacks something that the target
            needs; or the target exists. `target` is what it was.
        IoError: The disk refuses. `target` is what it was.
        ValueError: `max_bytes` is given for a layout that is not divided by size.
    """
    source, target = source.resolve(), target.resolve()
    kind = kind_of(source)
    _check_target(source, target, force=force)
    if max_bytes is not None and to not in ("hf", "castor"):
        raise ValueError(f"the {to} layout is not divided by size; leave --shard-size out")
    with os_errors(source, "read"):
        contents = _read(kind, source, names)
    own_names = True
    if kind == "hf" and source.is_dir():
        contents, own_names = in_names_of_model(contents, source, build, needed=to != "hf")
    if weights_only:
        contents = _without_states(contents)
    contents = with_ties(contents, tie)
    if kind != "run":
        check_states(contents, source)
    if dtype is not None:
        contents = in_dtype(contents, WORKING_DTYPES[dtype], source)
    contents = _fitting(contents, to, source)
    spilled = room_for(contents) if to in ("dcp", "torch") and _computes(contents) else 0
    hub = None
    if to == "hf":
        contents, hub = _in_files(contents, build if own_names else None)
    with staged(target, room_for(contents) + spilled) as staging:
        written = None if dtype is None else WORKING_DTYPES[dtype]
        if to == "hf":
            write_hf(contents, staging, max_bytes, written, hub)
        elif to == "castor":
            write_castor(contents, staging, max_bytes, written)
        elif to == "dcp":
            write_dcp(contents, staging, written)
        else:
            write_torch(contents, staging, written)
    return Conversion(
        kind=_NAMES[kind],
        num_weights=len(contents.weights),
        num_states=sum(len(by_parameter(state)) for state in contents.optimizers),
        bytes=contents.bytes,
        left_out=contents.left_out,
    )


def checked_layout(name: str) -> Layout:
    """Returns the layout of that name.

    Raises:
        ValueError: There is no such layout.
    """
    for layout in get_args(Layout):
        if name == layout:
            return cast(Layout, layout)
    raise ValueError(f"--to {name}: give one of {', '.join(get_args(Layout))}")


def checked_precision(name: str) -> Precision:
    """Returns the precision of that name.

    Raises:
        ValueError: There is no such precision.
    """
    for precision in WORKING_DTYPES:
        if name == precision:
            return precision
    raise ValueError(f"--dtype {name}: give one of {', '.join(WORKING_DTYPES)}")


# --- the source ---------------------------------------------------------------------------------


def kind_of(path: Path) -> Kind:
    """Returns the kind of checkpoint at a path, by its contents.

    Raises:
        CheckpointError: There is no checkpoint that castor converts.
    """
    with os_errors(path, "read"):
        kind = _kind_of_file(path) if path.is_file() else _kind_of_directory(path)
    if kind is not None:
        return kind
    found = "nothing"
    if path.is_file():
        found = "a file of another kind"
    elif path.is_dir():
        names = sorted(entry.name for entry in path.iterdir())
        found = f"{', '.join(names[:6])}{', ...' if len(names) > 6 else ''}" or "an empty directory"
    raise CheckpointError(
        f"{path} is no checkpoint that castor converts ({found}); it reads a run (of booster.save) "
        f"or one of its steps, an optimizer ({DESCRIPTION}), a model (model.safetensors or shards "
        f"with an index), torch.distributed.checkpoint ({METADATA}), and files of torch.save "
        "(model.pt and optimizer.pt in a directory, or any one)"
    )


def _kind_of_file(path: Path) -> Kind | None:
    if path.suffix == ".safetensors":
        return "hf"
    with open(path, "rb") as file:
        return "torch" if file.read(len(_ZIP)) == _ZIP else None


def _kind_of_directory(path: Path) -> Kind | None:
    recover(path)
    if not path.is_dir():
        return None
    if (path / RUN_MANIFEST).exists():
        return "run"
    if (path / DESCRIPTION).exists():
        return "optimizer"
    if (path / METADATA).exists():
        return "dcp"
    if files_of_model(path):
        return "hf"
    if is_torch_directory(path):
        return "torch"
    if (path / ADAPTER_CONFIG).exists():
        raise CheckpointError(
            f"{path} holds an adapter of PEFT, which PeftModel.from_pretrained reads as it is; "
            "castor convert takes whole models"
        )
    steps = (one.name for one in path.iterdir())
    return "run" if any(map(_STEP.fullmatch, (path.name, *steps))) else None


def _check_target(source: Path, target: Path, *, force: bool) -> None:
    if source == target or source in target.parents or target in source.parents:
        raise CheckpointError(
            f"{target} and the source {source} are in one another; write elsewhere, so that the "
            "source stays as it is"
        )
    recover(target)
    if not target.exists():
        return
    if not force:
        raise CheckpointError(f"{target} exists; name another target, or replace it with --force")
    try:
        kind_of(target)
    except CheckpointError as error:
        raise CheckpointError(f"--force replaces checkpoints only: {error}") from error


def _read(kind: Kind, source: Path, names: Sequence[str] | None) -> Contents:
    if kind == "torch":
        contents = read_torch(source, names)
    elif kind == "dcp":
        contents = read_dcp(source, names)
    elif kind == "run":
        contents = read_run(source)
    else:
        contents = read_castor_optimizer(source) if kind == "optimizer" else read_hf(source)
    if names is not None and (kind not in ("torch", "dcp") or not contents.optimizers):
        raise CheckpointError(f"{source} holds no optimizer without names; leave --names out")
    return contents


# --- the target ---------------------------------------------------------------------------------


def _without_states(contents: Contents) -> Contents:
    there = contents.left_out.copy()
    if contents.optimizers:
        there.append(f"states of {len(contents.optimizers)} optimizer(s)")
    if contents.trainer is not None:
        there.append("trainer (scheduler, data position, random states)")
    return replace(contents, optimizers=[], trainer=None, left_out=there)


def _fitting(contents: Contents, to: Layout, source: Path) -> Contents:
    """Returns the contents without the parts that a layout does not hold, with those it needs."""
    if to == "hf":
        if not contents.weights:
            raise CheckpointError(f"{source} has no weights, which are all that --to hf holds")
        return _without_states(contents)
    if to != "castor" or contents.trainer is not None:
        return contents
    if not contents.optimizers:
        raise CheckpointError(
            f"{source} has no optimizer, and no run goes on from weights alone; use --to hf, which "
            "booster.load_model reads"
        )
    if contents.weights:
        return replace(contents, trainer=_trainer(contents))
    if len(contents.optimizers) > 1:
        raise CheckpointError(
            f"{source} has {len(contents.optimizers)} optimizers without a model; convert one by "
            "one"
        )
    return contents


def _in_files(contents: Contents, build: BuildModel | None) -> tuple[Contents, HubNames | None]:
    """Renames weights as in save_pretrained's files; returns the contents and the names' layout."""
    names = hub_names_in(contents, build)
    contents = in_order(contents, names)
    if names is None:
        return contents, None
    weights = names.in_files(contents.weights)
    return replace(
        contents, weights=weights, hub=record_of(names.layout, weights, in_files=True)
    ), names


def _trainer(contents: Contents) -> dict[str, Any]:
    """Makes the trainer document of a run without one, from the optimizers' step counts alone."""
    counts = [0.0]
    for state in contents.optimizers:
        counts += [
            float(values_of(tensor))
            for key, tensor in state.tensors.items()
            if key.rpartition(".")[2] == "step"
        ]
        numbers = (entry.get("step", 0) for entry in state.description["state"].values())
        counts += [float(number) for number in numbers]
    return {
        "format": TRAINER_FORMAT,
        "step": int(max(counts)),
        "skipped_steps": 0,
        "lr_scheduler": None,
        "extra": None,
        "dataloader": None,
        "rng": None,
        "other_ranks": [],
    }


def _computes(contents: Contents) -> bool:
    tensors = [*contents.weights.values()]
    tensors += [tensor for state in contents.optimizers for tensor in state.tensors.values()]
    return any(isinstance(tensor, ComputedTensor) for tensor in tensors)
