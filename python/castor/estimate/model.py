"""Builds models of Hugging Face configs on the meta device: shapes without weights."""

from __future__ import annotations

import gc
import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from castor.collections_paused import collections_paused
from castor.config.names import NUMBERS_OF_TOKENS
from castor.runtime.input_cast import convert_buffers
from castor.runtime.tensor_types import tensor_types

SHORTEST_SEQUENCE = 2
"""Tokens of the shortest sample whose loss has one token predict another."""
_RELEASED_IN = ("fp8", "mxfp4")
"""Formats of published weights whose models train in 16 bits: DeepSeek-V3, gpt-oss."""
_UNBOUNDED = 2**24
"""Limit of a sample's tokens for a model whose config names none."""


def _transformers() -> ModuleType:
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "castor estimate builds the model with transformers, which is not installed: "
            "pip install 'castor-torch[estimate]'",
            name="transformers",
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Silences transformers' remarks on a config, which are about training."""
    logging = _transformers().utils.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


@contextmanager
def without_full_collections() -> Iterator[None]:
    """Has Python's garbage collector look at young objects only.

    A search leaves few lasting objects that only the collector can free. A full collection visits
    the modules of all models, which would take a tenth of the search's time.
    """
    before = gc.get_threshold()
    gc.set_threshold(*before[:2], 1_000_000)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def read_config(path: Path) -> dict[str, Any]:
    """Reads a config.json.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is no config of a Hugging Face model, or the model is quantised in
            another format than those that 16-bit models are released in.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(document, dict) or not isinstance(document.get("model_type"), str):
        raise ValueError(
            f"{path} is not the config of a Hugging Face model: it has no 'model_type'"
        )
    quantised = document.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else None
        if method not in _RELEASED_IN:
            raise ValueError(
                f"{path} is the config of a quantised model ('quantization_config'), whose "
                "parameters take other bytes than the precision says; take that out of a copy of "
                "the file to estimate the model as it was before, with --qlora for 4 bits"
            )
        # Training has the weights in the working precision, as from_pretrained loads them.
        document = {k: v for k, v in document.items() if k != "quantization_config"}
    return document


def _class_of(transformers: ModuleType, document: dict[str, Any], config: Any) -> Any:
    """Returns the class that 'architectures' names, or the type's causal language model."""
    names = document.get("architectures") or []
    if names:
        found = getattr(transformers, str(names[0]), None)
        if found is None:
            raise ValueError(f"this transformers has no architecture {names[0]!r}")
        return found
    mapping = transformers.AutoModelForCausalLM._model_mapping
    if type(config) not in mapping:
        raise ValueError(
            f"the config names no 'architectures', and model type {document['model_type']!r} has "
            "no causal language model; add 'architectures'"
        )
    return mapping[type(config)]


def without_values() -> TorchFunctionMode:
    """Returns a context in which parameter initialisers draw no values."""
    return _WithoutValues()


class _WithoutValues(TorchFunctionMode):
    """Context that skips initialisers: meta tensors have no values, and drawing takes time."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return args[0] if func in _INITIALISERS else func(*args, **(kwargs or {}))


_INITIALISERS = {torch.Tensor.uniform_, torch.Tensor.normal_}


def _on_meta(path: Path, document: dict[str, Any]) -> nn.Module:
    """Builds the model of a config on the meta device, with tied weights."""
    transformers = _transformers()
    try:
        config = transformers.AutoConfig.for_model(**document)
        config.use_cache = False
        if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = 0  # required, but its value does not matter here
        architecture = _class_of(transformers, document, config)
        with torch.device("meta"), _WithoutValues():
            model: nn.Module = architecture(config)
        model.tie_weights()  # type: ignore[operator]
    except Exception as error:
        # Any exception: transformers checks few values of a config.
        raise ValueError(
            f"{path}: transformers {transformers.__version__} cannot build this model: "
            f"{type(error).__name__}: {error}"
        ) from error
    return model


def build(path: Path, *, dtype: torch.dtype) -> nn.Module:
    """Builds the model of a config.json in training mode on the meta device.

    Args:
        path: Path of the config. Remote code that the config names is not run.
        dtype: The working precision. Parameters and buffers that training keeps in float32 are
            float32 here too.

    Returns:
        The model; its parameters take no memory.

    Raises:
        OSError: The file cannot be read.
        ValueError: transformers cannot build a model of the config.
        ModuleNotFoundError: transformers is not installed.
    """
    document = read_config(path)
    with collections_paused(), quiet():  # the model's modules are imported when it is asked for
        model = _on_meta(path, document)
    types = tensor_types(model, dtype)
    for name, param in model.named_parameters():
        param.data = param.data.to(types.of_param(name))
    convert_buffers(model, types, torch.device("meta"))
    return model.train()


def build_by_name(path: Path) -> nn.Module | None:
    """Builds a config's model on the meta device for the names of its weights.

    Args:
        path: Path of the config.json.

    Returns:
        The model; None if transformers has no conversions for the weights. That is so if it does
        not know the model's type, if the model has remote code, or if the weights are quantised.

    Raises:
        OSError: The file cannot be read.
        ValueError: transformers cannot build the model.
        ModuleNotFoundError: transformers is not installed.
    """
    document = json.loads(path.read_text(encoding="utf-8"))
    transformers = _transformers()
    known = document.get("model_type") in transformers.CONFIG_MAPPING
    if not known or document.get("auto_map") or document.get("quantization_config"):
        return None
    with quiet():
        return _on_meta(path, document)


def make_inputs(
    model: nn.Module, *, batch: int, sequence: int, masked: bool = False
) -> dict[str, torch.Tensor]:
    """Makes inputs with labels, on the meta device.

    Args:
        model: The model, from `build`.
        batch: Number of samples.
        sequence: Tokens in a sample; not used for images, whose size the config gives.
        masked: Whether there is a mask of padded tokens.

    Returns:
        Keyword arguments of the model's forward: "input_ids" (batch, sequence) in int64 or
        "pixel_values" (batch, channels, height, width) in the model's dtype, and "labels".

    Raises:
        ValueError: The sequence is longer than the model's positions, or the model takes neither
            tokens nor images.
    """
    config: Any = model.config
    main = getattr(model, "main_input_name", "")
    per_sample = not type(model).__name__.endswith(
        ("LMHeadModel", "ForCausalLM", "ForMaskedLM", "ForConditionalGeneration", "ForPreTraining")
    )
    if main == "pixel_values":
        size = config.image_size
        height, width = size if isinstance(size, list | tuple) else (size, size)
        shape = (batch, config.num_channels, height, width)
        return {
            "pixel_values": torch.empty(shape, dtype=_dtype_of(model), device="meta"),
            "labels": torch.empty((batch,), dtype=torch.long, device="meta"),
        }
    if main != "input_ids":
        raise ValueError(
            f"{type(model).__name__} takes {main!r}; castor estimate makes inputs of tokens and "
            "images only"
        )
    for name, positions in _positions(config).items():
        if positions < sequence:
            raise ValueError(
                f"--seq is {sequence}, but the config's {name} is {positions}; give at most that"
            )
    tokens = torch.empty((batch, sequence), dtype=torch.long, device="meta")
    labels = tokens[:, 0] if per_sample else tokens
    mask = {"attention_mask": torch.empty_like(tokens)} if masked else {}
    return {"input_ids": tokens, "labels": labels.clone(), **mask}


def _positions(config: Any) -> dict[str, int]:
    """Returns the limits that a config sets on a sample's tokens, by name."""
    found = {name: getattr(config, name, None) for name in NUMBERS_OF_TOKENS}
    return {name: n for name, n in found.items() if isinstance(n, int) and n > 0}


def longest_sequence(model: nn.Module) -> int | None:
    """Returns the most tokens of a sample for a model from `build`; None if it takes images."""
    if getattr(model, "main_input_name", "") == "pixel_values":
        return None
    return min(_positions(model.config).values(), default=_UNBOUNDED)


def _dtype_of(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype
