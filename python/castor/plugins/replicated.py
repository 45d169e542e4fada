"""torch's DistributedDataParallel around the forward of a model that stays the same object."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from castor.runtime.own_forward import OwnForward
from castor.runtime.rank_buffers import RankBuffers, names_of_own
from castor.runtime.rank_group import RankGroup
from castor.runtime.torch_model import TorchModel


class CastingForward(OwnForward):
    """A model's forward under autocast."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        """Wraps the forward that the model has now.

        Args:
            model: Model whose parameters are on the device that it computes on.
            dtype: Type of autocast; None: no autocast.
        """
        super().__init__(model)
        self._forward: Callable[..., Any] = model.forward
        self._dtype = dtype
        self._device_type = next(model.parameters()).device.type
        self.__signature__ = inspect.signature(model.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the wrapped forward returns."""
        with self._casting():
            return self._forward(*args, **kwargs)

    def _casting(self) -> AbstractContextManager[Any]:
        if self._dtype is None:
            return nullcontext()
        return torch.autocast(self._device_type, dtype=self._dtype)


class WrappedModule(nn.Module):
    """The module that DistributedDataParallel wraps: the model, with its original forward."""

    def __init__(self, model: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self._parameters = model._parameters
        self._buffers = model._buffers
        self._modules = model._modules
        self.forward = forward
        if own := names_of_own(model):
            self._ddp_params_and_buffers_to_ignore = own


class ReplicatedModel(TorchModel):
    """A model that every rank has in full; DistributedDataParallel reduces its gradients."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        ddp: DistributedDataParallel,
        *,
        ranks: RankGroup,
        trained_by: str,
    ) -> None:
        """See TorchModel; the model's forward has to keep `ddp` alive."""
        super().__init__(model, optimizers, ranks=ranks, trained_by=trained_by)
        self._ddp = weakref.ref(ddp)
        self._buffers = RankBuffers(model, ranks if ddp.broadcast_buffers else None)
        self._group = ddp.process_group
        self._peers = ranks

    def synchronise(self, on: bool) -> None:
        """See TorchModel."""
        super().synchronise(on)
        if (ddp := self._ddp()) is not None:
            ddp.require_backward_grad_sync = on

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Averages gradients that no_sync left unreduced, and shares written buffers. Collective.

        Buffers are shared here because the forwards that follow may be without gradients, and ranks
        do not wait for each other in those.
        """
        told = self._peers.all_gather_object((self.unreduced, self._buffers.written()))
        self._buffers.broadcast({number for _, written in told for number in written})
        if not any(unreduced for unreduced, _ in told):
            return
        self.unreduced = False
        present = [param.grad is not None for param in self.params]
        for param, anywhere in zip(
            self.params, zip(*self._peers.all_gather_object(present), strict=True), strict=True
        ):
            if any(anywhere):
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
                distributed.all_reduce(param.grad, group=self._group)
                param.grad /= self._peers.size


class ReplicatedForward(CastingForward):
    """The forward of a model that DistributedDataParallel wraps.

    Without gradients it is the model's own forward: ranks may evaluate different batches, or one
    rank alone may evaluate.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype | None,
        boosted: ReplicatedModel,
        ddp: DistributedDataParallel,
    ) -> None:
        """See CastingForward."""
        super().__init__(model, dtype)
        self._ddp = ddp
        self._boosted = boosted

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the wrapped forward returns."""
        with self._casting():
            if not torch.is_grad_enabled():
                return self._forward(*args, **kwargs)
            self._boosted.pass_begins()  # DistributedDataParallel reads the state of no_sync here
            return self._ddp(*args, **kwargs)
