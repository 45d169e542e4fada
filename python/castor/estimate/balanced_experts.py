"""Experts on paper: which tokens choose which is a value, and the meta device has none.

So all are taken to be chosen alike: of the tokens' choices each expert gets as many.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from castor.distributed.styles import Part, own_experts
from castor.distributed.tensor_ranks import TensorRanks


def count_experts(model: nn.Module) -> dict[str, int]:
    """Those of each module that HybridParallelPlugin(ep_size=...) divides, by its name."""
    return {
        name: count
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == "experts"
        and isinstance(count := getattr(module, "num_experts", None), int)
    }


def balance_experts(model: nn.Module, counts: Mapping[str, int]) -> None:
    """Has a rank's experts compute as many choices as they are of all experts.

    Args:
        model: On the meta device, its experts divided.
        counts: From count_experts, before.
    """
    for name, count in counts.items():
        part: Any = model.get_submodule(name).forward
        assert isinstance(part, Part)
        assert part.forward is own_experts
        part.forward = partial(_balanced, count)


def _balanced(
    count: int,
    m: Any,
    ranks: TensorRanks,
    _first: int,
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """As own_experts, of the first choices of the first tokens.

    Args:
        count: Experts of all ranks.
        m: The rank's.
        ranks: Those with the others.
        x: Hidden states, (tokens, width).
        chosen: Numbers of experts, (tokens, choices).
        weights: Of each choice, (tokens, choices).
    """
    x, weights = ranks.enter(x), ranks.enter(weights)
    own = max(1, -(-chosen.numel() * m.num_experts // count))
    tokens = torch.arange(own, device=x.device) // chosen.shape[1]
    choices = torch.arange(own, device=x.device) % chosen.shape[1]
    numbers = chosen[tokens, choices].clamp(0, m.num_experts - 1)
    forward = type(m).forward.__get__(m)
    found = forward(x[tokens], numbers[:, None], weights[tokens, choices, None])
    return ranks.reduce(torch.zeros_like(x).index_add(0, tokens, found))
