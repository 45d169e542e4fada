"""Finds a model's output embedding, and defers its logits to the loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from castor.activations.functions import HeadFunction, plain_torch
from castor.activations.lazy_logits import Head
from castor.config import GeminiConfig, TileLogits
from castor.errors import UsageError
from castor.runtime.blocks import is_compiled
from castor.runtime.engine import Engine
from castor.runtime.hooks import OwnForward, has_own_forward

TILE_BYTES = 16 * 2**20
TILE_SHARE = 64
"""Default size of a tile's float32 logits: TILE_BYTES, or the device budget over TILE_SHARE if that
is more, since a product of few rows is slow."""
TILE_MOST_SHARE = 8
"""A tile takes at most the device budget over this, and at most LEAST_BYTES if that is more."""
WORTH_SHARE = 16
"""Tiles pay for "auto" if they save the device budget over this, and at least LEAST_BYTES."""
LEAST_BYTES = 2**20
"""Lower bound, in bytes, of the two limits above."""
COPIES = 3
"""Number of float32 copies of the logits that the loss holds at once in its backward."""
_FLOAT32 = 4


def output_embedding(model: nn.Module, tile_logits: TileLogits) -> nn.Linear | None:
    """Returns the module whose output may be deferred; None: there is none, or it is not wanted.

    Args:
        model: The model.
        tile_logits: GeminiPlugin's argument.

    Raises:
        UsageError: Tiles are asked for, and the model has no such module.
    """
    if tile_logits is False:
        return None
    head, why_not = _find(model)
    if why_not and tile_logits != "auto":
        raise UsageError(
            f"tile_logits={tile_logits!r}, but {type(model).__name__} {why_not}; use "
            "tile_logits='auto' or False"
        )
    return head


def _find(model: nn.Module) -> tuple[nn.Linear | None, str]:
    """Returns the output embedding, or None, and the reason why there is none."""
    get = getattr(model, "get_output_embeddings", None)
    try:
        head = get() if callable(get) else None
    except (NotImplementedError, AttributeError):  # models without an output embedding
        head = None
    if head is None:
        return None, "has no output embedding (get_output_embeddings())"
    if is_compiled(head):
        return None, "has a compiled output embedding, whose logits are within its graph"
    if not isinstance(head, nn.Linear) or not _is_linears(head):
        return None, f"has a {type(head).__name__} with a forward of its own as output embedding"
    if not any(module is head for module in model.modules()):
        return None, "has an output embedding that is not among its modules"
    return head, ""


def _is_linears(head: nn.Linear) -> bool:
    """Whether the module's forward is nn.Linear's."""
    return type(head).forward is nn.Linear.forward and not has_own_forward(head)


def defer_logits(engine: Engine, head: nn.Linear, config: GeminiConfig) -> None:
    """Has `head` defer the logits of training forwards until they are read.

    Args:
        engine: Engine of the boosted model.
        head: The output embedding, from output_embedding.
        config: The plugin's configuration.
    """
    engine.replaced.put(head, "forward", DeferringForward(engine, head, config))


class DeferringForward(OwnForward):
    """Forward of a boosted model's output embedding, which may defer the logits."""

    def __init__(self, engine: Engine, module: nn.Linear, config: GeminiConfig) -> None:
        super().__init__(module)
        self._head = Head(
            engine,
            module,
            engine.positions[module],
            updates_in_backward=config.overlap == "backward",
        )
        self._tile_logits = config.tile_logits
        self._device_bytes = config.device_bytes

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns logits of (..., vocabulary) for hidden states of (..., width)."""
        deferred = self.deferred(hidden)
        if deferred is not None:
            return deferred
        module = self.module
        assert isinstance(module, nn.Linear)
        return nn.Linear.forward(module, hidden)

    def deferred(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Returns deferred logits; None: they have to be computed now."""
        module = self.module
        assert isinstance(module, nn.Linear)
        if _defers(module, hidden):
            all_rows = hidden.numel() // hidden.shape[-1]
            rows = rows_per_tile(all_rows, module, self._tile_logits, self._device_bytes)
            asked = self._head.engine.blocks.logit_rows
            if self._tile_logits == "auto" and 0 < asked < (rows or all_rows):
                rows = asked
            if rows:
                logits: torch.Tensor = HeadFunction.apply(
                    hidden, module.weight, module.bias, self._head, module, rows
                )
                return logits
        return None


def rows_per_tile(rows: int, head: nn.Linear, tile_logits: TileLogits, device_bytes: int) -> int:
    """Returns the number of rows of logits that are computed at once; 0: all.

    Args:
        rows: Number of rows of the logits.
        head: The output embedding.
        tile_logits: GeminiPlugin's argument.
        device_bytes: Bytes of the device budget.
    """
    if type(tile_logits) is int:
        return tile_logits
    row_bytes = head.out_features * _FLOAT32
    most = max(LEAST_BYTES, device_bytes // TILE_MOST_SHARE)
    tile = max(1, max(min(TILE_BYTES, most), device_bytes // TILE_SHARE) // row_bytes)
    saved = COPIES * (rows - tile) * row_bytes
    if head.weight.requires_grad and head.weight.dtype != torch.float32:
        saved -= _FLOAT32 * head.weight.numel()  # the sum of the head's gradient
    worth = max(LEAST_BYTES, device_bytes // WORTH_SHARE)
    return 0 if tile_logits == "auto" and saved < worth else tile


def _defers(module: nn.Linear, hidden: Any) -> bool:
    """Whether a forward is one of plain training: no autocast, tracer, backward hook, subclass."""
    weight = module.weight
    return (
        module.training
        and torch.is_grad_enabled()
        and plain_torch()
        and type(hidden) is torch.Tensor
        and type(weight) is nn.Parameter
        and (hidden.requires_grad or weight.requires_grad)
        and hidden.dtype == weight.dtype
        and hidden.device == weight.device
        and hidden.dim() > 0
        and hidden.shape[-1] == weight.shape[1]
        and hidden.numel() > 0
        and module.out_features > 1
        and not torch.is_autocast_enabled(hidden.device.type)
        and not (module._backward_hooks or module._backward_pre_hooks)
        and not nn.modules.module._global_backward_hooks
        and not nn.modules.module._global_backward_pre_hooks
    )
