"""torch's DistributedDataParallel under castor's loop (Colossal-AI's TorchDDPPlugin)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from castor.config.declared import Declared, documented, values_of
from castor.config.settings import StepSettings
from castor.optim.optimizer_params import optimizer_params
from castor.optim.torch_step import TorchStep
from castor.plugins.arguments import takes
from castor.plugins.replicated import (
    CastingForward,
    ReplicatedForward,
    ReplicatedModel,
    WrappedModule,
)
from castor.plugins.torch_settings import TorchPlugin, check_precision, only_neutral
from castor.runtime.process_groups import own_group
from castor.runtime.rank_group import RankGroup
from castor.runtime.torch_model import TorchModel

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
            ddp = DistributedDataParallel(
                WrappedModule(model, model.forward),
                process_group=self._group(ranks),
                **self._options,
            )
            boosted = ReplicatedModel(
                model, optimizers, ddp, ranks=ranks, trained_by="DistributedDataParallel"
            )
            model.forward = ReplicatedForward(model, dtype, boosted, ddp)
        TorchStep(
            boosted,
            model,
            optimizers,
            max_norm=self.settings.max_norm,
            nonfinite=self.settings.nonfinite,
        )
        return boosted

    def _group(self, ranks: RankGroup) -> distributed.ProcessGroup:
        """Makes the process group that gradients are reduced over. Collective."""
        everyone = [range(ranks.size)]
        if self.device.type == "cpu":
            return own_group(everyone)
        return self._device_backend(ranks).group(everyone)
