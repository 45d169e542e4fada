"""torch's DistributedDataParallel under castor's loop (Colossal-AI's TorchDDPPlugin)."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from castor import _C
from castor.config.declared import Declared, documented, values_of
from castor.config.settings import StepSettings
from castor.optim.rules import optimizer_params
from castor.optim.torch_step import TorchStep
from castor.plugins.arguments import takes
from castor.plugins.torch_settings import TorchPlugin, check_precision, only_neutral
from castor.runtime.hooks import OwnForward
from castor.runtime.process_groups import own_group
from castor.runtime.rank_buffers import RankBuffers, names_of_own
from castor.runtime.rank_group import RankGroup
from castor.runtime.torch_model import TorchModel

# --- torch's DistributedDataParallel around the forward of a model that stays the same object -----


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
        connection: _C.DeviceConnection | None,
        trained_by: str,
    ) -> None:
        """See TorchModel; the model's forward has to keep `ddp` alive.

        Args:
            model: The model.
            optimizers: Its optimizers.
            ddp: torch's module around it.
            ranks: The ranks that train it.
            connection: Connection between the ranks' GPUs that `ddp` uses; None: on the CPU.
            trained_by: Name of what trains, for reports.
        """
        super().__init__(model, optimizers, ranks=ranks, trained_by=trained_by)
        self._ddp = weakref.ref(ddp)
        self._buffers = RankBuffers(model, ranks if ddp.broadcast_buffers else None)
        self._group = ddp.process_group
        self._connection = connection
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


# --- torch's DistributedDataParallel under castor's loop (Colossal-AI's TorchDDPPlugin) -----------

_NEUTRAL: dict[str, tuple[object, str]] = {
    "check_reduction": (False, "torch has deprecated it"),
    "fp8_communication": (False, "gradients are sent in float32"),
}
"""Arguments of Colossal-AI's plugin that do nothing here."""


def _check_bucket(value: float, name: str) -> None:
    if not value > 0:
        raise ValueError(f"{name} is {value}; it must be above 0")


@dataclass(frozen=True, kw_only=True)
class DDPOptions(Declared):
    """Options of DistributedDataParallel."""

    broadcast_buffers: bool = True
    """Whether rank 0's buffers become every rank's: before each forward with gradients, after each
    step, and with the parameters at boost."""
    bucket_cap_mb: Annotated[float, _check_bucket] = 25
    """Size of the buckets in which gradients are sent, in MiB."""
    find_unused_parameters: bool = False
    """Whether a pass may leave parameters out. False: torch raises at the next forward where one
    does."""
    gradient_as_bucket_view: bool = False
    """Whether gradients lie in the buckets."""
    static_graph: bool = False
    """Whether all passes use the same parameters."""


@dataclass(frozen=True, kw_only=True)
class DDPArguments(DDPOptions, StepSettings):
    """Arguments of TorchDDPPlugin, as a user gives them."""

    device: str | torch.device | None = None
    """Device that the model computes on: "cpu", "cuda" or "cuda:1". None: "cuda" if torch has a
    GPU, else "cpu". With several ranks on a machine "cuda" is the GPU that LOCAL_RANK numbers.
    Every rank needs a GPU of its own, torch's current device from boost on. Forwards move their
    inputs there."""
    precision: Annotated[str, check_precision] = "fp32"
    """"fp32", or "bf16": forwards run under torch.autocast. Parameters, gradients and states are
    float32."""


@documented(DDPArguments)
class TorchDDPPlugin(TorchPlugin):
    """Data-parallel replicas by DistributedDataParallel (Li et al. 2020, section 3).

    Every rank keeps and updates the full model. torch.nn.parallel.DistributedDataParallel reduces
    gradients beside backward; castor adds clipping, skipped steps, checkpoints and data loaders. In
    one process the plugin trains as plain PyTorch does. The model, its gradients and its optimizer
    states have to fit in the device's memory: castor moves them there at boost, and nothing later.
    With nonfinite="ignore" and max_norm=0 a step is torch's own and nothing else.

    Names of arguments are Colossal-AI's, or GeminiPlugin's; all are keyword-only.

    Args:
        **arguments: The fields of DDPArguments, by name.
        **not_yet: Arguments of Colossal-AI's plugin, accepted at the value that asks for nothing.

    Raises:
        ValueError: A value is out of range.
        TypeError: A value has the wrong type, or an argument does not exist or is for castor's
            chunks.
        NotImplementedError: An argument asks for something this version lacks; the message names
            it.
        UsageError: There is no such GPU, or none for this rank, or this torch has no CUDA.
    """

    @takes(DDPArguments, others=only_neutral(_NEUTRAL))
    def __init__(self, arguments: DDPArguments) -> None:
        self._resolve(arguments, arguments.device, arguments.precision)
        self._options = values_of(arguments, DDPOptions)
        if arguments.broadcast_buffers:  # torch's default, and deprecated as an argument from 2.13
            del self._options["broadcast_buffers"]

    def configure(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> TorchModel:
        """Takes model and optimizers over, in place. Booster.boost calls it.

        Raises:
            UsageError: The model or an optimizer cannot be boosted, or the ranks were given
                different ones, or share a GPU; model and optimizers are unchanged.
            NotImplementedError: An optimizer is not supported.
        """
        self._check(model, optimizers)
        if optimizers:
            optimizer_params(model, optimizers, [None] * len(optimizers))
        ranks = self._join(model, optimizers)
        self._take_device()
        self._give_values(model)
        self._move(model, optimizers)
        dtype = self.settings.compute_dtype
        boosted: TorchModel
        if ranks is None or not any(param.requires_grad for param in model.parameters()):
            if ranks is not None:  # else DistributedDataParallel does it
                ranks.broadcast_all((*model.parameters(), *model.buffers()))
            boosted = TorchModel(model, optimizers, ranks=ranks, trained_by="plain PyTorch")
            if dtype is not None:
                model.forward = CastingForward(model, dtype)
        else:
            group, connection = self._group(ranks)
            ddp = DistributedDataParallel(
                WrappedModule(model, model.forward),
                process_group=group,
                **self._options,
            )
            boosted = ReplicatedModel(
                *(model, optimizers, ddp),
                ranks=ranks,
                connection=connection,
                trained_by="DistributedDataParallel",
            )
            model.forward = ReplicatedForward(model, dtype, boosted, ddp)
        TorchStep(boosted, model, optimizers, self.settings)
        return boosted

    def _group(
        self, ranks: RankGroup
    ) -> tuple[distributed.ProcessGroup, _C.DeviceConnection | None]:
        """Makes the process group that gradients are reduced over. Collective.

        Returns:
            The group, and on GPUs its connection, to be held as long as the group is used.
        """
        everyone = [range(ranks.size)]
        if self.device.type == "cpu":
            return own_group(everyone), None
        made = self._device_backend(ranks).group(everyone)
        return made.group, made.handle.connection()
