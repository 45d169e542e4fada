"""Expert parallelism: ranks have different experts of a model, and each has its own data."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import nn

from castor import _C
from castor.distributed.expert_exchange import ExpertExchange
from castor.distributed.rank_rng import Generators
from castor.distributed.tensor_parallel import TensorParallel
from castor.runtime.rank_group import check_equal

_MOST_AT_ONCE = 1 << 18
"""Largest number of gradient elements that one all-reduce sums; a larger gradient goes alone."""


class ExpertParallel(TensorParallel):
    """A model of which this process has some of the experts, and all other parameters.

    Ranks exchange tokens at the experts (castor.distributed.expert_exchange), so the gradients of
    experts are complete on their rank. All other gradients are averaged over the ranks before each
    step.
    """

    def start(self, generators: Generators, stages: Sequence[range] | None = None) -> None:
        """Has ranks that are done with generate serve the others, after boost.

        Args:
            generators: Generators that the model draws from; they stay different on each rank.
            stages: Not used; see TensorParallel.start.
        """
        model = self.model
        self.exchange.device = generators.device
        if callable(getattr(model, "generate", None)):
            model.generate = _Generate(model, self.exchange)
        self.refuse_readers(model)

    def settle_gradients(self, session: _C.Session, params: Sequence[nn.Parameter]) -> None:
        """Averages over the ranks the gradients of parameters that all have. Collective.

        Runs before a step.

        Args:
            session: Session of the model.
            params: Its parameters, in the session's order.

        Raises:
            UsageError: Another rank does something else, or has another loss scale.
            Error: A rank is gone.
        """
        present, scale = session.gradient_marks()
        whole = [i for i, param in enumerate(params) if param not in self.shard_specs]
        everyone = self.ranks.all_gather_places("a step", ([present[i] for i in whole], scale))
        scales = {
            number: of
            for number, (_, (_, of)) in zip(self.ranks.numbers, everyone, strict=True)
            if of is not None
        }
        check_equal(
            [{"the loss scale that their gradients carry": of} for of in scales.values()],
            numbers=[*scales],
            remedy="use booster.backward for every micro-batch, on every rank",
        )
        grads = []
        for number, *anywhere in zip(whole, *(of for _, (of, _) in everyone), strict=True):
            if any(anywhere):
                if not present[number]:
                    session.make_gradient_present(number, next(iter(scales.values()), 1.0))
                grads.append(params[number].grad)
        for some in _together(grads):
            # On the host: a rank may have a gradient on its device, and another in host storage.
            total = torch.cat([grad.detach().reshape(-1).cpu() for grad in some])
            total = self.ranks.all_reduce(total)
            total /= self.ranks.size
            for grad, mean in zip(some, total.split([grad.numel() for grad in some]), strict=True):
                # Through .data: an edit by the user would be refused under a loss scale.
                grad.data.copy_(mean.view_as(grad))


def _together(grads: Sequence[Any]) -> Iterator[list[torch.Tensor]]:
    """Groups successive gradients of one type, up to _MOST_AT_ONCE elements together."""
    for _, of_type in groupby(grads, key=lambda grad: grad.dtype):
        some: list[torch.Tensor] = []
        for grad in of_type:
            if some and sum(one.numel() for one in some) + grad.numel() > _MOST_AT_ONCE:
                yield some
                some = []
            some.append(grad)
        yield some


class _Generate:
    """A model's generate, after which this rank serves the others until they are done too.

    Ranks have different prompts, so one may need more tokens than another.
    """

    def __init__(self, model: Any, exchange: ExpertExchange) -> None:
        self._model = weakref.ref(model)
        self._exchange = exchange

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Generates with the class's generate, then serves the other ranks."""
        model: Any = self._model()
        assert model is not None
        generated = type(model).generate(model, *args, **kwargs)
        self._exchange.serve()
        return generated
