"""Forwards of modules of which a rank has a shard, one for each style."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from castor.distributed.expert_exchange import ExpertExchange
from castor.distributed.inputs import by_name, check_numbers
from castor.distributed.sequence_collectives import keeping
from castor.distributed.tensor_ranks import TensorRanks
from castor.distributed.vocabulary_loss import VocabularyLoss
from castor.errors import UsageError

Forward = Callable[..., Any]
"""(module, ranks, its argument, *args, **kwargs) -> outputs."""
Reduce = Callable[[torch.Tensor], torch.Tensor]
"""Reduces the shards' outputs of a layer: their sum, or this rank's tokens of it."""


class Part:
    """The forward of a module of which this rank has a part."""

    def __init__(
        self, module: nn.Module, forward: Forward, ranks: TensorRanks, argument: Any
    ) -> None:
        self.forward = forward
        self.argument = argument
        self._module = weakref.ref(module)
        self._ranks = ranks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module's own forward."""
        module = self._module()
        assert module is not None
        return self.forward(module, self._ranks, self.argument, *args, **kwargs)

    def __deepcopy__(self, _: dict[int, Any]) -> NoReturn:
        """Refused: a copy would compute with a part, and need the other ranks."""
        self._refuse()

    def __reduce_ex__(self, _: Any) -> NoReturn:
        """Refused, as copies are."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise UsageError(
            f"rank {self._ranks.rank} of {self._ranks.size} has shards of this model only, and a "
            "copy of it, or a pickle, would be no model: booster.save_model writes the full one"
        )


def _whole(module: nn.Module) -> Forward:
    """Returns the forward that computes with the module's tensors as they are."""
    forward: Forward = type(module).forward.__get__(module)
    return forward


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is transformers' linear layer that keeps its weight the other way round."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def columns(m: nn.Module, ranks: TensorRanks, _: int, x: torch.Tensor) -> torch.Tensor:
    """A linear layer of which this rank has some outputs."""
    return _of_entered(m, ranks.enter(x))


def _of_entered(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with keeping(x):
        result: torch.Tensor = _whole(m)(x)
    return result


def gathered_columns(m: nn.Module, ranks: TensorRanks, width: int, x: torch.Tensor) -> torch.Tensor:
    """... whose outputs all ranks get; `width` of them."""
    return ranks.gather_columns(columns(m, ranks, width, x), width)


def head(
    m: nn.Module, ranks: TensorRanks, given: tuple[int, VocabularyLoss], x: torch.Tensor
) -> torch.Tensor:
    """The output embedding, whose logits stay divided where the loss is."""
    width, loss = given
    if not loss.local:
        return gathered_columns(m, ranks, width, x)
    x = ranks.enter(x)
    logits = loss.deferred(x) if loss.deferred else None
    return _of_entered(m, x) if logits is None else logits


def rows(m: Any, _: TensorRanks, reduce: Reduce, x: torch.Tensor) -> torch.Tensor:
    """A linear layer of which this rank has some inputs, which come divided."""
    bias: torch.Tensor | None = m._parameters.get("bias")
    if bias is None:
        return reduce(_whole(m)(x))
    if is_conv1d(m):  # whose forward needs one
        return reduce(nn.functional.linear(x, m.weight.t())) + bias
    m._parameters["bias"] = None  # added once
    try:
        part = _whole(m)(x)
    finally:
        m._parameters["bias"] = bias
    return reduce(part) + bias


def split_rows(m: Any, ranks: TensorRanks, reduce: Reduce, x: torch.Tensor) -> torch.Tensor:
    """... which come whole."""
    return rows(m, ranks, reduce, ranks.scatter_columns(x))


def vocabulary(m: Any, ranks: TensorRanks, given: tuple[int, int], ids: torch.Tensor) -> Any:
    """An embedding of which this rank has some rows, from the first of `given` on, of so many.

    Raises:
        IndexError: Nobody has a row.
    """
    first, rows = given
    check_numbers(ids, rows, "input_ids")
    own = (ids >= first) & (ids < first + m.num_embeddings)
    found = _whole(m)((ids - first).clamp(0, m.num_embeddings - 1))
    return ranks.reduce(found.masked_fill(~own.unsqueeze(-1), 0.0))


def experts(
    m: nn.Module, ranks: TensorRanks, _: None, x: torch.Tensor, chosen: Any, weights: torch.Tensor
) -> torch.Tensor:
    """Experts of whose hidden units this rank has some."""
    return ranks.reduce(_whole(m)(ranks.enter(x), chosen, ranks.enter(weights)))


def own_experts(
    m: Any, ranks: TensorRanks, first: int, x: torch.Tensor, chosen: Any, weights: torch.Tensor
) -> torch.Tensor:
    """Experts of which this rank has some, from `first` on: it computes the tokens that chose them.

    Args:
        m: The experts; m.num_experts are here.
        ranks: Those with the others.
        first: The number of this rank's first one.
        x: Hidden states, (tokens, width).
        chosen: Numbers of experts, (tokens, choices).
        weights: Of each choice, (tokens, choices).
    """
    return ranks.reduce(_of_own_experts(m, first, ranks.enter(x), chosen, ranks.enter(weights)))


def exchanged_experts(
    m: Any, ranks: TensorRanks, given: tuple[ExpertExchange, str, int], x: torch.Tensor,
    chosen: Any, weights: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """... which computes the tokens of all ranks that chose them, each of which has its own data.

    Args:
        m: The experts; m.num_experts are here.
        ranks: Those with the others.
        given: Of the model; the module's name; how many experts there are.
        x: Hidden states, (tokens, width).
        chosen: Numbers of experts, (tokens, choices).
        weights: Of each choice, (tokens, choices).
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


def reduced(m: nn.Module, ranks: TensorRanks, _: None, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A module whose outputs are summed."""
    return ranks.reduce(_whole(m)(*args, **kwargs))


def own_heads(m: nn.Module, ranks: TensorRanks, name: str, *args: Any, **kwargs: Any) -> Any:
    """A module whose argument `name` has (batch x heads) first, of all heads."""
    given = by_name(_whole(m), args, kwargs)
    by_head = given[name]
    batch = by_head.shape[0] // (m.num_heads * ranks.size)  # type: ignore[operator]
    heads = by_head.view(batch, -1, *by_head.shape[1:])
    own = heads.tensor_split(ranks.size, dim=1)[ranks.rank]
    return _whole(m)(**given | {name: own.reshape(-1, *by_head.shape[1:])})
