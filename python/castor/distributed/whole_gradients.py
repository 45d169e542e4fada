"""Gradients of what every rank has whole of divided layers: each rank computes the same."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from castor.errors import UsageError

_ALIKE = 1e-2
"""Relative difference that squares of one gradient may have which two ranks computed."""
_ROUNDING = 1e-10
"""Squares that may be of rounding alone, relative to those of all gradients."""


def check_whole_gradients(
    model: nn.Module,
    params: Sequence[torch.Tensor],
    squares: Sequence[Sequence[float]],
    total: float,
) -> None:
    """In a step: no plan has left out a parameter that ranks compute with parts of heads.

    Args:
        model: Of which ranks divide layers.
        params: That every rank has whole.
        squares: Of each rank, the sum of squares of each one's gradient.
        total: Of all gradients of the model.

    Raises:
        UsageError: One has; every rank raises it.
    """
    for rank, theirs in enumerate(squares):
        for param, one, other in zip(params, squares[0], theirs, strict=True):
            most, finite = max(one, other), math.isfinite(one) and math.isfinite(other)
            if finite and most > _ROUNDING * total and abs(one - other) > _ALIKE * most:
                name = next(name for name, known in model.named_parameters() if known is param)
                raise UsageError(
                    f"all {len(squares)} tensor-parallel ranks have the full parameter '{name}', "
                    f"and its gradient is another on rank {rank} than on rank 0: it is computed "
                    "with shards of heads or hidden units, which the plan does not say: give a "
                    f"tp_plan that has it, as {{**model.tp_plan, '{name}': "
                    "'replicated_with_grad_allreduce'}"
                )
