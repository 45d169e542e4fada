"""Ranks that divide a model's experts, and train each with data of its own."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import nn

from castor import _C
from castor.distributed.expert_exchange import ExpertExchange
from castor.distributed.rng_state import Generators
from castor.distributed.tensor_parallel import TensorParallel
from castor.errors import UsageError

_MOST_AT_ONCE = 1 << 18
"""Elements of gradients that are summed together, but for larger ones."""


class ExpertParallel(TensorParallel):
    """A model of which this process has some of the experts, and all that is no expert.

    Ranks exchange tokens at the experts (castor.distributed.expert_exchange), so the gradients of
    these are complete where they are; all others become the mean over the ranks before each step.
    """

    def start(self, generators: Generators, stages: Sequence[range] | None = None) -> None:
        """After boost: ranks that are done with generate serve those that are not.

        Args:
            generators: Of the model, whose numbers are this rank's own.
            stages: Numbers of the blocks of each of this process's stages; None: it has all.
        """
        model = self.model
        self.exchange.device = generators.device
        if callable(getattr(model, "generate", None)):
            model.generate = _Generate(model, self.exchange)
        self.refuse_readers(model)

    def settle_gradients(self, session: _C.Session, params: Sequence[nn.Parameter]) -> None:
        """Before a step: what every rank has gets the mean of the ranks' gradients. Collective.

        Args:
            session: Of the model.
            params: In its order.

        Raises:
            UsageError: Another rank does something else, or has another loss scale.
            Error: One is gone.
        """
        present, scale = session.gradient_marks()
        whole = [i for i, param in enumerate(params) if param not in self.cuts]
        everyone = self.ranks.hear("a step", ([present[i] for i in whole], scale))
        scales = {of for _, (_, of) in everyone if of is not None}
        if len(scales) > 1:
            raise UsageError(
                f"the ranks' gradients carry the loss scales {sorted(scales)}: use "
                "booster.backward for every micro-batch, on every rank"
            )
        grads = []
        for number, *anywhere in zip(whole, *(of for _, (of, _) in everyone), strict=True):
            if any(anywhere):
                if not present[number]:
                    session.make_gradient_present(number, next(iter(scales), 1.0))
                grads.append(params[number].grad)
        for some in _together(grads):
            total = torch.cat([grad.detach().reshape(-1) for grad in some])
            self.ranks.tensors.all_reduce(total)
            total /= self.ranks.size
            for grad, mean in zip(some, total.split([grad.numel() for grad in some]), strict=True):
                # Not as an edit of the user's, whom a loss scale would be hidden from.
                grad.data.copy_(mean.view_as(grad))


def _together(grads: Sequence[Any]) -> Iterator[list[torch.Tensor]]:
    """Groups gradients of one type that follow each other, some elements at a time."""
    for _, of_type in groupby(grads, key=lambda grad: grad.dtype):
        some: list[torch.Tensor] = []
        for grad in of_type:
            if some and sum(one.numel() for one in some) + grad.numel() > _MOST_AT_ONCE:
                yield some
                some = []
            some.append(grad)
        yield some


class _Generate:
    """A model's generate, behind which this rank serves the others until they are done too.

    Each has its own prompts, and may need more tokens than another.
    """

    def __init__(self, model: Any, exchange: ExpertExchange) -> None:
        self._model = weakref.ref(model)
        self._exchange = exchange

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model."""
        model: Any = self._model()
        assert model is not None
        generated = type(model).generate(model, *args, **kwargs)
        self._exchange.serve()
        return generated
