"""Handles budgets that are too small for recomputed blocks: runs in pieces, or gives advice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from castor.errors import OutOfMemoryError
from castor.runtime.blocks import find_blocks

MOST_TILES = 16
"""Most pieces that "auto" cuts rows into."""
_WIDE = 8
"""Approximate upper bound of the tensors alive at once for each output of a block's layers."""
_HEADS = 64
"""Approximate upper bound of the attention heads that make a matrix of scores."""
_ROOM = 2
"""Factor by which the budget must exceed a rough estimate for no step to be simulated."""

_STATE_BYTES = 16
"""Bytes of an element of a parameter that is trained with Adam, in any precision."""

Shape = tuple[int, int]
"""Shape of a batch: samples, and tokens of each sample."""


@dataclass(frozen=True)
class Pieces:
    """Pieces of rows that a step is computed in to take less memory."""

    tiles: int = 1
    """Number of pieces that the blocks' MLPs run in."""
    logit_rows: int = 0
    """Number of rows of logits that are computed at once; 0: as many as tile_logits says."""


class StepSimulator(Protocol):
    """Simulated steps of a model, every block recomputed (castor.estimate.boosted)."""

    def fitting(self, shape: Shape) -> Pieces | None:
        """Returns the fewest pieces of logits, then of MLPs, with which a step fits; else None."""
        ...

    def advice(self, shape: Shape) -> str:
        """Describes the memory of a step, and the largest step that fits; "": not known."""
        ...


class Tight:
    """Watches a model's training forwards, and decides whether the budget is too small for them."""

    def __init__(self, model: nn.Module, simulated: StepSimulator, device_bytes: int) -> None:
        """Takes a model and its device budget."""
        self._simulated = simulated
        self._device_bytes = device_bytes
        self._bytes_per_token = _bytes_per_token(model)
        self._largest_module = _largest_module_bytes(model)
        self._kept_per_token = 4 * _WIDE * _out_features(model)
        self._num_blocks = len(find_blocks(model))
        self._state_bytes = sum(_state_bytes(param) for param in model.parameters())
        self._looked_at: list[Shape] = []
        self._shape: Shape | None = None
        self.pieces = Pieces()
        """Pieces with which all forwards so far fit."""

    def explain(self, error: BaseException | None) -> None:
        """Adds advice to an error of the device budget."""
        if isinstance(error, OutOfMemoryError) and error.tier == "device" and self._shape:
            error.advise(self._simulated.advice(self._shape))

    def is_ample(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], nonmodel_bytes: int
    ) -> bool:
        """Whether a rough estimate says that all blocks of a training forward can be kept.

        Args:
            args: Positional arguments of the model's forward.
            kwargs: Keyword arguments of the model's forward.
            nonmodel_bytes: Bytes of activations that are on the device already.
        """
        shape = _shape_of(args, kwargs)
        if shape is None:
            return False
        samples, tokens = shape
        others = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        if any(other.numel() > samples * tokens for other in others):
            return False  # images, or a mask of every pair of tokens
        rough = samples * tokens * (self._kept_per_token + self._num_blocks * _HEADS * tokens * 4)
        return self._state_bytes + nonmodel_bytes + _ROOM * rough <= self._device_bytes

    def comes(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Looks at a training forward of the model; returns whether the pieces have changed.

        If a rough estimate says that there is room, no step is simulated.
        """
        shape = self._shape = _shape_of(args, kwargs)
        if shape is None or any(_within(shape, other) for other in self._looked_at):
            return False
        self._looked_at.append(shape)
        samples, tokens = shape
        of_scores = _HEADS * tokens * 4
        rough = samples * tokens * (self._bytes_per_token + of_scores) + 2 * self._largest_module
        found = None if _ROOM * rough <= self._device_bytes else self._simulated.fitting(shape)
        if not found:
            return False
        before = self.pieces
        rows = [pieces.logit_rows for pieces in (found, before) if pieces.logit_rows]
        self.pieces = Pieces(max(found.tiles, before.tiles), min(rows, default=0))
        return self.pieces != before


def _shape_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Shape | None:
    """Returns the shape of the tokens in a model's arguments; None: there are no tokens."""
    ids = kwargs.get("input_ids", args[0] if args else None)
    if isinstance(ids, torch.Tensor) and ids.dim() == 2 and not ids.is_floating_point():
        return ids.shape[0], ids.shape[1]
    return None


def _within(shape: Shape, other: Shape) -> bool:
    return shape[1] <= other[1] and shape[0] * shape[1] <= other[0] * other[1]


def _bytes_per_token(model: nn.Module) -> int:
    """Returns a rough upper estimate of a step's bytes per token, with recomputed blocks."""
    blocks = list(find_blocks(model).values())
    inner = max((_out_features(block) for block in blocks), default=0)
    outside = _out_features(model) - sum(map(_out_features, blocks))
    width = max((m.in_features for m in model.modules() if isinstance(m, nn.Linear)), default=0)
    return 4 * (len(blocks) * width + _WIDE * (inner + outside))


def _out_features(module: nn.Module) -> int:
    """Returns the sum of the larger sides of all matrices, whatever their layer is called."""
    return sum(max(p.shape) for p in module.parameters() if p.dim() > 1)


def _state_bytes(param: nn.Parameter) -> int:
    """Returns the bytes of a parameter, its gradient, master and two Adam moments, in any tier."""
    return _STATE_BYTES * param.numel() if param.requires_grad else param.nbytes


def _largest_module_bytes(model: nn.Module) -> int:
    return max(
        sum(param.nbytes for param in module.parameters(recurse=False))
        for module in model.modules()
    )
