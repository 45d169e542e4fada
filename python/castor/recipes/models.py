"""Loads a model folder, an adapter folder or a run for inference in a memory budget."""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from castor.booster import Booster
from castor.checkpoint import latest
from castor.checkpoint.adapters import CONFIG as _ADAPTER
from castor.checkpoint.adapters import WEIGHTS as _ADAPTER_WEIGHTS
from castor.errors import UsageError
from castor.lazy import LazyInitContext
from castor.plugins import GeminiPlugin
from castor.plugins.by_name import checked_plugin
from castor.recipes.runs import checkpoints

_MODEL = "config.json"
_TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json")
_PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_DTYPES = {name: dtype for dtype, name in _PRECISIONS.items()}
_OF_TRAINING = frozenset(
    (
        *("max_norm", "norm_type", "nonfinite", "overlap", "optim_state_format", "seed"),
        *("offload_optim_frac", "nvme_offload_fraction", "enable_gradient_accumulation"),
        *("initial_scale", "min_scale", "max_scale", "growth_factor", "backoff_factor"),
        *("growth_interval", "hysteresis", "activations", "zero_stage", "extra_dp_size"),
        *("reduction", "reduce_on"),
    )
)
"""Arguments of GeminiPlugin that say how a step trains, and mean nothing without an optimizer."""


@dataclass(frozen=True, kw_only=True)
class InferenceModel:
    """A boosted model, with the tokenizer and the limits that its text goes by."""

    name: str
    """Name of the model for people and for the API: the name of its folder."""
    model: Any
    """A boosted transformers model in eval mode, or a peft.PeftModel around one."""
    tokenizer: Any
    """The tokenizer, a PreTrainedTokenizerBase."""
    booster: Booster
    device: torch.device
    """Device that the model computes on, where prompts must be."""
    max_positions: int | None
    """Most tokens that prompt and answer may have together; None: the model has no limit."""
    end_ids: frozenset[int]
    """Token ids that end an answer."""
    encoding: threading.Lock = field(default_factory=threading.Lock, repr=False)
    """Lock of the tokenizer while it encodes: it is not safe from several threads."""


def load_for_inference(
    path: Path,
    *,
    settings: Mapping[str, Any],
    base: Path | None = None,
    tokenizer: Path | None = None,
) -> InferenceModel:
    """Loads a model and boosts it without an optimizer, weights straight from files into chunks.

    Args:
        path: A model folder, a folder of PEFT adapters, or a run: a folder with checkpoints of a
            Trainer (checkpoint-N) or of castor (step-N), of which the last one is taken.
        settings: Arguments of GeminiPlugin, as `castor run` takes them. The precision is by default
            that of the stored weights.
        base: The model folder that adapters belong to; by default the one that they name.
        tokenizer: Folder of the tokenizer; by default the model's, the adapters' or the base's.

    Raises:
        UsageError: The folder holds no model or half of one, adapters do not fit the base, the
            tokenizer does not fit the model, or a setting is of training alone.
        OutOfMemoryError: A budget is too small.
        ValueError, TypeError, NotImplementedError: GeminiPlugin raises it for a setting.
    """
    _check_settings(settings)
    folder = find_model(path)
    adapters = folder if holds_adapters(folder) else None
    weights = find_weights(folder, base)
    words = load_tokenizer([tokenizer] if tokenizer is not None else [folder, path, weights])
    precision = settings.get("precision")
    model: Any = load_weights(weights, "auto" if precision is None else _DTYPES[precision])
    stored = _PRECISIONS.get(model.dtype, "fp32")
    if adapters is not None:
        model = with_adapters(model, adapters, weights)
    check_vocabulary(words, model, weights)
    plugin = GeminiPlugin(**{"precision": stored, **settings})
    booster = Booster(plugin)
    model.eval()
    booster.boost(model)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return InferenceModel(
        name=path.resolve().name,
        model=model,
        tokenizer=words,
        booster=booster,
        device=torch.device(plugin.config.device),
        max_positions=positions if isinstance(positions, int) and positions > 0 else None,
        end_ids=_end_ids(model, words),
    )


def find_model(path: Path) -> Path:
    """Returns the folder of a model or of adapters that a path stands for.

    Args:
        path: Such a folder, or a run that has checkpoints.

    Raises:
        UsageError: There is no such folder, or it holds neither.
    """
    if not path.is_dir():
        raise UsageError(f"there is no folder {path}; give a model folder, adapters or a run")
    for candidate in (path, *reversed(checkpoints(path))):
        if _holds_model(candidate):
            return candidate
    newest = latest(path)
    if newest is not None and _holds_model(newest / "model"):
        return newest / "model"
    raise UsageError(
        f"{path} holds no model: there is no {_MODEL}, no {_ADAPTER} and no checkpoint; give a "
        "folder that save_pretrained, PEFT, a Trainer or castor wrote"
    )


def holds_adapters(folder: Path) -> bool:
    """Whether a folder holds adapters of PEFT and no whole model."""
    return (folder / _ADAPTER).is_file()


def find_weights(folder: Path, base: Path | None) -> Path:
    """Returns the folder of a whole model: the given one, or the base of its adapters.

    Args:
        folder: A folder that find_model returned.
        base: The model folder that adapters belong to; by default the one that they name.

    Raises:
        UsageError: There is no such base, the folder needs none, or its weights are quantised.
    """
    if base is not None and not holds_adapters(folder):
        raise UsageError(f"{folder} is a whole model and --base was given: leave --base out")
    weights = _base_of(folder, base) if holds_adapters(folder) else folder
    _check_config(weights)
    return weights


def _holds_model(folder: Path) -> bool:
    """Whether a folder holds a model's or adapters' configuration and some weights."""
    configured = (folder / _MODEL).is_file() or (folder / _ADAPTER).is_file()
    return configured and any(
        one.suffix in (".safetensors", ".bin") for one in folder.iterdir() if one.is_file()
    )


def without_training(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns GeminiPlugin's arguments without those that say how a step trains."""
    return {name: value for name, value in settings.items() if name not in _OF_TRAINING}


def _check_settings(settings: Mapping[str, Any]) -> None:
    """Raises UsageError for settings of training, and for those of several ranks."""
    training = sorted(_OF_TRAINING & settings.keys())
    if training:
        raise UsageError(
            f"{', '.join(training)}: a setting of training, and inference has no optimizer and no "
            "backward; leave it out"
        )
    try:
        checked_plugin(settings)
    except TypeError as error:
        raise UsageError(str(error)) from error


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file.

    Raises:
        UsageError: The file holds no JSON object.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{path} is no JSON: {error}; write the folder anew") from error
    if not isinstance(found, dict):
        raise UsageError(f"{path} holds a {type(found).__name__} and no settings by name")
    return found


def _base_of(adapters: Path, given: Path | None) -> Path:
    """Returns the model folder that adapters belong to.

    Raises:
        UsageError: It is not there, or the adapters name none.
    """
    named = read_json(adapters / _ADAPTER).get("base_model_name_or_path")
    base = given or (Path(named) if isinstance(named, str) and named else None)
    if base is None:
        raise UsageError(f"{adapters / _ADAPTER} names no base model; give its folder with --base")
    for candidate in (base, *([] if given or base.is_absolute() else [adapters / base])):
        if candidate.is_dir() and _holds_model(candidate):
            if (candidate / _ADAPTER).is_file():
                raise UsageError(f"{candidate} holds adapters itself; give a whole model as base")
            return candidate
    said = "--base gives" if given else f"{adapters / _ADAPTER} names the base"
    raise UsageError(
        f"{said} {base}, and there is no model folder of that name; give the folder with --base"
    )


def load_tokenizer(folders: list[Path]) -> Any:
    """Returns the tokenizer of the first folder that has one."""
    for folder in folders:
        if any((folder / name).is_file() for name in _TOKENIZER_FILES):
            try:
                return AutoTokenizer.from_pretrained(folder, local_files_only=True)
            except Exception as error:  # json, tokenizers and transformers each raise their own
                text = str(error).split("\n")[0]
                raise UsageError(f"{folder}: the tokenizer cannot be read: {text}") from error
    listed = " and ".join(str(folder) for folder in dict.fromkeys(folders))
    raise UsageError(f"{listed}: there is no tokenizer; give its folder with --tokenizer")


def _check_config(folder: Path) -> None:
    """Raises UsageError if a model's config.json is damaged, or tells of quantised weights."""
    quantised = read_json(folder / _MODEL).get("quantization_config")
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise UsageError(
            f"{folder} holds weights quantised by {method}, which castor evaluate, chat, serve and "
            "export do not load; give the folder of the weights before quantisation"
        )


def load_weights(folder: Path, dtype: Any) -> Any:
    """Returns the model of a folder, whose weights stay in their files until it is boosted."""
    # transformers declares the model alone as what it returns.
    from_pretrained: Any = AutoModelForCausalLM.from_pretrained
    try:
        with LazyInitContext():
            model, found = from_pretrained(
                folder, dtype=dtype, local_files_only=True, output_loading_info=True
            )
    except (ValueError, OSError, RuntimeError, SafetensorError, KeyError) as error:
        if isinstance(error, UsageError):
            raise
        text = str(error).strip().split("\n")[0]
        raise UsageError(f"{folder}: no causal language model can be read: {text}") from error
    missing = sorted(found["missing_keys"])
    if missing:
        stored = read_json(folder / _MODEL).get("architectures") or ["?"]
        raise UsageError(
            f"{folder} ({', '.join(stored)}) lacks {len(missing)} "
            f"parameters of {type(model).__name__}, the first is {missing[0]!r}: answers would be "
            "random; give a folder with all weights of a causal language model"
        )
    return model


def with_adapters(model: Any, folder: Path, base: Path) -> Any:
    """Returns a PeftModel of a model and the adapters in a folder.

    Raises:
        UsageError: The adapters belong to another base, or their files are damaged.
    """
    from peft import PeftModel, get_peft_model_state_dict

    fit = f"the adapters in {folder} do not fit the base {base}"
    what_to_do = "give the base that they were trained on with --base"
    try:
        with safe_open(folder / _ADAPTER_WEIGHTS, framework="pt") as file:
            stored = set(file.keys())
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{folder / _ADAPTER_WEIGHTS} cannot be read: {error}") from error
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Found missing adapter keys")  # an error below
            adapted = PeftModel.from_pretrained(model, folder, local_files_only=True)
    except (ValueError, RuntimeError, KeyError) as error:
        lines = [line.strip() for line in str(error).strip().split("\n")]
        raise UsageError(f"{fit}: {' '.join(lines[:2]).rstrip('.')}; {what_to_do}") from error
    own = set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
    both = set(get_peft_model_state_dict(adapted, save_embedding_layers=True))
    unknown, lacking = sorted(stored - both), sorted(own - stored)
    if unknown or lacking:
        raise UsageError(
            f"{fit}: {len(unknown)} tensors have no place in it and {len(lacking)} are lacking, "
            f"the first is {(unknown or lacking)[0]!r}; {what_to_do}"
        )
    return adapted


def check_vocabulary(tokenizer: Any, model: Any, folder: Path) -> None:
    """Raises UsageError if the tokenizer gives ids that the model has no embedding for."""
    highest = max(tokenizer.get_vocab().values(), default=-1)
    rows = model.get_input_embeddings().weight.shape[0]
    if highest >= rows:
        raise UsageError(
            f"the tokenizer gives ids up to {highest:,} and the model in {folder} embeds {rows:,} "
            "tokens: they do not belong together; give the model's own with --tokenizer"
        )


def _end_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Returns the ids that end an answer: those of the generation config and the tokenizer's."""
    named = getattr(model.generation_config, "eos_token_id", None)
    ids = named if isinstance(named, list) else [named]
    return frozenset(one for one in (*ids, tokenizer.eos_token_id) if one is not None)
