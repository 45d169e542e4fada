"""Handles key-value caches, which transformers' gradient checkpointing takes from a block."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from castor.errors import UsageError
from castor.runtime.hooks import ModuleHook


def refuse_filled_caches(module: nn.Module, name: str) -> None:
    """Has the module's training forwards raise UsageError if they are passed a filled cache.

    Transformers' gradient checkpointing passes the block no cache. The block would not see the
    cached keys and values, which would change the loss with only a log entry. An empty cache is
    allowed: the block would only write to it.

    Args:
        module: A block with transformers' gradient checkpointing.
        name: Its name in the model.
    """
    hook = ModuleHook(_check, name, layer_of(module))
    module.register_forward_pre_hook(hook, with_kwargs=True)


def layer_of(module: nn.Module) -> int:
    """Returns the number of a block's layer in a cache."""
    layers = (getattr(part, "layer_idx", None) for part in module.modules())
    return next((index for index in layers if isinstance(index, int)), 0)


def held_for(layer: int, args: Iterable[Any], kwargs: Mapping[str, Any]) -> str:
    """Describes what a block's caches hold of its layer; "" if they hold nothing.

    Args:
        layer: Number of the layer, from layer_of.
        args: The block's positional arguments.
        kwargs: The block's keyword arguments. A block that runs several times in one forward of the
            model (HrmText) has a layer of the cache for each run, at its `cycle_offset`.
    """
    offset = kwargs.get("cycle_offset", 0)
    layer += offset if isinstance(offset, int) else 0
    caches = (value for value in (*args, *kwargs.values()) if is_cache(value))
    return next((held for cache in caches if (held := held_in(cache, layer))), "")


def place_of_use_cache(module: nn.Module) -> int | None:
    """Returns the position of `use_cache` among the arguments of a block's forward, or None."""
    names = [*inspect.signature(type(module).forward).parameters][1:]  # without self
    return names.index("use_cache") if "use_cache" in names else None


def without_caches(args: tuple[Any, ...], use_cache: int | None) -> tuple[Any, ...]:
    """Returns a block's arguments with None for a key-value cache and False for use_cache.

    Transformers' gradient checkpointing does so for keyword arguments. The models of GPT-2 and
    RecurrentGemma pass some of these by position. A block would store keys, values or states
    there, and store them once more in backward.

    Args:
        args: The positional arguments.
        use_cache: Position of use_cache, from place_of_use_cache.
    """
    return tuple(
        False if place == use_cache else None if is_cache(value) else value
        for place, value in enumerate(args)
    )


def _check(
    name: str, layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    may_run_again = getattr(module, "gradient_checkpointing", False)
    if not (may_run_again and module.training and torch.is_grad_enabled()):
        return
    if held := held_for(layer, args, kwargs):
        raise UsageError(
            f"module '{name}' ({type(module).__name__}) is passed a {held}, and transformers takes "
            "caches from blocks that may be recomputed: call the model without it, or keep its "
            "activations: activations='keep', or a mapping that keeps this block"
        )


def is_cache(value: Any) -> bool:
    """Whether a value is one of transformers' caches: key-value, or of linear attention."""
    return hasattr(value, "get_seq_length")


def held_in(cache: Any, layer: int) -> str:
    """Describes what a cache holds of a layer; "" if it holds nothing.

    A layer of linear attention has states instead of positions.
    """
    while hasattr(cache, "self_attention_cache"):  # the cache of an encoder-decoder model
        cache = cache.self_attention_cache
    layers = getattr(cache, "layers", ())
    of_layer = layers[layer] if layer < len(layers) else None
    states = getattr(of_layer, "has_previous_state", None)
    if states and any(states.values()):
        return "cache with a state of linear attention"
    if of_layer is not None and not hasattr(of_layer, "get_seq_length"):
        return ""
    positions = int(cache.get_seq_length(layer))
    return f"key-value cache of {positions} positions" if positions else ""
