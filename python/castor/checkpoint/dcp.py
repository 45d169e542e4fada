"""Directories of torch.distributed.checkpoint (DCP), written and read by torch's own classes."""

from __future__ import annotations

import io
import math
import pickle
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.state_dict_saver import save

from castor.checkpoint.container import ComputedTensor, SavedTensor
from castor.checkpoint.contents import Contents, accompanying_files
from castor.checkpoint.manifest import PART_MANIFEST, read_hub, read_tied, verify
from castor.checkpoint.torch_layout import (
    by_name,
    errors_of_torch,
    in_memory_of_files,
    model_state,
    seal_torch,
    states_of,
    trainer_of,
)
from castor.errors import CheckpointError

METADATA = ".metadata"
_MODEL, _OPTIMIZER = "model", "optimizer"

_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex"),
        *("StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath"},
    "pathlib._local": {"Path", "PosixPath"},
}
"""Classes that may be in `.metadata`, which is a pickle."""


class _MetadataUnpickler(pickle.Unpickler):
    """An unpickler of DCP's metadata that loads only the classes in _CLASSES and torch's dtypes."""

    def find_class(self, module: str, name: str) -> Any:
        known = name in _CLASSES.get(module, ())
        if known or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is none of DCP's classes")


class _Planner(DefaultLoadPlanner):
    """A planner that reads non-tensor entries without running code from the checkpoint."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


class _Reader:
    """A reader of a DCP directory, by the flat keys of its entries."""

    def __init__(self, directory: Path) -> None:
        """Reads and checks the metadata.

        Raises:
            CheckpointError: The metadata are damaged, or a file is missing or cut short.
        """
        self._directory = directory
        path = directory / METADATA
        try:
            with open(path, "rb") as file:
                metadata = _MetadataUnpickler(file).load()
            if not isinstance(metadata, Metadata):
                raise TypeError(f"it holds a {type(metadata).__name__}")
        # A damaged pickle may raise any exception.
        except Exception as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error
        self._metadata = metadata
        self._check()
        self._storage = FileSystemReader(directory)
        self._storage.set_up_storage_reader(metadata, True)

    @property
    def paths(self) -> dict[str, tuple[str | int, ...]]:
        """Path of each entry in the saved state dict, by flat key."""
        known = self._metadata.planner_data
        known = known if isinstance(known, dict) else {}
        return {key: known.get(key, (key,)) for key in self._metadata.state_dict_metadata}

    def _check(self) -> None:
        """Checks that all entries and boxes of tensors are there, in files that are long enough."""
        places = self._metadata.storage_data
        sizes: dict[str, int] = {}
        for index, place in places.items():
            name = place.relative_path
            path = self._directory / name
            if Path(name).name != name:
                raise CheckpointError(f"{self._directory} has '{index.fqn}' outside, in {name}")
            if name not in sizes:
                if not path.is_file():
                    raise CheckpointError(
                        f"{path} belongs to the checkpoint and is missing: '{index.fqn}' is in it"
                    )
                sizes[name] = path.stat().st_size
            if place.offset + place.length > sizes[name]:
                raise CheckpointError(
                    f"{path} was cut short: '{index.fqn}' ends at byte "
                    f"{place.offset + place.length}, the file at {sizes[name]}"
                )
        for key, entry in self._metadata.state_dict_metadata.items():
            if isinstance(entry, BytesStorageMetadata):
                there = MetadataIndex(key) in places
            else:
                boxes = [box for box in entry.chunks if MetadataIndex(key, box.offsets) in places]
                there = sum(math.prod(box.sizes) for box in boxes) == math.prod(entry.size)
            if not there:
                raise CheckpointError(f"{self._directory} lacks a part of '{key}'; it is damaged")

    def entry(self, key: str) -> Any:
        """Returns an entry: a tensor that is read when it is written, or any other value."""
        described = self._metadata.state_dict_metadata[key]
        if not isinstance(described, TensorStorageMetadata):
            return self._read(key, None)
        dtype, shape = described.properties.dtype, tuple(described.size)
        compute = partial(self._tensor, key, dtype, shape)
        return ComputedTensor(dtype=dtype, shape=shape, compute=compute)

    def value(self, key: str) -> Any:
        """Returns an entry, read now."""
        entry = self.entry(key)
        return entry.compute() if isinstance(entry, ComputedTensor) else entry

    def _tensor(self, key: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        target = torch.empty(shape, dtype=dtype)
        self._read(key, target)
        return target

    def _read(self, key: str, target: torch.Tensor | None) -> Any:
        planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
        wanted = {key: target}
        try:
            planner.set_up_planner(wanted, self._metadata, True)
            plan: LoadPlan = self._storage.prepare_local_plan(planner.create_local_plan())
            self._storage.read_data(plan, planner).wait()
        except Exception as error:  # torch's reader may raise any exception
            raise CheckpointError(
                f"cannot read '{key}' of {self._directory}: {type(error).__name__}: {error}"
            ) from error
        return wanted[key]


def read_dcp(directory: Path, names: Sequence[str] | None) -> Contents:
    """Reads what dcp.save wrote of {"model": ..., "optimizer": ...}, or of one of the two.

    A model's flat state dict may stand in place of {"model": ...}.

    Args:
        directory: The DCP directory.
        names: Names of the optimizer's parameters in its order, where the state has positions.

    Raises:
        CheckpointError: The checkpoint is damaged, or holds something else.
    """
    sealed = (directory / PART_MANIFEST).exists()
    if sealed:
        verify(directory, PART_MANIFEST)
    reader = _Reader(directory)
    tops = {path[0] for path in reader.paths.values()}
    flat = not tops & {_MODEL, _OPTIMIZER}
    weights: dict[str, SavedTensor] = {}
    document: dict[str, Any] = {"state": {}, "param_groups": []}
    left_out = set()
    for key, path in reader.paths.items():
        match (_MODEL, *path) if flat else path:
            case ("model", str(name)):
                weights[name] = _weight(reader.entry(key), name, directory)
            case ("optimizer", "state", str(name), str(entry)):
                document["state"].setdefault(name, {})[entry] = reader.entry(key)
            case ("optimizer", "param_groups", int(i), str(option)):
                groups = document["param_groups"]
                groups += [{} for _ in range(i + 1 - len(groups))]
                groups[i][option] = reader.value(key)
            case ("optimizer", "param_groups"):  # before torch 2.4
                document["param_groups"] = reader.value(key)
            case ("optimizer", *_):
                raise CheckpointError(
                    f"{directory} has '{key}' in its optimizer; what get_state_dict returns "
                    "without flatten_optimizer_state_dict is converted"
                )
            case (top, *_):
                left_out.add(str(top))
    if not weights and not document["param_groups"]:
        raise CheckpointError(
            f"{directory} holds {sorted(map(str, tops))[:5]}: neither 'model' nor 'optimizer', and "
            "no flat state dict of a model"
        )
    tied = read_tied(directory, PART_MANIFEST) if sealed else {}
    has_optimizer = bool(document["param_groups"])
    return Contents(
        weights={key: tensor for key, tensor in weights.items() if key not in tied},
        tied=tied,
        hub=read_hub(directory, PART_MANIFEST) if sealed else None,
        optimizers=states_of(document, directory, names, str(directory)) if has_optimizer else [],
        trainer=trainer_of(directory),
        files=accompanying_files(directory),
        left_out=sorted(left_out),
    )


def _weight(entry: Any, name: str, directory: Path) -> SavedTensor:
    if isinstance(entry, ComputedTensor):
        return entry
    raise CheckpointError(
        f"'{name}' of the model in {directory} is a {type(entry).__name__}, not a tensor; "
        "checkpoints of castor hold tensors alone"
    )


def write_dcp(contents: Contents, staging: Path, dtype: torch.dtype | None) -> None:
    """Writes {"model": ..., "optimizer": ...} as dcp.save writes the result of get_state_dict.

    Raises:
        OSError: The disk refuses.
    """
    contents = in_memory_of_files(contents, staging)
    state: dict[str, Any] = {}
    if contents.weights:
        state[_MODEL] = model_state(contents)
    if contents.optimizers:
        state[_OPTIMIZER] = by_name(contents.optimizers)
    writer = FileSystemWriter(staging, sync_files=False)  # seal_torch syncs the files
    with errors_of_torch(staging), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        save(state, storage_writer=writer, no_dist=True)
    seal_torch(contents, staging, dtype)
