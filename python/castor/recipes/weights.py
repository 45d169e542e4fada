"""The weights of a model folder, into which adapters are merged one tensor at a time."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from castor.checkpoint.container import ComputedTensor
from castor.checkpoint.model import kept_keys
from castor.errors import UsageError
from castor.lazy import is_lazy, value_of
from castor.recipes.models import load_weights, with_adapters


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
