"""Writes a model, a run or its adapters as a folder that other programs load."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from castor.checkpoint.adapters import CONFIG, WEIGHTS
from castor.checkpoint.container import ComputedTensor, Tensors, bytes_of, read_header, write_files
from castor.checkpoint.contents import mapped
from castor.checkpoint.files import OVERHEAD_BYTES, fsync_file
from castor.checkpoint.hub_names import hub_names_of
from castor.checkpoint.model import kept_keys, model_files, write_configs, write_index
from castor.checkpoint.staging import recover, staged
from castor.errors import UsageError
from castor.lazy import is_lazy, value_of
from castor.recipes.export import Export
from castor.recipes.model_card import Card, base_name, write_card
from castor.recipes.models import (
    check_vocabulary,
    find_model,
    find_weights,
    holds_adapters,
    load_tokenizer,
    load_weights,
    read_json,
    with_adapters,
)

# --- The weights of a model folder, into which adapters are merged one tensor at a time -----------


@dataclass(frozen=True, kw_only=True)
class Weights:
    """A model's tensors, which are read or merged when their turn to be written comes."""

    model: Any
    """The transformers model, whose parameters have no values in memory."""
    tensors: dict[str, ComputedTensor]
    """Tensors by state_dict key; a tied tensor has one key."""
    stored: torch.dtype
    """Type of the weights in the folder."""
    dtype: torch.dtype
    """Type that the tensors are computed in. Some families keep single tensors in float32."""


def read_weights(folder: Path, adapters: Path | None, dtype: torch.dtype | None) -> Weights:
    """Returns the weights of a folder, with adapters merged as PEFT's merge_and_unload does.

    With a type that is not the folder's, adapters are merged in the wider one of both types, and
    the result is rounded once.

    Args:
        folder: Folder of the whole model.
        adapters: Folder of adapters to merge; None: the weights as they are.
        dtype: Type of the result; None: that of the folder.

    Raises:
        UsageError: The folder holds no causal language model, or the adapters cannot be merged.
    """
    model = load_weights(folder, "auto")
    stored: torch.dtype = model.dtype
    wanted = stored if dtype is None else dtype
    like = model if wanted == stored else load_weights(folder, wanted)
    dtypes = {key: one.dtype for key, one in like.state_dict(keep_vars=True).items()}
    layer_of: dict[int, Any] = {}
    if adapters is None:
        model = like
    else:
        wider = torch.promote_types(stored, wanted)
        model = model if wider == stored else load_weights(folder, wider)
        with warnings.catch_warnings():
            # Copies of tied layers are untied here, and adapters of tied weights are an error.
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`", UserWarning)
            # PEFT 0.21 asks transformers 5.24 by the old name.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is", FutureWarning)
            adapted = with_adapters(model, adapters, folder)
        model, layer_of = _without_adapters(adapted, adapters)
    state = model.state_dict(keep_vars=True)
    kept = kept_keys(model, {key: id(tensor) for key, tensor in state.items()})
    return Weights(
        model=model,
        tensors={
            key: ComputedTensor(
                dtype=dtypes[key],
                shape=tuple(tensor.shape),
                compute=_compute(tensor, layer_of.get(id(tensor)), dtypes[key]),
            )
            for key, tensor in state.items()
            if key in kept
        },
        stored=stored,
        dtype=wanted,
    )


def _compute(tensor: torch.Tensor, layer: Any, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    """Returns a function that reads a tensor, or merges a PEFT layer's adapter into it."""
    read = partial(value_of, tensor) if layer is None else partial(_merge, layer, tensor)
    return lambda: read().detach().to(dtype)


def _without_adapters(adapted: Any, folder: Path) -> tuple[Any, dict[int, Any]]:
    """Takes a PeftModel apart: its base model, and the adapters' layer by id of a parameter.

    Raises:
        UsageError: The adapters cannot be merged into single tensors.
    """
    from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer

    kind = adapted.active_peft_config.peft_type.value
    layers = [one for one in adapted.modules() if isinstance(one, BaseTunerLayer)]
    mergeable = all(hasattr(layer, "merge") for layer in layers)
    if not isinstance(adapted.base_model, BaseTuner) or not mergeable:
        raise UsageError(
            f"{folder} holds adapters of the kind {kind}, which have no weights to merge; leave "
            "--merge-adapter out"
        )
    names = {id(one): name for name, one in adapted.base_model.model.named_parameters()}
    places = [
        id(one) for _, one in adapted.base_model.model.named_parameters(remove_duplicate=False)
    ]
    layer_of: dict[int, Any] = {}
    for layer in layers:
        for param in layer.get_base_layer().parameters(recurse=False):
            if places.count(id(param)) > 1:
                name = names[id(param)].replace(".base_layer", "")
                raise UsageError(
                    f"the adapters in {folder} change {name}, a tensor that several layers share: "
                    "merged, they would change all of these; leave --merge-adapter out"
                )
            layer_of[id(param)] = layer
        _read_own(layer)
    model = adapted.unload()
    config, into, out = model.config, model.get_input_embeddings(), model.get_output_embeddings()
    if out is not None and out.weight is not into.weight:
        config.get_text_config().tie_word_embeddings = config.tie_word_embeddings = False
    return model, layer_of


def _read_own(layer: Any) -> None:
    """Gives values to a PEFT layer's own parameters: magnitudes of DoRA begin as lazy tensors."""
    for key, param in list(layer.named_parameters()):
        if is_lazy(param) and not key.startswith("base_layer."):
            path, _, name = key.rpartition(".")
            values = torch.nn.Parameter(value_of(param), requires_grad=False)
            setattr(layer.get_submodule(path), name, values)


@torch.no_grad()
def _merge(layer: Any, param: torch.Tensor) -> torch.Tensor:
    """Returns a parameter of a PEFT layer's base with the adapter merged, by PEFT's own code."""
    base = layer.get_base_layer()
    own = dict(base.named_parameters(recurse=False))
    name = next(name for name, one in own.items() if one is param)
    try:
        for each, one in own.items():
            setattr(base, each, torch.nn.Parameter(value_of(one).clone(), requires_grad=False))
        layer.merge()
        merged: torch.Tensor = getattr(base, name).detach()
    finally:
        layer.merged_adapters.clear()
        for each, one in own.items():
            setattr(base, each, one)
    return merged


# --- Writes a model, a run or its adapters as a folder that other programs load -------------------

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Types of weights by the names that transformers gives them."""
_LAYOUTS = {"safetensors": tuple(DTYPES), "gguf": (*DTYPES, "q8_0")}
"""Formats, with the types that each holds."""
_SHARD_BYTES = 5 * 10**9
_LEGAL = ("LICENSE*", "NOTICE*", "USE_POLICY*")
"""Files that belong to weights wherever they go."""


def write_export(asked: Export) -> str:
    """Writes the folder of an export, which appears as a whole or not at all.

    Besides the kernel's page cache, it takes memory for a few copies of the largest tensor.

    Returns:
        A line for the terminal.

    Raises:
        UsageError: The source cannot be exported in this way, or the folder holds something.
        CheckpointError: A file of the source is damaged.
        IoError: The disk refuses; the folder is what it was.
    """
    folder = find_model(asked.path)
    out = asked.out.resolve()
    _check_arguments(asked, folder)
    adapters = folder if holds_adapters(folder) else None
    if adapters is not None and not asked.merge_adapter:
        return _write_adapters(asked, adapters, out)
    weights_folder = find_weights(folder, asked.base)
    _check_target(asked, out, folder, weights_folder)
    words = load_tokenizer(
        [folder, asked.path, weights_folder] if asked.tokenizer is None else [asked.tokenizer]
    )
    dtype = torch.float32 if asked.layout == "gguf" else DTYPES.get(asked.dtype or "")
    weights = read_weights(weights_folder, adapters, dtype)
    check_vocabulary(words, weights.model, weights_folder)
    write = _gguf_file if asked.layout == "gguf" else _safetensors_files
    needed, fill, summary, told = write(asked, weights, words, out.name)
    out.parent.mkdir(parents=True, exist_ok=True)
    with staged(out, needed) as staging:
        fill(staging)
        for pattern in _LEGAL:
            for path in filter(Path.is_file, weights_folder.glob(pattern)):
                shutil.copyfile(path, staging / path.name)
        card = Card(
            name=out.name, library="gguf" if asked.layout == "gguf" else "transformers",
            source=asked.path, weights=weights_folder, merged=adapters, about=told,
        )  # fmt: skip
        size = _finish(staging, card)
    return f"{asked.out}: {summary}, {_size(size)}"


Plan = tuple[int, Callable[[Path], None], str, str]
"""Bytes to write, the function that writes them, a line on them, and the card's sentence."""


def _safetensors_files(asked: Export, weights: Weights, words: Any, name: str) -> Plan:
    """Plans config, tokenizer, and weights in the layout of save_pretrained."""
    model, dtype = weights.model, str(weights.dtype).removeprefix("torch.")
    names = hub_names_of(model)
    tensors = weights.tensors if names is None else names.in_files(weights.tensors)
    files = model_files(tensors, asked.shard_bytes or _SHARD_BYTES, names)

    def fill(staging: Path) -> None:
        write_configs(model, staging, words)
        config = read_json(staging / "config.json")
        if config.get("dtype") != dtype:
            text = json.dumps({**config, "dtype": dtype}, indent=2, sort_keys=True) + "\n"
            (staging / "config.json").write_text(text, encoding="utf-8")
        write_files(staging, files)
        write_index(files, staging, names)

    count = "1 file" if len(files) == 1 else f"{len(files)} files"
    needed = bytes_of(weights.tensors) + OVERHEAD_BYTES
    return needed, fill, f"{type(model).__name__} in {dtype}, {count}", f"safetensors in {dtype}"


def _gguf_file(asked: Export, weights: Weights, words: Any, name: str) -> Plan:
    """Plans a GGUF file, which holds tokenizer and chat template too."""
    from castor.recipes.gguf_writer import GgufFile

    kind = asked.dtype or str(weights.stored).removeprefix("torch.")
    file = GgufFile(weights, words, kind=kind, name=name)
    file_name = f"{name}-{file.kind.name}.gguf"
    summary = f"{file_name}, {file.architecture} of {len(file.tensors)} tensors"
    told = f"a GGUF file in {file.kind.name}"
    return file.nbytes, lambda staging: file.write(staging / file_name), summary, told


def _write_adapters(asked: Export, adapters: Path, out: Path) -> str:
    """Writes a folder of adapters as PEFT does; the base stays where it is."""
    for option, given in (("--base", asked.base), ("--max-shard-size", asked.shard_bytes)):
        if given is not None:
            raise UsageError(
                f"{adapters} holds adapters, which are exported without their base: leave {option} "
                "out, or give --merge-adapter for a whole model"
            )
    named = read_json(adapters / CONFIG).get("base_model_name_or_path")
    base = Path(named) if isinstance(named, str) and Path(named).is_dir() else None
    bases = [] if base is None else [base]
    _check_target(asked, out, adapters, *bases)
    words = load_tokenizer(
        [adapters, asked.path, *bases] if asked.tokenizer is None else [asked.tokenizer]
    )
    tensors: Tensors = mapped(read_header(adapters / WEIGHTS))
    if asked.dtype is not None:
        tensors = {key: _cast(one, DTYPES[asked.dtype]) for key, one in tensors.items()}
    needed = bytes_of(tensors) + OVERHEAD_BYTES
    out.parent.mkdir(parents=True, exist_ok=True)
    with staged(out, needed) as staging:
        write_files(staging, {WEIGHTS: tensors})
        shutil.copyfile(adapters / CONFIG, staging / CONFIG)
        words.save_pretrained(staging)
        card = Card(
            name=out.name, library="peft", source=asked.path, weights=base, adapters=adapters,
            about="adapters of PEFT, which need the base model",
        )  # fmt: skip
        size = _finish(staging, card)
    of = "" if named is None else f" of {base_name(named)}"
    return f"{asked.out}: adapters{of}, {len(tensors)} tensors, {_size(size)}"


def _cast(tensor: Any, dtype: torch.dtype) -> ComputedTensor:
    def compute() -> torch.Tensor:
        values: torch.Tensor = tensor.compute() if isinstance(tensor, ComputedTensor) else tensor
        return values.to(dtype)

    return ComputedTensor(dtype=dtype, shape=tuple(tensor.shape), compute=compute)


def _finish(staging: Path, card: Card) -> int:
    """Writes the card, makes all files durable, and returns their bytes."""
    write_card(staging / "README.md", card)
    size = 0
    for path in filter(Path.is_file, staging.rglob("*")):
        fsync_file(path)
        size += path.stat().st_size
    return size


def _check_arguments(asked: Export, folder: Path) -> None:
    """Raises UsageError for arguments that contradict each other or the source."""
    if asked.layout not in _LAYOUTS:
        raise UsageError(f"--format {asked.layout}: give one of {', '.join(_LAYOUTS)}")
    known = _LAYOUTS[asked.layout]
    if asked.dtype is not None and asked.dtype not in known:
        raise UsageError(f"--dtype {asked.dtype}: {asked.layout} has {', '.join(known)}")
    if asked.merge_adapter and not holds_adapters(folder):
        raise UsageError(f"{folder} is a whole model without adapters: leave --merge-adapter out")
    if asked.layout == "gguf" and holds_adapters(folder) and not asked.merge_adapter:
        raise UsageError(
            f"{folder} holds adapters, and a GGUF file holds a whole model: give --merge-adapter"
        )
    if asked.layout == "gguf" and asked.shard_bytes is not None:
        raise UsageError("--max-shard-size is for safetensors: a GGUF model is one file")
    if asked.out.suffix == ".gguf":
        raise UsageError(
            f"{asked.out} is to be a folder, which gets a model card too: give one without .gguf"
        )


def _check_target(asked: Export, out: Path, *sources: Path) -> None:
    """Raises UsageError if the folder to write holds something that may not be replaced."""
    for source in (asked.path.resolve(), *(one.resolve() for one in sources)):
        if out == source or out in source.parents or source in out.parents:
            raise UsageError(
                f"{asked.out} and the source {source} are in one another: give another folder"
            )
    recover(out)
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not asked.overwrite:
        raise UsageError(f"{asked.out} is there and not empty: give another folder or --overwrite")
    models = ("config.json", CONFIG, "*.gguf")
    if not any(next(out.glob(pattern), None) for pattern in models):
        raise UsageError(
            f"{asked.out} holds no model, and --overwrite replaces exported models alone: give "
            "another folder"
        )


def _size(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
