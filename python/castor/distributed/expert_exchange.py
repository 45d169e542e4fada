"""Expert parallelism: rows are dispatched to the ranks whose experts they chose, and combined.

Each rank has its own data. A row is the hidden state of a token. Source: Lepikhin et al. 2020
(GShard, section 3.1), without a capacity: a rank computes all rows that chose its experts.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from castor.distributed.parallel_groups import ModelParallelGroup

_WITHOUT_GRADIENTS = "a forward without gradients"
_SERVES = "the end of generate"
"""Place at which a finished rank takes part in the others' forwards without gradients."""


@dataclass(frozen=True, kw_only=True)
class _Told:
    """The message that a rank sends the others before rows are exchanged."""

    counts: tuple[int, ...]
    """Number of rows that it sends to each rank."""
    width: int
    """Width of a hidden state."""
    choices: int
    """Number of experts that each row chooses."""
    dtypes: tuple[torch.dtype, torch.dtype]
    """Types of hidden states and of routing weights."""


class ExpertExchange:
    """Dispatch and combine for the modules of experts of one model."""

    def __init__(self, model: nn.Module, ranks: ModelParallelGroup) -> None:
        """Changes nothing.

        Args:
            model: The full model.
            ranks: Expert-parallel ranks, each with its own data.
        """
        self._model = weakref.ref(model)
        self._ranks = ranks
        self.device = torch.device("cpu")
        """Device that this rank computes on."""
        self._heard: list[tuple[str, Any]] | None = None
        """Messages that serve() has received for the forward it runs; None: it runs none."""

    def routes(
        self, name: str, experts: int, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> Routes:
        """Makes the routes of this rank's rows in one forward. Collective.

        Args:
            name: Name of the module of experts.
            experts: Number of its experts on all ranks.
            x: Hidden states, (tokens, width).
            chosen: Numbers of the chosen experts, (tokens, choices).
            weights: Routing weight of each choice, (tokens, choices).

        Raises:
            UsageError: Another rank does something else; every rank raises it.
            Error: A rank is gone.
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
            heard = ranks.all_gather_places(place, (name, told), unless=_excused)
        most = max(max(told.counts) for _, (_, told) in _asking(heard))
        return Routes(ranks=ranks, name=name, rows=rows, num_rows=len(x), room=max(1, most))

    def serve(self) -> None:
        """Takes part in the others' forwards without gradients until all are here. Collective.

        Raises:
            UsageError: Another rank does something else; every rank raises it.
            Error: A rank is gone.
        """
        model = self._model()
        assert model is not None
        while asking := _asking(
            heard := self._ranks.all_gather_places(_SERVES, None, unless=_excused)
        ):
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
    """Whether one rank may serve while another is in a forward without gradients."""
    return {_SERVES, _WITHOUT_GRADIENTS} == {one.partition(",")[0] for one in (place, other)}


@dataclass(frozen=True, kw_only=True)
class Routes:
    """The routes of a rank's rows in one forward of a module of experts.

    Each rank's loss is the mean over its own rows, and training takes the mean of these losses. So
    gradients are divided by the number of ranks where they enter the experts in backward, and
    multiplied by it where they leave.
    """

    ranks: ModelParallelGroup
    """Expert-parallel ranks."""
    name: str
    """Name of the module of experts."""
    rows: Sequence[torch.Tensor]
    """Numbers of this rank's rows that chose an expert of each rank, ascending; one tensor a
    rank."""
    num_rows: int
    """Number of this rank's rows."""
    room: int
    """Largest number of rows that any rank sends to any. Every rank sends that many to each,
    padded with zeros."""

    def send(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Dispatches rows: returns `room` rows from each rank for this one, in rank order.

        Args:
            x: Hidden states of this rank, (rows, width).
            weights: Routing weights, (rows, choices).
            chosen: Numbers of the chosen experts, (rows, choices).

        Returns:
            Hidden states, routing weights and chosen experts of the received rows. The experts of
            padding rows are -1.
        """
        sent: Any = cast("Any", _Send).apply(x, weights, chosen, self)
        return cast("tuple[torch.Tensor, torch.Tensor, torch.Tensor]", sent)

    def back(self, found: torch.Tensor) -> torch.Tensor:
        """Combines results: returns for each of this rank's rows the sum over ranks, in rank order.

        Args:
            found: Results of this rank's experts for the rows that send returned.
        """
        return cast("torch.Tensor", cast("Any", _Back).apply(found, self))

    def spread(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Sends rows to the ranks of their experts; returns the received ones, (ranks x room, ...).

        Args:
            tensors: Tensors (rows, ...) of this rank's rows.
        """
        size = self.ranks.size
        given = []
        for tensor in tensors:
            all_of = tensor.new_zeros((size, self.room, tensor.shape[-1]))
            for of_rank, rows in zip(all_of, self.rows, strict=True):
                of_rank[: len(rows)] = tensor[rows]
            given.append(all_of)
        return [received.flatten(0, 1) for received in self._all_to_all(given)]

    def summed(self, tensors: Sequence[torch.Tensor], factor: int = 1) -> list[torch.Tensor]:
        """Sends rows back and sums them by row: in fp32, in rank order, rounded once.

        Args:
            tensors: Tensors (ranks x room, ...), as spread returns them.
            factor: Factor of the sums.
        """
        size = self.ranks.size
        received = self._all_to_all(
            [one.reshape(size, self.room, one.shape[-1]) for one in tensors]
        )
        sums = []
        for parts in received:
            total = parts.new_zeros((self.num_rows, parts.shape[-1]), dtype=torch.float32)
            for part, rows in zip(parts, self.rows, strict=True):
                total.index_add_(0, rows, part[: len(rows)].float())
            sums.append(total.mul_(factor).to(parts.dtype))
        return sums

    def _all_to_all(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Exchanges tensors (ranks, rows, ...) by rank, in one all-to-all of their bytes."""
        as_bytes = [one.detach().contiguous().view(torch.uint8) for one in given]
        sent = torch.cat(as_bytes, -1)
        parts = self.ranks.all_to_all(sent).split([one.shape[-1] for one in as_bytes], -1)
        return [part.contiguous().view(one.dtype) for part, one in zip(parts, given, strict=True)]


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, routes: Routes
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.routes = routes
        counted = chosen.to(torch.int32) + 1  # 0: a padding row
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
        routes.ranks.all_gather_places(f"the backward through '{routes.name}'", None)
        return routes.spread([grad / routes.ranks.size])[0], None
