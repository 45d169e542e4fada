"""Forwards of modules of which a rank has a shard, one for each style."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from castor.distributed.collectives import (
    all_reduce,
    copy_to_layer,
    gather_columns,
    keeping,
    linear_of_entered,
    scatter_columns,
)
from castor.distributed.expert_exchange import ExpertExchange
from castor.distributed.inputs import by_name, check_numbers
from castor.distributed.parallel_groups import ModelParallelGroup
from castor.distributed.vocabulary_loss import VocabularyLoss
from castor.errors import UsageError

Forward = Callable[..., Any]
"""A style: (module, ranks, the style's argument, *args, **kwargs) -> outputs."""
Reduce = Callable[[torch.Tensor], torch.Tensor]
"""Reduces the shards' outputs of a layer: their sum, or this rank's tokens of it."""


class Part:
    """The forward of a module of which this rank has a shard; it calls a style."""

    def __init__(
        self, module: nn.Module, forward: Forward, ranks: ModelParallelGroup, argument: Any
    ) -> None:
        self.forward = forward
        self.argument = argument
        self._module = weakref.ref(module)
        self._ranks = ranks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the style's forward on the module."""
        module = self._module()
        assert module is not None
        return self.forward(module, self._ranks, self.argument, *args, **kwargs)

    def __deepcopy__(self, _: dict[int, Any]) -> NoReturn:
        """Refuses to copy: a copy would compute with a shard, and need the other ranks."""
        self._refuse()

    def __reduce_ex__(self, _: Any) -> NoReturn:
        """Refuses to pickle, as it refuses to copy."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise UsageError(
            f"rank {self._ranks.rank} of {self._ranks.size} has shards of this model only, and a "
            "copy of it, or a pickle, would be no model: booster.save_model writes the full one"
        )


def _whole(module: nn.Module) -> Forward:
    """Returns the class's forward, which computes with the module's tensors as they are."""
    forward: Forward = type(module).forward.__get__(module)
    return forward


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is transformers' Conv1D, a linear layer with a transposed weight."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def columns(m: nn.Module, ranks: ModelParallelGroup, _: int, x: torch.Tensor) -> torch.Tensor:
    """Runs a column-parallel linear layer; returns this rank's outputs."""
    return _of_entered(m, copy_to_layer(x, ranks), ranks)


def _of_entered(m: nn.Module, x: torch.Tensor, ranks: ModelParallelGroup) -> torch.Tensor:
    if type(m) is nn.Linear:
        beside = linear_of_entered(x, m.weight, m.bias, ranks)
        if beside is not None:
            return beside
    with keeping(x):
        result: torch.Tensor = _whole(m)(x)
    return result


def gathered_columns(
    m: nn.Module, ranks: ModelParallelGroup, width: int, x: torch.Tensor
) -> torch.Tensor:
    """Runs a column-parallel linear layer, and gathers all of its `width` outputs."""
    return gather_columns(columns(m, ranks, width, x), ranks, width)


def head(
    m: nn.Module, ranks: ModelParallelGroup, given: tuple[int, VocabularyLoss], x: torch.Tensor
) -> torch.Tensor:
    """Runs the output embedding; its logits stay sharded where the loss is vocab-parallel."""
    width, loss = given
    if not loss.local:
        return gathered_columns(m, ranks, width, x)
    x = copy_to_layer(x, ranks)
    logits = loss.deferred(x) if loss.deferred else None
    return _of_entered(m, x, ranks) if logits is None else logits


def rows(m: Any, _: ModelParallelGroup, reduce: Reduce, x: torch.Tensor) -> torch.Tensor:
    """Runs a row-parallel linear layer, whose input is sharded."""
    bias: torch.Tensor | None = m._parameters.get("bias")
    if bias is None:
        return reduce(_whole(m)(x))
    if is_conv1d(m):  # its forward needs a bias
        return reduce(nn.functional.linear(x, m.weight.t())) + bias
    m._parameters["bias"] = None  # added once
    try:
        part = _whole(m)(x)
    finally:
        m._parameters["bias"] = bias
    return reduce(part) + bias


def split_rows(m: Any, ranks: ModelParallelGroup, reduce: Reduce, x: torch.Tensor) -> torch.Tensor:
    """Runs a row-parallel linear layer, whose input is full."""
    return rows(m, ranks, reduce, scatter_columns(x, ranks))


def vocabulary(m: Any, ranks: ModelParallelGroup, given: tuple[int, int], ids: torch.Tensor) -> Any:
    """Runs a vocab-parallel embedding.

    Args:
        m: The embedding, with this rank's rows.
        ranks: Ranks that have the other rows.
        given: Number of this rank's first row; full number of rows.
        ids: Numbers of tokens.

    Raises:
        IndexError: An id has a row on no rank.
    """
    first, rows = given
    check_numbers(ids, rows, "input_ids")
    own = (ids >= first) & (ids < first + m.num_embeddings)
    found = _whole(m)((ids - first).clamp(0, m.num_embeddings - 1))
    return all_reduce(found.masked_fill(~own.unsqueeze(-1), 0.0), ranks)


def experts(
    m: nn.Module,
    ranks: ModelParallelGroup,
    _: None,
    x: torch.Tensor,
    chosen: Any,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Runs experts whose hidden units are sharded (tensor parallelism)."""
    return all_reduce(
        _whole(m)(copy_to_layer(x, ranks), chosen, copy_to_layer(weights, ranks)), ranks
    )


def own_experts(
    m: Any,
    ranks: ModelParallelGroup,
    first: int,
    x: torch.Tensor,
    chosen: Any,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Runs this rank's experts on the tokens that chose them; all ranks have the same tokens.

    Args:
        m: This rank's experts; m.num_experts of them.
        ranks: Ranks that have the other experts.
        first: Number of this rank's first expert.
        x: Hidden states, (tokens, width).
        chosen: Numbers of the chosen experts, (tokens, choices).
        weights: Routing weight of each choice, (tokens, choices).
    """
    return all_reduce(
        _of_own_experts(m, first, copy_to_layer(x, ranks), chosen, copy_to_layer(weights, ranks)),
        ranks,
    )


def exchanged_experts(
    m: Any, ranks: ModelParallelGroup, given: tuple[ExpertExchange, str, int], x: torch.Tensor,
    chosen: Any, weights: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Runs this rank's experts on all ranks' tokens that chose them (expert parallelism).

    Args:
        m: This rank's experts; m.num_experts of them.
        ranks: Ranks that have the other experts, each with its own data.
        given: Exchange of the model; name of the module; number of experts of all ranks.
        x: Hidden states of this rank, (tokens, width).
        chosen: Numbers of the chosen experts, (tokens, choices).
        weights: Routing weight of each choice, (tokens, choices).
    """
    exchange, name, experts = given
    routes = exchange.routes(name, experts, x, chosen, weights)
    rows, their_weights, their_choices = routes.send(x, weights, chosen)
    first = ranks.shard_range(experts).start
    return routes.back(_of_own_experts(m, first, rows, their_choices, their_weights))


def _of_own_experts(
    m: Any, first: int, x: torch.Tensor, chosen: Any, weights: torch.Tensor
) -> torch.Tensor:
    tokens, choices = ((chosen >= first) & (chosen < first + m.num_experts)).nonzero(as_tuple=True)
    count = len(tokens)
    if not count:  # a token that does not count: gradients are zeros as in plain PyTorch, not None
        tokens = choices = chosen.new_zeros(1)
    numbers = (chosen[tokens, choices] - first).clamp(0, m.num_experts - 1)
    found = _whole(m)(x[tokens], numbers[:, None], weights[tokens, choices, None])
    return torch.zeros_like(x).index_add(0, tokens[:count], found[:count])


def reduced(
    m: nn.Module, ranks: ModelParallelGroup, _: None, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Runs a module, and sums its outputs over the ranks."""
    return all_reduce(_whole(m)(*args, **kwargs), ranks)


def own_heads(m: nn.Module, ranks: ModelParallelGroup, name: str, *args: Any, **kwargs: Any) -> Any:
    """Runs a module with this rank's heads of its argument `name`, (batch x all heads, ...)."""
    given = by_name(_whole(m), args, kwargs)
    by_head = given[name]
    batch = by_head.shape[0] // (m.num_heads * ranks.size)  # type: ignore[operator]
    heads = by_head.view(batch, -1, *by_head.shape[1:])
    own = heads.tensor_split(ranks.size, dim=1)[ranks.rank]
    return _whole(m)(**given | {name: own.reshape(-1, *by_head.shape[1:])})
