"""Key-value caches, which transformers takes from a block that may run again."""

from __future__ import annotations

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
    layers = (getattr(part, "layer_idx", None) for part in module.modules())
    layer = next((index for index in layers if isinstance(index, int)), 0)
    module.register_forward_pre_hook(ModuleHook(_check, name, layer), with_kwargs=True)


def without_caches(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A block's arguments, None for a key-value cache.

    Transformers' switch does so for arguments with names. GPT-2's model passes its blocks one
    without: each would keep keys and values there, and write them once more in backward.
    """
    return tuple(None if hasattr(value, "get_seq_length") else value for value in args)


def _check(
    name: str, layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    may_run_again = getattr(module, "gradient_checkpointing", False)
    if not (may_run_again and module.training and torch.is_grad_enabled()):
        return
    for value in (*args, *kwargs.values()):
        length = getattr(value, "get_seq_length", None)
        if length is not None and (held := int(length(layer))) > 0:
            raise UsageError(
                f"module '{name}' ({type(module).__name__}) is passed a key-value cache of {held} "
                "positions, and transformers takes caches from blocks that may be recomputed: call "
                "the model without it, or keep its activations: activations='keep', or a mapping "
                "that keeps this block"
            )
