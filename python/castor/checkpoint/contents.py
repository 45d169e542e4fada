"""The contents of a checkpoint, and how a conversion reads and writes them.

This module has castor's and Hugging Face's layouts.
"""

from __future__ import annotations

import json
import mmap
import shutil
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from castor.checkpoint.container import (
    ComputedTensor,
    SavedTensor,
    StoredTensor,
    bytes_of,
    memory_of,
    read_header,
    read_headers,
    write_files,
)
from castor.checkpoint.files import OVERHEAD_BYTES
from castor.checkpoint.hub_names import HubNames
from castor.checkpoint.manifest import (
    PART_MANIFEST,
    RUN_MANIFEST,
    read_hub,
    read_manifest,
    read_tied,
    verify,
)
from castor.checkpoint.model import model_files, weight_files, write_model
from castor.checkpoint.optimizer import DESCRIPTION, FORMAT, OptimizerState, write_optimizer
from castor.checkpoint.run import find, optimizer_parts, parts_and_files, read_trainer, seal_run
from castor.errors import CheckpointError

_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".distcp", ".msgpack", ".h5", ".onnx", ".gguf"}
_DESCRIBES_WEIGHTS = (".index.json",)
_OWN = {PART_MANIFEST, RUN_MANIFEST, DESCRIPTION, "trainer.json", "castor-contents.json"}
_OF_TRAINERS = {"trainer_state.json", ".metadata", ".gitattributes"}


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The contents of a checkpoint, whose tensors stay in its files until they are written."""

    weights: dict[str, SavedTensor] = field(default_factory=dict)
    """Tensors of the model by state_dict key; each tensor appears once."""
    tied: dict[str, str] = field(default_factory=dict)
    """Other state_dict keys of the same tensors, each with its key in `weights`."""
    optimizers: list[OptimizerState] = field(default_factory=list)
    hub: dict[str, Any] | None = None
    """Layout of save_pretrained: see castor.checkpoint.manifest.read_hub."""
    trainer: dict[str, Any] | None = None
    """Document of a run's trainer.json."""
    files: list[Path] = field(default_factory=list)
    """Files beside the weights: configs, a tokenizer."""
    left_out: list[str] = field(default_factory=list)
    """Names that the source has and the target will not have."""

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return bytes_of(self.weights) + sum(bytes_of(state.tensors) for state in self.optimizers)

    @property
    def about(self) -> dict[str, Any]:
        """Facts about the model for the manifest: see castor.checkpoint.model.about_model."""
        return {"tied": self.tied, "hub": self.hub}

    def weight(self, name: str) -> str | None:
        """Returns a parameter's key in `weights`, given any of its names; None: it has none."""
        key = self.tied.get(name, name)
        return key if key in self.weights else None


# --- tensors in files ---------------------------------------------------------------------------


def mapped(stored: Mapping[str, StoredTensor]) -> dict[str, SavedTensor]:
    """Maps the tensors' files into memory, which the kernel fills on access and may reclaim.

    The tensors cannot be written. The files must have been checked by read_headers. If a file is
    cut short after that, reading the lost bytes is a bus error.
    """
    maps: dict[Path, mmap.mmap] = {}
    for path in {tensor.path for tensor in stored.values() if tensor.end > tensor.start}:
        with open(path, "rb") as file:
            maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    found: dict[str, SavedTensor] = {}
    for name, tensor in stored.items():
        if tensor.end == tensor.start:
            found[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        elif tensor.start % tensor.dtype.itemsize:
            read = partial(_copied, maps[tensor.path], tensor)
            found[name] = ComputedTensor(dtype=tensor.dtype, shape=tensor.shape, compute=read)
        else:
            flat = _flat(maps[tensor.path], tensor)
            found[name] = flat.view(tensor.dtype).view(tensor.shape)
    return found


def _flat(memory: mmap.mmap, tensor: StoredTensor) -> torch.Tensor:
    with warnings.catch_warnings():
        # The warning says that the memory cannot be written, and nobody writes it.
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        return torch.frombuffer(
            memory, dtype=torch.uint8, count=tensor.end - tensor.start, offset=tensor.start
        )


def _copied(memory: mmap.mmap, tensor: StoredTensor) -> torch.Tensor:
    """Returns a copy of a tensor whose bytes are not aligned to its dtype."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype)
    memory_of(copy)[:] = memoryview(memory)[tensor.start : tensor.end]
    return copy


def in_files(tensors: Mapping[str, SavedTensor], scratch: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors in mapped files, for writers that take all of them at once.

    Args:
        tensors: Tensors by name.
        scratch: Path of a file for the computed tensors, which are made one at a time. The file
            is unlinked before the function returns, and its space is free when the tensors go.

    Raises:
        OSError: The disk refuses.
    """
    computed = {key: one for key, one in tensors.items() if isinstance(one, ComputedTensor)}
    own: dict[str, SavedTensor] = {}
    if computed:
        write_files(scratch.parent, {scratch.name: computed}, durable=False)
        own = mapped(read_header(scratch))
        scratch.unlink()
    return {key: _plain(own.get(key, tensor)) for key, tensor in tensors.items()}


def _plain(tensor: SavedTensor) -> torch.Tensor:
    assert isinstance(tensor, torch.Tensor)  # write_files aligns what it writes
    return tensor


# --- castor's and Hugging Face's layouts --------------------------------------------------------


def read_hf(path: Path) -> Contents:
    """Reads a model's directory, written by castor or others, or one safetensors file."""
    if path.is_file():
        return Contents(weights=mapped(read_header(path)))
    sealed = (path / PART_MANIFEST).exists()
    if sealed:
        verify(path, PART_MANIFEST)
    return Contents(
        weights=mapped(read_headers(weight_files(path))),
        tied=read_tied(path, PART_MANIFEST) if sealed else {},
        hub=read_hub(path, PART_MANIFEST) if sealed else None,
        files=accompanying_files(path),
    )


def read_castor_optimizer(path: Path) -> Contents:
    """Reads an optimizer's directory, as booster.save_optimizer writes it."""
    verify(path, PART_MANIFEST)
    return Contents(optimizers=[_read_optimizer(path)])


def read_run(path: Path) -> Contents:
    """Reads a run's checkpoint, as booster.save writes it; takes the same `path` as booster.load.

    Raises:
        CheckpointError: The checkpoint is missing or damaged, or its model is a PEFT adapter.
    """
    directory = find(path)
    verify(directory, RUN_MANIFEST)
    model = directory / "model"
    if (model / "adapter_config.json").exists() or not files_of_model(model):
        raise CheckpointError(
            f"{model} holds adapters of PEFT, which PeftModel.from_pretrained reads as they are; "
            "castor convert takes whole models: merge the adapters and save that"
        )
    return Contents(
        weights=mapped(read_headers(weight_files(model))),
        tied=read_tied(model, PART_MANIFEST),
        hub=read_hub(model, PART_MANIFEST),
        optimizers=[_read_optimizer(directory / part) for part in optimizer_parts(directory)],
        trainer=read_trainer(directory),
        files=accompanying_files(model),
    )


def files_of_model(directory: Path) -> bool:
    """Whether a directory has a full model's weights as safetensors files."""
    return any(directory.glob("model*.safetensors"))


def _read_optimizer(directory: Path) -> OptimizerState:
    description = json.loads((directory / DESCRIPTION).read_bytes())
    if description.get("format") != FORMAT:
        raise CheckpointError(
            f"{directory / DESCRIPTION} has format {description.get('format')!r}; {FORMAT!r} is "
            "read"
        )
    stored = read_headers([directory / name for name in description.pop("files")])
    return OptimizerState(tensors=mapped(stored), description=description)


def accompanying_files(directory: Path) -> list[Path]:
    """Returns the files of a model's directory that are neither weights nor castor's own."""
    return [
        path
        for path in sorted(directory.iterdir())
        if path.is_file()
        and path.suffix not in _WEIGHTS
        and not path.name.endswith(_DESCRIBES_WEIGHTS)
        and path.name not in _OWN | _OF_TRAINERS
    ]


def listed(directory: Path, name: str) -> bool:
    """Whether a verified directory has a castor manifest that lists the file `name`."""
    return (directory / PART_MANIFEST).exists() and name in read_manifest(directory, PART_MANIFEST)


def copy_files(files: Iterable[Path], directory: Path, dtype: torch.dtype | None) -> None:
    """Copies files that lie beside the weights into `directory`.

    With a `dtype`, the copied config.json names it as the weights' dtype.
    """
    for path in files:
        target = directory / path.name
        shutil.copyfile(path, target)
        if path.name == "config.json" and dtype is not None:
            config = json.loads(path.read_bytes())
            for key in ("dtype", "torch_dtype"):
                if key in config:
                    config[key] = str(dtype).removeprefix("torch.")
            text = json.dumps(config, indent=2, sort_keys=True) + "\n"
            target.write_text(text, encoding="utf-8")


def write_hf(
    contents: Contents,
    staging: Path,
    max_bytes: int | None,
    dtype: torch.dtype | None,
    names: HubNames | None,
) -> None:
    """Writes a model's directory as booster.save_model does.

    Args:
        contents: Checkpoint whose weights have their names in files.
        staging: Directory to write into.
        max_bytes: Bytes of tensors in one file; None: one file.
        dtype: The weights' dtype, for the config; None: the config stays as it is.
        names: Layout that gave the weights their names; None: the model is not transformers'.
    """
    copy_files(contents.files, staging, dtype)
    files = model_files(contents.weights, max_bytes, names)
    write_model(files, write_files(staging, files), staging, staging, contents.about, names)


def write_castor(
    contents: Contents, staging: Path, max_bytes: int | None, dtype: torch.dtype | None
) -> None:
    """Writes a run as booster.save does, or one optimizer as booster.save_optimizer does.

    The contents are a run where they have a trainer.
    """
    states = contents.optimizers
    if contents.trainer is None:
        (state,) = states
        files = state.files(max_bytes)
        write_optimizer(state, write_files(staging, files), staging, staging)
        return
    parts, files = parts_and_files(contents.weights, states, max_bytes)
    for part in parts:
        (staging / part).mkdir()
    copy_files(contents.files, staging / "model", dtype)
    written = write_files(staging, files)
    seal_run(staging, staging, parts, states, contents.trainer, contents.about, written)


def room_for(contents: Contents) -> int:
    """Returns an upper bound of the bytes that a target takes, in any layout."""
    sizes = sum(path.stat().st_size for path in contents.files)
    count = len(contents.weights) + sum(len(state.tensors) for state in contents.optimizers)
    return contents.bytes + sizes + 2 * OVERHEAD_BYTES + 4096 * count
