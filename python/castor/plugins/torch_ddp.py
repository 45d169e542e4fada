"""torch's DistributedDataParallel under castor's loop (Colossal-AI's TorchDDPPlugin)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from castor.optim.held_params import held_params
from castor.optim.torch_step import TorchStep
from castor.plugins.replicated import CastingForward, ReplicatedForward, ReplicatedModel, Whole
from castor.plugins.torch_settings import TorchPlugin
from castor.runtime.process_groups import own_group
from castor.runtime.torch_model import TorchModel

_NEUTRAL: dict[str, tuple[object, str]] = {
    "check_reduction": (False, "torch has deprecated it"),
    "fp8_communication": (False, "gradients are sent in float32"),
}
"""Arguments of Colossal-AI's plugin that do nothing here."""


class TorchDDPPlugin(TorchPlugin):
    """Every rank keeps and updates the whole model (Li et al. 2020, section 3).

    torch.nn.parallel.DistributedDataParallel brings gradients together beside backward; castor adds
    clipping, skipped steps, files and data. In one process it trains as plain PyTorch does. Nothing
    is moved: the model, its gradients and its optimizer states have to fit.

    Names of arguments are Colossal-AI's, or GeminiPlugin's; all are keyword-only.

    Args:
        broadcast_buffers: Whether rank 0's buffers become every rank's before each forward that
            may have a backward, after each step, and with the parameters at boost.
        bucket_cap_mb: Gradients are sent in buckets of this many MiB.
        find_unused_parameters: Whether each pass may leave parameters out; without, torch raises at
            the next forward.
        gradient_as_bucket_view: Whether gradients lie in the buckets.
        static_graph: Whether all passes use the same parameters.
        device: Where the model computes; only "cpu".
        precision: "fp32", or "bf16": forwards run under torch.autocast. Parameters, gradients and
            states are float32.
        max_norm: Gradients are clipped to this L2 norm inside step; 0: not at all.
        norm_type: Only 2.0.
        nonfinite: What step does about NaN and infinite gradients: "skip", "raise" or "ignore", as
            in GeminiPlugin. "ignore" with max_norm=0 is torch's step without another line.
        **neutral: Arguments of Colossal-AI's plugin at the value that asks for nothing.

    Raises:
        ValueError: A value is out of range.
        TypeError: A value has the wrong type, or an argument does not exist or is of castor's
            chunks.
        NotImplementedError: An argument asks for what this version lacks; the message names it.
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
        """Takes model and optimizers over, in place. Called by Booster.boost.

        Raises:
            UsageError: The model or an optimizer cannot be boosted, or the ranks were given
                different ones; neither is changed.
            NotImplementedError: An optimizer is not supported.
        """
        self._check(model, optimizers)
        if optimizers:
            held_params(model, optimizers, [None] * len(optimizers))
        ranks = self._join(model, optimizers)
        self._give_values(model)
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
                Whole(model, model.forward),
                process_group=own_group([range(ranks.size)]),
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
