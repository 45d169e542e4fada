"""torch's DistributedDataParallel under castor's loop (Colossal-AI's TorchDDPPlugin)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from castor.optim.optimizer_params import optimizer_params
from castor.optim.torch_step import TorchStep
from castor.plugins.replicated import (
    CastingForward,
    ReplicatedForward,
    ReplicatedModel,
    WrappedModule,
)
from castor.plugins.torch_settings import TorchPlugin
from castor.runtime.process_groups import own_group
from castor.runtime.ranks import Peers
from castor.runtime.torch_model import TorchModel

_NEUTRAL: dict[str, tuple[object, str]] = {
    "check_reduction": (False, "torch has deprecated it"),
    "fp8_communication": (False, "gradients are sent in float32"),
}
"""Arguments of Colossal-AI's plugin that do nothing here."""


class TorchDDPPlugin(TorchPlugin):
    """Data-parallel replicas by DistributedDataParallel (Li et al. 2020, section 3).

    Every rank keeps and updates the full model. torch.nn.parallel.DistributedDataParallel reduces
    gradients beside backward; castor adds clipping, skipped steps, checkpoints and data loaders. In
    one process the plugin trains as plain PyTorch does. The model, its gradients and its optimizer
    states have to fit in the device's memory: castor moves them there at boost, and nothing later.

    Names of arguments are Colossal-AI's, or GeminiPlugin's; all are keyword-only.

    Args:
        broadcast_buffers: Whether rank 0's buffers become every rank's: before each forward with
            gradients, after each step, and with the parameters at boost.
        bucket_cap_mb: Size of the buckets in which gradients are sent, in MiB.
        find_unused_parameters: Whether a pass may leave parameters out. False: torch raises at the
            next forward where one does.
        gradient_as_bucket_view: Whether gradients lie in the buckets.
        static_graph: Whether all passes use the same parameters.
        device: Device that the model computes on: "cpu", "cuda" or "cuda:1". None: "cuda" if torch
            has a GPU, else "cpu". With several ranks on a machine "cuda" is the GPU that LOCAL_RANK
            numbers. Every rank needs a GPU of its own, torch's current device from boost on.
            Forwards move their inputs there.
        precision: "fp32", or "bf16": forwards run under torch.autocast. Parameters, gradients and
            states are float32.
        max_norm: L2 norm to which step clips gradients; 0: no clipping.
        norm_type: Only 2.0.
        nonfinite: Reaction of step to NaN and infinite gradients: "skip", "raise" or "ignore", as
            in GeminiPlugin. "ignore" with max_norm=0 is torch's own step and nothing else.
        **neutral: Arguments of Colossal-AI's plugin, accepted at the value that asks for nothing.

    Raises:
        ValueError: A value is out of range.
        TypeError: A value has the wrong type, or an argument does not exist or is for castor's
            chunks.
        NotImplementedError: An argument asks for something this version lacks; the message names
            it.
        UsageError: There is no such GPU, or none for this rank, or this torch has no CUDA.
    """

    def __init__(
        self,
        *,
        broadcast_buffers: bool = True,
        bucket_cap_mb: float = 25,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        device: str | torch.device | None = None,
        precision: str = "fp32",
        max_norm: float = 0.0,
        norm_type: float = 2.0,
        nonfinite: str = "skip",
        **neutral: Any,
    ) -> None:
        super().__init__(
            device=device,
            precision=precision,
            max_norm=max_norm,
            norm_type=norm_type,
            nonfinite=nonfinite,
            neutral=_NEUTRAL,
            others=neutral,
        )
        flags = {
            "broadcast_buffers": broadcast_buffers,
            "find_unused_parameters": find_unused_parameters,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "static_graph": static_graph,
        }
        for name, value in flags.items():
            if not isinstance(value, bool):
                raise TypeError(f"{name} is {value!r}; give True or False")
        if isinstance(bucket_cap_mb, bool) or not isinstance(bucket_cap_mb, int | float):
            raise TypeError(f"bucket_cap_mb is {bucket_cap_mb!r}; give a number of MiB")
        if not bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb is {bucket_cap_mb}; it must be above 0")
        if broadcast_buffers:  # torch's default, and deprecated as an argument from 2.13 on
            del flags["broadcast_buffers"]
        self._options: dict[str, Any] = {"bucket_cap_mb": bucket_cap_mb, **flags}

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
                ranks.share_all(model)
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

    def _group(self, ranks: Peers) -> distributed.ProcessGroup:
        """Makes the process group that gradients are reduced over. Collective."""
        everyone = [range(ranks.size)]
        if self.device.type == "cpu":
            return own_group(everyone)
        return self._device_backend(ranks).group(everyone)
