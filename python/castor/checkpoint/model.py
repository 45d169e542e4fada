"""Models in the Hugging Face layout: written streaming, read tensor by tensor."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from castor.checkpoint.adapters import (
    WEIGHTS,
    check_no_loose_adapters,
    folder_of,
    own_tensors,
    write_adapter_config,
)
from castor.checkpoint.container import (
    SavedTensor,
    Tensors,
    bytes_of,
    check_savable,
    in_library_order,
    split,
)
from castor.checkpoint.documents import canonical
from castor.checkpoint.files import (
    OVERHEAD_BYTES,
    FileEntry,
    adopt_file,
    os_errors,
    write_file,
)
from castor.checkpoint.hub_names import ConvertedTensor, HubNames, hub_names_of, record_of
from castor.checkpoint.manifest import (
    PART_MANIFEST,
    RUN_MANIFEST,
    read_manifest,
    write_manifest,
)
from castor.checkpoint.reading import Reading, Saving, share_of, taken, write_of
from castor.checkpoint.shares import Share
from castor.checkpoint.snapshot import (
    full_adapters,
    full_dtensors,
    full_keys,
    full_model_tensors,
    local_targets,
    snapshot_weights,
)
from castor.checkpoint.staging import carry_over, staged
from castor.errors import CheckpointError
from castor.runtime.boosted_model import compiled_from, name_before_compile
from castor.runtime.engine import engines_holding
from castor.runtime.peft_model import is_peft_model
from castor.runtime.shards import own_class

INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_OURS = re.compile(
    r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json"
    r"|config\.json|generation_config\.json|castor-manifest\.json"
    r"|adapter_model\.safetensors|adapter_config\.json"
)


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns parameters and persistent buffers by state_dict key, as the model's own objects.

    Raises:
        CheckpointError: The state dict holds something that no safetensors file can.
    """
    # Where torch.compile has wrapped a module, files have the names from before.
    state: dict[str, torch.Tensor] = {
        name_before_compile(key): tensor for key, tensor in model.state_dict(keep_vars=True).items()
    }
    for key in state:
        if key.endswith("_extra_state"):
            raise CheckpointError(
                f"'{key}' is extra state of a module (get_extra_state), which checkpoints do not "
                "hold; keep it as a buffer, or pass it to booster.save as extra"
            )
    check_savable(state)
    return state


def kept_keys(model: nn.Module, tensors: Mapping[str, int]) -> set[str]:
    """Returns the keys that tensors are written under: one key for each tensor.

    A tied tensor keeps the key that transformers ties the others to, or else its first key.

    Args:
        model: Tells the keys that transformers ties to others.
        tensors: Number of the tensor for each key; tied keys have the same number.
    """
    tied_to_others = set(getattr(model, "all_tied_weights_keys", None) or ())
    key_of: dict[int, str] = {}
    for key, tensor in tensors.items():
        known = key_of.setdefault(tensor, key)
        if known in tied_to_others and key not in tied_to_others:
            key_of[tensor] = key
    return set(key_of.values())


def tied_keys(model: nn.Module) -> dict[str, str]:
    """Maps each key that is not written to the key that its tensor is written under.

    With pipeline parallelism the keys are those of the full model.
    """
    model = compiled_from(model)
    numbers = _numbers(model, state_of(model))
    kept = {numbers[key]: key for key in kept_keys(model, numbers)}
    return {key: kept[number] for key, number in numbers.items() if kept[number] != key}


def _numbers(model: nn.Module, state: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Numbers the tensors by key; with pipeline parallelism, the tensors of all stages."""
    for engine in engines_holding(model):
        if engine.model_shards and engine.model_shards.full_model:
            full = engine.model_shards.full_model.tensors
            return {key: number for key, (number, _) in full.items()}
    return {key: id(tensor) for key, tensor in state.items()}


def tensors_of(model: nn.Module, share: Share | None) -> dict[str, SavedTensor]:
    """Returns a model's tensors to write, by key; boosted ones are read from host storage.

    The call is collective where ranks have shards of the model.

    Args:
        model: Boosted or not.
        share: This rank's share of the work; None: this process does all of it.
    """
    model = compiled_from(model)
    for engine in engines_holding(model):
        engine.session.move_to_host()
    state = state_of(model)
    kept = kept_keys(model, _numbers(model, state))
    saved = _in_turn(model, state, share)
    return {key: tensor for key, tensor in saved.items() if key in kept}


def save_model(
    model: nn.Module,
    directory: Path,
    *,
    max_bytes: int | None,
    tokenizer: Any = None,
    reading: Reading | None = None,
) -> Saving:
    """Writes a model to a directory of its own; see Booster.save_model.

    Args:
        model: Boosted or not.
        directory: Directory to write; replaced as a whole if it exists, but files that castor did
            not write stay.
        max_bytes: Bytes of tensors in one file; None: one file.
        tokenizer: Anything with save_pretrained.
        reading: The snapshot that the save reads, where training goes on meanwhile or several
            ranks write; None: this process writes alone, and training waits.

    Raises:
        CheckpointError: The model holds something that cannot be saved.
        IoError: The disk refuses; `directory` is what it was.
    """
    model = compiled_from(model)
    check_no_loose_adapters(model)
    if is_peft_model(model):
        yield from _save_adapters(model, directory, tokenizer, reading)
        return
    tensors, names = taken(reading, tensors_of(model, share_of(reading))), hub_names_of(model)
    if names is not None:
        tensors = names.in_files(tensors)
    about = about_model(model, tensors, names, in_files=True)
    files = model_files(tensors, max_bytes, names)
    needed = bytes_of(tensors) + OVERHEAD_BYTES
    if reading is not None and reading.follows:
        yield directory
        reading.follow(directory, needed, files)
        return
    with staged(directory, needed) as staging:
        write_configs(model, staging, tokenizer)
        yield directory
        written = write_of(reading)(staging, files)
        write_model(files, written, staging, directory, about, names)


def about_model(
    model: nn.Module, tensors: Tensors, names: HubNames | None, *, in_files: bool
) -> dict[str, Any]:
    """Returns the facts about a model that its manifest has besides the list of files.

    Args:
        model: The model that is written.
        tensors: The model's tensors by the names that they are written under.
        names: See hub_names_of.
        in_files: Whether these are the names of save_pretrained.
    """
    hub = None if names is None else record_of(names.layout, tensors, in_files=in_files)
    return {"tied": tied_keys(model), "hub": hub}


def model_files(
    tensors: Tensors, max_bytes: int | None, names: HubNames | None
) -> dict[str, dict[str, SavedTensor]]:
    """Divides a model's weights over the files of its directory.

    Args:
        tensors: Tensors by key in the files.
        max_bytes: Bytes of tensors in one file, see split.
        names: See hub_names_of. For a model of transformers, a file's tensors are in the order of
            the safetensors library.

    Returns:
        Tensors by file name.
    """
    files = split(tensors, "model", max_bytes, _shared_memory)
    if names is None:
        return files
    return {name: in_library_order(shard) for name, shard in files.items()}


def _shared_memory(tensor: SavedTensor) -> tuple[int, int] | None:
    return tensor.memory if isinstance(tensor, ConvertedTensor) else None


def _save_adapters(
    model: nn.Module, directory: Path, tokenizer: Any, reading: Reading | None
) -> Saving:
    """Writes the adapters of a PeftModel, one file each, without the base model."""
    engines, state = engines_holding(model), state_of(model)
    known = full_adapters(engines)
    for engine in engines if known else ():
        state = local_targets(engine, state)[0]
    found = own_tensors(model, state, known)
    for of_adapter in found.values():
        check_savable(of_adapter)
    for engine in engines:
        engine.session.move_to_host()
    order = known or found
    adapters = {
        adapter: taken(reading, _in_turn(model, of_adapter, share_of(reading), order[adapter]))
        for adapter, of_adapter in found.items()
    }
    files = {str(Path(folder_of(name), WEIGHTS)): tensors for name, tensors in adapters.items()}
    needed = OVERHEAD_BYTES + sum(map(bytes_of, files.values()))
    if reading is not None and reading.follows:
        yield directory
        reading.follow(directory, needed, files)
        return
    with staged(directory, needed) as staging:
        for adapter in adapters:
            folder = staging / folder_of(adapter)
            folder.mkdir(exist_ok=True)
            write_adapter_config(model, adapter, folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(staging)
        yield directory
        seal_part(staging, directory, write_of(reading)(staging, files), _is_ours)


def write_model(
    shards: Mapping[str, Tensors],
    entries: dict[str, FileEntry],
    staging: Path,
    previous: Path,
    about: Mapping[str, Any],
    names: HubNames | None = None,
) -> FileEntry:
    """Completes a model's directory: the index of several files, the user's files, the manifest.

    Args:
        shards: Weights by file name.
        entries: Manifest entries of these files, which have been written.
        staging: Directory that has these files, and those of write_configs.
        previous: Directory that will be replaced.
        about: See about_model.
        names: See hub_names_of; None: the index need not be the one that transformers writes.

    Returns:
        The entry of the directory's manifest.

    Raises:
        OSError: The disk refuses.
    """
    index = write_index(shards, staging, names)
    if index is not None:
        entries[INDEX] = index
    return seal_part(staging, previous, entries, _is_ours, about)


def write_index(
    shards: Mapping[str, Tensors], directory: Path, names: HubNames | None
) -> FileEntry | None:
    """Writes the index of several files of weights; returns its entry, None for a single file.

    Args:
        shards: Weights by file name.
        directory: Directory of the files.
        names: See hub_names_of; None: the index need not be the one that transformers writes.

    Raises:
        OSError: The disk refuses.
    """
    if len(shards) == 1:
        return None
    weight_map = {key: name for name, tensors in shards.items() for key in tensors}
    metadata = {"total_size": sum(map(bytes_of, shards.values()))}
    if names is None:
        text = canonical({"metadata": metadata, "weight_map": weight_map})
    else:
        metadata["total_parameters"] = names.layout.num_parameters
        index = {"metadata": metadata, "weight_map": weight_map}
        text = (json.dumps(index, indent=2, sort_keys=True) + "\n").encode("ascii")
    return write_file(directory / INDEX, [text])


def _is_ours(name: str) -> bool:
    return _OURS.fullmatch(name) is not None


def _in_turn(
    model: nn.Module,
    state: dict[str, torch.Tensor],
    share: Share | None,
    order: Iterable[str] | None = None,
) -> dict[str, SavedTensor]:
    """Replaces boosted parameters and ranks' shards by tensors that are read when written.

    Args:
        model: The model of the tensors.
        state: Tensors by key in the file.
        share: This rank's share of the work.
        order: All keys in the file, where each rank has some of them; None: those of the model.
    """
    saved = full_dtensors(model, state, "model")
    for engine in engines_holding(model):
        for key, tensor in state.items():
            if isinstance(tensor, nn.Parameter) and tensor in engine.index_of:
                saved[key] = snapshot_weights(engine, tensor)
        if engine.model_shards is not None:
            assert share is not None
            keys = full_keys(engine) if order is None else order
            saved = full_model_tensors(engine, saved, state.get, share, keys)
    return saved


def write_configs(model: nn.Module, staging: Path, tokenizer: Any) -> None:
    """Writes the model's configs, where it has any, and the tokenizer, for from_pretrained."""
    model = compiled_from(model)
    config: Any = getattr(model, "config", None)
    # A PeftModel has the config of its base model, whose keys differ from its own.
    if hasattr(config, "save_pretrained") and not is_peft_model(model):
        config = copy.deepcopy(config)
        config.architectures = [own_class(model).__name__]
        config.dtype = str(getattr(model, "dtype", torch.float32)).removeprefix("torch.")
        config.save_pretrained(staging)
        generation: Any = getattr(model, "generation_config", None)
        if generation is not None and model.can_generate():  # type: ignore[operator]
            generation.save_pretrained(staging)
    if tokenizer is not None:
        tokenizer.save_pretrained(staging)


def seal_part(
    staging: Path,
    previous: Path,
    entries: dict[str, FileEntry],
    is_ours: Callable[[str], bool],
    about: Mapping[str, Any] | None = None,
) -> FileEntry:
    """Writes the manifest of a model's or an optimizer's directory; returns the manifest's entry.

    Files that others wrote into `staging` (configs, a tokenizer) are synced and checksummed. Files
    that users keep in `previous` are carried over, with their checksums in its manifest.

    Args:
        staging: Directory that will replace `previous`.
        previous: Directory that will be replaced; may be missing.
        entries: Manifest entries of the files that castor wrote, by path; completed in place.
        is_ours: Returns whether castor writes files of a name; such files are not carried over.
        about: Other facts for the manifest, see write_manifest.

    Raises:
        OSError: The disk refuses.
    """
    for path in sorted(staging.rglob("*")):
        name = str(path.relative_to(staging))
        if path.is_file() and name not in entries:
            entries[name] = adopt_file(path)
    carried = carry_over(previous, staging, is_ours)
    if carried and (previous / PART_MANIFEST).exists():
        known = read_manifest(previous, PART_MANIFEST)
        entries |= {name: known[name] for name in carried if name in known}
    return write_manifest(staging, PART_MANIFEST, entries, about)


def _what_to_load(directory: Path) -> str:
    """Returns what to load in place of a path without weights, as the end of a message."""
    runs = [step for step in (directory, *sorted(directory.glob("step-*"))) if step.is_dir()]
    models = [step / "model" for step in runs if (step / RUN_MANIFEST).exists()]
    if models:
        return f". It is a run: booster.load reads it, and booster.load_model {models[-1]}"
    pickled = directory if directory.is_file() else directory / "pytorch_model.bin"
    if pickled.exists():
        return (
            f". castor reads no pickle: castor convert {pickled} TARGET --to hf writes the "
            "weights as safetensors"
        )
    return "" if directory.exists() else ". There is no such directory"


def weight_files(directory: Path) -> list[Path]:
    """Returns the safetensors files of a model's directory, written by castor or others.

    Raises:
        CheckpointError: There are no such files, or the index is damaged.
    """
    index = directory / INDEX
    with os_errors(index, "read"):
        if not index.exists():
            single = directory / SINGLE_FILE
            if not single.exists():
                raise CheckpointError(
                    f"{directory} holds no checkpoint: neither {SINGLE_FILE} nor {INDEX} is there"
                    f"{_what_to_load(directory)}"
                )
            return [single]
        raw = index.read_bytes()
    try:
        names = sorted(set(json.loads(raw)["weight_map"].values()))
        valid = all(Path(name).name == name for name in names)
    except (ValueError, TypeError, KeyError, AttributeError):
        valid = False
    if not valid:
        raise CheckpointError(f"{index} is damaged: it has no 'weight_map' of keys to file names")
    return [directory / name for name in names]
