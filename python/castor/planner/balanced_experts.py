"""Simulates experts on the meta device, as if all were chosen equally often.

Which token chooses which expert depends on values, and meta tensors have none. So each expert is
given the same share of the tokens' choices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from castor.distributed.collectives import all_reduce, copy_to_layer
from castor.distributed.expert_exchange import Routes
from castor.distributed.parallel_groups import ModelParallelGroup
from castor.distributed.styles import Part, exchanged_experts, own_experts


def count_experts(model: nn.Module) -> dict[str, int]:
    """Counts the experts of each module that HybridParallelPlugin(ep_size=...) shards, by name."""
    return {
        name: count
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == "experts"
        and isinstance(count := getattr(module, "num_experts", None), int)
    }


def balance_experts(model: nn.Module, counts: Mapping[str, int]) -> None:
    """Has a rank's experts compute their even share of all choices.

    Args:
        model: The model on the meta device, with sharded experts.
        counts: Numbers of experts before sharding, from count_experts.
    """
    for name, count in counts.items():
        part: Any = model.get_submodule(name).forward
        assert isinstance(part, Part)
        if part.forward is exchanged_experts:
            part.forward = partial(_dispatched, name)
        else:
            assert part.forward is own_experts
            part.forward = partial(_balanced, count)


def _balanced(
    count: int,
    m: Any,
    ranks: ModelParallelGroup,
    _first: int,
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Computes as own_experts does, with the first choices of the first tokens.

    Args:
        count: Number of experts on all ranks.
        m: The module of this rank's experts.
        ranks: The expert-parallel ranks.
        x: Hidden states, (tokens, width).
        chosen: Numbers of the chosen experts, (tokens, choices).
        weights: Weight of each choice, (tokens, choices).
    """
    x, weights = copy_to_layer(x, ranks), copy_to_layer(weights, ranks)
    return all_reduce(_of_own(m, x, weights, -(-chosen.numel() * m.num_experts // count)), ranks)


def _dispatched(
    name: str,
    m: Any,
    ranks: ModelParallelGroup,
    given: tuple[Any, str, int],
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Computes as exchanged_experts does, with the expected number of rows sent to each rank.

    Args:
        name: Name of the module.
        m: The module of this rank's experts.
        ranks: The expert-parallel ranks.
        given: The argument of exchanged_experts; its last item is the number of all experts.
        x: Hidden states, (tokens, width).
        chosen: Numbers of the chosen experts, (tokens, choices).
        weights: Weight of each choice, (tokens, choices).
    """
    *_, count = given
    elsewhere = math.comb(count - m.num_experts, chosen.shape[1]) / math.comb(
        count, chosen.shape[1]
    )
    room = max(1, math.ceil(len(x) * (1 - elsewhere)))
    rows = [torch.arange(room, device=x.device)] * ranks.size
    routes = Routes(ranks=ranks, name=name, rows=rows, num_rows=len(x), room=room)
    theirs, their_weights, _ = routes.send(x, weights, chosen)
    choices = -(-ranks.size * chosen.numel() * m.num_experts // count)
    return routes.back(_of_own(m, theirs, their_weights, choices))


def _of_own(m: Any, x: torch.Tensor, weights: torch.Tensor, choices: int) -> torch.Tensor:
    """Computes `choices` choices of the first rows, divided evenly over this rank's experts."""
    of_choice = torch.arange(max(1, choices), device=x.device)
    tokens, which = (of_choice // weights.shape[1]) % len(x), of_choice % weights.shape[1]
    forward = type(m).forward.__get__(m)
    numbers = (of_choice % m.num_experts)[:, None]
    found = forward(x[tokens], numbers, weights[tokens, which, None])
    return torch.zeros_like(x).index_add(0, tokens, found)
