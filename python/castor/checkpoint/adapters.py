"""Adapters of PEFT models, in the layout that PeftModel.save_pretrained writes and PEFT reads."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from castor.checkpoint.container import StoredTensor, read_header
from castor.errors import CheckpointError, UsageError
from castor.runtime.boosted_model import boosted_models_holding
from castor.runtime.peft_model import adapter_tensors, is_peft_model

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"

_SCALES = ("peft_type", "lora_alpha", "alpha_pattern", "use_rslora", "use_dora", "fan_in_fan_out")
"""Settings that decide, beside names and shapes, what an adapter's weights mean."""


def with_adapters(model: nn.Module, directory: Path | None, config: Any) -> Any:
    """Wraps the model in a PeftModel with adapters to train; see Booster.enable_lora.

    Args:
        model: A model that has not been boosted.
        directory: Directory of saved adapters to start from; None: new adapters.
        config: A peft.PeftConfig, or None where `directory` has one.

    Raises:
        CheckpointError: `directory` holds no adapter.
        TypeError: `config` is no peft.PeftConfig.
        UsageError: peft is not installed, the model is boosted, or both arguments are None.
    """
    try:
        import peft
    except ModuleNotFoundError as error:
        raise UsageError("adapters need peft: pip install peft") from error
    if boosted_models_holding(model):
        raise UsageError(
            f"this {type(model).__name__} is boosted: its chunks are laid out, and what adapters "
            "freeze has its place in them; enable LoRA before booster.boost"
        )
    if config is not None and not isinstance(config, peft.PeftConfig):
        raise TypeError(f"lora_config is a {type(config).__name__}; give a peft.LoraConfig")
    if directory is None:
        if config is None:
            raise UsageError("give lora_config, a peft.LoraConfig, or pretrained_dir, or both")
        return peft.get_peft_model(model, config)
    if not (directory / CONFIG).is_file():
        raise CheckpointError(f"{directory} holds no adapter: {CONFIG} is not there")
    return peft.PeftModel.from_pretrained(model, directory, is_trainable=True, config=config)


def check_no_loose_adapters(model: nn.Module) -> None:
    """Checks that no adapter layers would be written as if they were the model's own.

    Raises:
        CheckpointError: A transformers model holds layers of PEFT without being a PeftModel.
    """
    tuners: Any = sys.modules.get("peft.tuners.tuners_utils")
    if tuners is None or is_peft_model(model) or not hasattr(model, "save_pretrained"):
        return
    for name, module in model.named_modules():
        if isinstance(module, tuners.BaseTunerLayer):
            raise CheckpointError(
                f"module '{name}' of this {type(model).__name__} is an adapter layer of PEFT "
                f"({type(module).__name__}), which from_pretrained would not read back; create the "
                "adapters with peft.get_peft_model and save the PeftModel, or merge them first"
            )


def own_tensors(
    model: Any,
    state: dict[str, torch.Tensor],
    known: Mapping[str, Mapping[str, str]] | None,
) -> dict[str, dict[str, torch.Tensor]]:
    """Returns the tensors that belong in adapters' files, by adapter and key in its file.

    Args:
        model: A PeftModel.
        state: State dict of the model; with pipeline parallelism, this rank's entries of it.
        known: Keys in each adapter's file, see FullModel.adapters; None: PEFT decides them.
    """
    if known is None:
        return adapter_tensors(model, state)
    return {
        adapter: {key: state[own] for key, own in keys.items() if own in state}
        for adapter, keys in known.items()
    }


def prefix_of(adapter: str) -> str:
    """Returns the prefix that tells an adapter's keys from those of other adapters."""
    return "" if adapter == "default" else f"{adapter}/"


def folder_of(adapter: str) -> str:
    """Returns PEFT's folder of an adapter, below the model's directory."""
    return "." if adapter == "default" else adapter


def write_adapter_config(model: Any, adapter: str, directory: Path) -> None:
    """Writes adapter_config.json as PeftModel.save_pretrained does."""
    config = copy.deepcopy(model.peft_config[adapter])
    prompts = config.is_prompt_learning
    if config.base_model_name_or_path is None:
        base = model.base_model if prompts else model.base_model.model
        config.base_model_name_or_path = vars(base).get("name_or_path") or None
    config.inference_mode = True
    mapping = None
    if config.task_type is None:
        base_class = model._get_base_model_class(is_prompt_tuning=prompts)
        mapping = {
            "base_model_class": base_class.__name__,
            "parent_library": base_class.__module__,
        }
    config.save_pretrained(directory, auto_mapping_dict=mapping)


def read_adapters(
    model: Any,
    directory: Path,
    state: dict[str, torch.Tensor],
    known: Mapping[str, Mapping[str, str]] | None,
) -> tuple[dict[str, StoredTensor], dict[str, torch.Tensor]]:
    """Matches an adapter directory with a PeftModel that has the same adapters.

    Args:
        model: A PeftModel.
        directory: Directory that castor or PeftModel.save_pretrained wrote.
        state: State dict of the model, with its own tensor objects.
        known: Keys in each adapter's file, see FullModel.adapters; None: PEFT decides them.

    Returns:
        The stored tensors, and the model's tensors, both by key in the files. Keys of an adapter
        other than "default" have the prefix "<adapter>/".

    Raises:
        CheckpointError: An adapter's files are missing or damaged, the adapter is of another kind,
            or PEFT computes its weights when it writes them.
    """
    own = {id(tensor) for tensor in state.values()}
    stored: dict[str, StoredTensor] = {}
    targets: dict[str, torch.Tensor] = {}
    for adapter, tensors in own_tensors(model, state, known).items():
        _check_config(model.peft_config[adapter], adapter, directory / folder_of(adapter) / CONFIG)
        prefix = prefix_of(adapter)
        for key, entry in read_header(directory / folder_of(adapter) / WEIGHTS).items():
            stored[prefix + key] = entry
        for key, tensor in tensors.items():
            if id(tensor) not in own:
                raise CheckpointError(
                    f"'{key}' of adapter '{adapter}' is made of other tensors when PEFT writes it, "
                    "so that it cannot be read back into a model that has it; load this adapter "
                    "with PeftModel.from_pretrained, before boost"
                )
            targets[prefix + key] = tensor
    return stored, targets


def stored_adapters(
    stored: dict[str, StoredTensor], targets: dict[str, torch.Tensor], directory: Path
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (key, tensor) of the stored adapters, with the keys of read_adapters."""
    for path in sorted({entry.path for entry in stored.values()}):
        folder = path.parent.relative_to(directory)
        prefix = "" if folder == Path() else f"{folder}/"
        with safe_open(path, framework="pt") as file:
            for key, entry in stored.items():
                if entry.path == path and key in targets:
                    yield key, file.get_tensor(key.removeprefix(prefix))


def _check_config(config: Any, adapter: str, path: Path) -> None:
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    mine = json.loads(json.dumps(config.to_dict(), default=str))
    for key in _SCALES:
        if key in found and found[key] != mine.get(key):
            raise CheckpointError(
                f"{path} is of an adapter with {key}={found[key]!r}, and adapter '{adapter}' of "
                f"the model has {mine.get(key)!r}; create it with the same LoraConfig, or with "
                "PeftModel.from_pretrained, before boost"
            )
