"""Check that tensor-parallel ranks compute equal gradients of full parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from castor.errors import UsageError

_ALIKE = 1e-2
"""Largest relative difference between two ranks' sums of squares of one gradient."""
_ROUNDING = 1e-10
"""Sum of squares that may come from rounding alone, relative to that of all gradients."""


def check_full_gradients(
    model: nn.Module,
    params: Sequence[torch.Tensor],
    squares: Sequence[Sequence[float]],
    total: float,
) -> None:
    """Checks, in a step, that ranks have equal gradients of the parameters that all have in full.

    A gradient differs if the plan leaves out a parameter that acts on shards of heads or hidden
    units.

    Args:
        model: The tensor-parallel model.
        params: Parameters that every rank has in full.
        squares: For each rank, the sum of squares of the gradient of each of `params`.
        total: Sum of squares of all gradients of the model.

    Raises:
        UsageError: A gradient differs between ranks; every rank raises it.
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
