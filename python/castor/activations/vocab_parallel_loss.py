"""Vocabulary-parallel loss in tiles of rows: each rank has some columns of the logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from castor.activations.lazy_logits import Rows
from castor.activations.row_expressions import in_tiles
from castor.activations.tiled_loss import Loss


class LocalColumns(Protocol):
    """This rank's shard of a vocabulary-parallel loss (castor.distributed)."""

    def seen(self, logits: torch.Tensor, rows: slice) -> torch.Tensor:
        """Returns for each row the values that the other ranks need, (values, rows) in float32.

        Args:
            logits: Logits of this rank's columns, (rows, own columns).
            rows: Numbers of the rows.
        """
        ...

    def total(self, seen: torch.Tensor) -> torch.Tensor:
        """Returns the sum of all rows' losses. Collective.

        Args:
            seen: Results of `seen` for all rows, (values, rows).
        """
        ...

    def gradient(self, logits: torch.Tensor, rows: Rows, grad: torch.Tensor) -> torch.Tensor:
        """Returns the logits' gradient for the gradients `grad` of rows' losses; after `total`."""
        ...


@dataclass(frozen=True, kw_only=True)
class VocabParallelLoss(Loss):
    """Vocabulary-parallel loss with one collective for all tiles; tiles may differ by rank."""

    own: LocalColumns
    """This rank's shard of the loss."""

    def of(self, logits: torch.Tensor, rows: Rows, reduction: str) -> torch.Tensor:
        """Returns a tensor with the gradient of some rows' losses, and zeros as values."""
        losses: torch.Tensor = _OfColumns.apply(logits, self.own, rows)
        return losses if reduction == "none" else losses.sum()

    def value(self) -> torch.Tensor:
        """Returns the sum of the losses. The head's weights must be pinned. Collective."""
        seen: list[torch.Tensor] = []
        hidden = self.hidden_rows()

        def compute(rows: slice) -> None:
            logits = self.changed_by_element(self.logits.source.project(hidden(rows)))
            seen.append(self.own.seen(logits, rows))

        in_tiles(self.logits.source, self.target.numel(), compute)
        return self.own.total(torch.cat(seen, dim=1))


class _OfColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, own: LocalColumns, rows: Rows) -> torch.Tensor:
        ctx.save_for_backward(logits)
        ctx.own, ctx.rows = own, rows
        return logits.new_zeros(logits.shape[0], dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (logits,) = ctx.saved_tensors
        return ctx.own.gradient(logits, ctx.rows, grad), None, None
