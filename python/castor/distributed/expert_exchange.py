"""Experts that ranks with other data divide: rows go to those whose experts they chose, and back.

Source: Lepikhin et al. 2020 (GShard, section 3.1), without a capacity: a rank computes all rows
that chose its experts, however many.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from castor.distributed.tensor_ranks import TensorRanks

_WITHOUT_GRADIENTS = "a forward without gradients"
_SERVES = "the end of generate"
"""Place at which a finished rank takes part in the others' forwards without gradients."""


@dataclass(frozen=True, kw_only=True)
class _Told:
    """The message of a rank to the others before rows are exchanged."""

    counts: tuple[int, ...]
    """Rows that it gives each rank."""
    width: int
    choices: int
    dtypes: tuple[torch.dtype, torch.dtype]
    """Types of hidden states and of routing weights."""


class ExpertExchange:
    """The modules of experts of one model, of which each rank has some."""

    def __init__(self, model: nn.Module, ranks: TensorRanks) -> None:
        """Nothing is changed.

        Args:
            model: The whole.
            ranks: Those with the others' experts, each with data of its own.
        """
        self._model = weakref.ref(model)
        self._ranks = ranks
        self.device = torch.device("cpu")
        """Device of this rank."""
        self._heard: list[tuple[str, Any]] | None = None
        """Messages of the others to a rank that serves them."""

    def routes(
        self, name: str, experts: int, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> Routes:
        """Makes the routes of the rows. Collective.

        Args:
            name: Of the module.
            experts: That all ranks have of it.
            x: Hidden states, (tokens, width).
            chosen: Numbers of experts, (tokens, choices).
            weights: Of each choice, (tokens, choices).

        Raises:
            UsageError: Another rank does something else; every rank raises it.
            Error: One is gone.
        """
        ranks = self._ranks
        rows = []
        for rank in range(ranks.size):
            of = ranks.shard_range(experts, rank)
            rows.append(((chosen >= of.start) & (chosen < of.stop)).any(-1).nonzero()[:, 0])
        heard, self._heard = self._heard, None
        if heard is None:
            told = _Told(
                counts=tuple(map(len, rows)),
                width=x.shape[-1],
                choices=chosen.shape[-1],
                dtypes=(x.dtype, weights.dtype),
            )
            place = f"the forward through '{name}'"
            if not torch.is_grad_enabled():
                place = f"{_WITHOUT_GRADIENTS}, through '{name}'"
            heard = ranks.hear(place, (name, told), unless=_excused)
        most = max(max(told.counts) for _, (_, told) in _asking(heard))
        return Routes(ranks=ranks, name=name, rows=rows, num_rows=len(x), room=max(1, most))

    def serve(self) -> None:
        """Takes part in the others' forwards without gradients until all are here. Collective.

        Raises:
            UsageError: Another rank does something else; every rank raises it.
            Error: One is gone.
        """
        model = self._model()
        assert model is not None
        while asking := _asking(heard := self._ranks.hear(_SERVES, None, unless=_excused)):
            name, told = asking[0][1]
            of_states, of_weights = told.dtypes
            self._heard = heard
            with torch.no_grad():
                model.get_submodule(name)(
                    torch.zeros((0, told.width), dtype=of_states, device=self.device),
                    torch.zeros((0, told.choices), dtype=torch.int64, device=self.device),
                    torch.zeros((0, told.choices), dtype=of_weights, device=self.device),
                )


def _asking(heard: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
    return [one for one in heard if one[0] != _SERVES]


def _excused(place: str, other: str) -> bool:
    """Whether ranks may be at these places together."""
    return {_SERVES, _WITHOUT_GRADIENTS} == {one.partition(",")[0] for one in (place, other)}


@dataclass(frozen=True, kw_only=True)
class Routes:
    """The routes of a rank's rows in one forward of a module of experts.

    The losses of the ranks are means of their own rows, and what is trained is the mean of these:
    so gradients are divided by the number of ranks where they enter experts, and multiplied with it
    where they leave.
    """

    ranks: TensorRanks
    name: str
    rows: Sequence[torch.Tensor]
    """By rank, numbers of those that chose one of its experts, in order."""
    num_rows: int
    """Number of this rank's rows."""
    room: int
    """Rows that any rank gives any at most: so many each gives each, zeros behind its own."""

    def send(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Dispatches rows: returns `room` rows of each rank for this one, in rank order.

        Of rows that are none chosen is -1.
        """
        sent: Any = cast("Any", _Send).apply(x, weights, chosen, self)
        return cast("tuple[torch.Tensor, torch.Tensor, torch.Tensor]", sent)

    def back(self, found: torch.Tensor) -> torch.Tensor:
        """Combines for each of this rank's rows the ranks' results, summed in rank order.

        Args:
            found: Of the rows that send gave.
        """
        return cast("torch.Tensor", cast("Any", _Back).apply(found, self))

    def spread(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns all ranks' rows for this one, of tensors with this rank's rows."""
        size = self.ranks.size
        given = []
        for tensor in tensors:
            all_of = tensor.new_zeros((size, self.room, tensor.shape[-1]))
            for of_rank, rows in zip(all_of, self.rows, strict=True):
                of_rank[: len(rows)] = tensor[rows]
            given.append(all_of)
        return [received.flatten(0, 1) for received in self._exchanged(given)]

    def summed(self, tensors: Sequence[torch.Tensor], factor: int = 1) -> list[torch.Tensor]:
        """The way back: sums in fp32, in rank order, rounded once."""
        size = self.ranks.size
        received = self._exchanged([one.reshape(size, self.room, one.shape[-1]) for one in tensors])
        sums = []
        for parts in received:
            total = parts.new_zeros((self.num_rows, parts.shape[-1]), dtype=torch.float32)
            for part, rows in zip(parts, self.rows, strict=True):
                total.index_add_(0, rows, part[: len(rows)].float())
            sums.append(total.mul_(factor).to(parts.dtype))
        return sums

    def _exchanged(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """(ranks, rows, ...) tensors, in one exchange."""
        as_bytes = [one.detach().contiguous().view(torch.uint8) for one in given]
        sent = torch.cat(as_bytes, -1)
        received = torch.empty_like(sent)
        self.ranks.tensors.all_to_all(sent, received)
        parts = received.split([one.shape[-1] for one in as_bytes], -1)
        return [part.contiguous().view(one.dtype) for part, one in zip(parts, given, strict=True)]


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, routes: Routes
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.routes = routes
        counted = chosen.to(torch.int32) + 1  # 0: of a row that is none
        theirs, their_weights, counted = routes.spread([x, weights, counted])
        their_choices = counted.long() - 1
        ctx.mark_non_differentiable(their_choices)
        return theirs, their_weights, their_choices

    @staticmethod
    def backward(
        ctx: Any, of_rows: torch.Tensor, of_weights: torch.Tensor, _: Any
    ) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        routes: Routes = ctx.routes
        mine, my_weights = routes.summed([of_rows, of_weights], factor=routes.ranks.size)
        return mine, my_weights, None, None


class _Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, found: torch.Tensor, routes: Routes) -> torch.Tensor:
        ctx.routes = routes
        return routes.summed([found])[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        routes: Routes = ctx.routes
        routes.ranks.hear(f"the backward through '{routes.name}'", None)
        return routes.spread([grad / routes.ranks.size])[0], None
