"""A boosted model that torch's own classes train."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from castor.runtime.boosted_model import check_not_boosted, remember
from castor.runtime.guard import guard
from castor.runtime.model_shards import ShardFinder
from castor.runtime.rank_group import RankGroup, Result
from castor.runtime.report import TorchReport
from castor.runtime.shards import is_dtensor


class TorchModel:
    """A boosted model whose parameters torch keeps.

    This class itself is for one process; subclasses add parallelism. It holds the parameters, and
    neither the model nor the optimizers.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        ranks: RankGroup | None,
        trained_by: str,
    ) -> None:
        """Registers a model that its parallelism has set up.

        Args:
            model: A model that is not boosted yet.
            optimizers: Optimizers over its parameters.
            ranks: Ranks that share it; None: this process is alone.
            trained_by: Class or function that trains it, for messages.

        Raises:
            UsageError: The model is boosted already.
        """
        check_not_boosted(model)
        named = list(model.named_parameters())
        self.params = [param for _, param in named]
        self.names = [name for name, _ in named]
        self.ranks = ranks
        self.trained_by = trained_by
        self.skipped_steps = 0
        self.step_skipped = False
        self.gradient_norm: float | None = None
        self.resumed_steps = 0
        """Number of steps before this process, from the checkpoint it resumed from."""
        self.steps = 0
        """Number of steps since boost."""
        self.unreduced = False
        """Whether the last pass was under no_sync, so that its gradients are this rank's alone."""
        self._synchronised = True
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        guard(model)
        remember(model, self)

    @property
    def shared(self) -> bool:
        """See BoostedModel."""
        return self.ranks is not None

    @property
    def num_steps(self) -> int:
        """See BoostedModel."""
        return self.resumed_steps + self.steps

    @num_steps.setter
    def num_steps(self, steps: int) -> None:
        self.resumed_steps = steps - self.steps

    @contextmanager
    def unsynchronised(self) -> Iterator[None]:
        """See BoostedModel."""
        before = self._synchronised
        self.synchronise(False)
        try:
            yield
        finally:
            self.synchronise(before)

    def synchronise(self, on: bool) -> None:
        """Sets whether passes from now on average the ranks' gradients."""
        self._synchronised = on

    def pass_begins(self) -> None:
        """Notes whether the pass that begins is under no_sync."""
        self.unreduced = self.shared and not self._synchronised

    def reduce_gradients(self) -> None:
        """Makes gradients the ranks' mean, before a step. Collective."""

    def gather(self, value: Any) -> list[Any]:
        """See BoostedModel."""
        return [value] if self.ranks is None else self.ranks.all_gather_object(value)

    def gather_to_load(self, value: Any) -> list[Any]:
        """See BoostedModel."""
        return self.gather(value)

    def on_first(self, work: Callable[[], Result], shard_finder: ShardFinder) -> Result:
        """See BoostedModel; every rank has the whole model."""
        del shard_finder
        if self.ranks is None:
            return work()
        return self.ranks.on_first(work, serve=_nothing, end_service=_nothing)

    def report(self) -> TorchReport:
        """See BoostedModel."""
        optimizers = [one for ref in self._optimizers if (one := ref()) is not None]
        states = (
            entry for one in optimizers for state in one.state.values() for entry in state.values()
        )
        return TorchReport(
            trained_by=self.trained_by,
            parameter_bytes=bytes_here(self.params),
            gradient_bytes=bytes_here(param.grad for param in self.params),
            optimizer_bytes=bytes_here(states),
            steps=self.steps,
            skipped_steps=self.skipped_steps,
            step_skipped=self.step_skipped,
            gradient_norm=self.gradient_norm,
            rank=self.ranks.rank if self.ranks else 0,
            ranks=self.ranks.size if self.ranks else 1,
        )


def here(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's shard of a tensor."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def bytes_here(values: Iterable[Any]) -> int:
    """Returns the bytes that this rank has of the tensors among `values`."""
    return sum(here(one.detach()).nbytes for one in values if isinstance(one, torch.Tensor))


def _nothing() -> None:
    """Serves nothing: the other ranks have no shards that rank 0 lacks."""
