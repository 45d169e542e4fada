"""Key-value caches, which transformers takes from a block that may run again."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from castor.errors import UsageError
from castor.runtime.hooks import ModuleHook


def refuse_filled_caches(module: nn.Module, name: str) -> None:
    """From now on the module's training forwards raise UsageError where a cache holds something.

    Transformers' switch passes the block none, and it would not see what stands there: another
    loss, and only a log entry. A cache that is empty is one that the block would only write.

    Args:
        module: A block with transformers' switch.
        name: Its name in the model.
    """
    hook = ModuleHook(_check, name, layer_of(module))
    module.register_forward_pre_hook(hook, with_kwargs=True)


def layer_of(module: nn.Module) -> int:
    """The number of a block's layer in a cache."""
    layers = (getattr(part, "layer_idx", None) for part in module.modules())
    return next((index for index in layers if isinstance(index, int)), 0)


def held_for(layer: int, args: Iterable[Any], kwargs: Mapping[str, Any]) -> str:
    """Says what a block's caches have of its layer, or "" where they are empty there.

    Args:
        layer: See layer_of.
        args: The block's arguments without names.
        kwargs: By name. A block that runs several times in one forward of the model (HrmText) has
            a layer of the cache for each, at its `cycle_offset`.
    """
    offset = kwargs.get("cycle_offset", 0)
    layer += offset if isinstance(offset, int) else 0
    caches = (value for value in (*args, *kwargs.values()) if is_cache(value))
    return next((held for cache in caches if (held := held_in(cache, layer))), "")


def place_of_use_cache(module: nn.Module) -> int | None:
    """The place of `use_cache` among the arguments of a block's forward; None: it has none."""
    names = [*inspect.signature(type(module).forward).parameters][1:]  # without self
    return names.index("use_cache") if "use_cache" in names else None


def without_caches(args: tuple[Any, ...], use_cache: int | None) -> tuple[Any, ...]:
    """A block's arguments, None for a key-value cache and False for use_cache.

    Transformers' switch does so for arguments with names. The models of GPT-2 and RecurrentGemma
    pass their blocks some without: each would keep keys, values or states there, and write them
    once more in backward.

    Args:
        args: The arguments without names.
        use_cache: See place_of_use_cache.
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
    """Whether it is one of transformers' caches, of keys and values or of linear attention."""
    return hasattr(value, "get_seq_length")


def held_in(cache: Any, layer: int) -> str:
    """Says what a cache has of a layer, or "" where it is empty there.

    A layer of linear attention has states of its past, and no positions.
    """
    while hasattr(cache, "self_attention_cache"):  # of an encoder and a decoder
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
