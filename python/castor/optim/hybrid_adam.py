"""Fused Adam and AdamW on the CPU, for ordinary parameters and for boosted models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from castor import _C
from castor.errors import UsageError
from castor.optim.state_formats import (
    ROUNDING_FORMATS,
    STATE_FORMATS,
    from_portable,
    new_state,
    to_portable,
)
from castor.runtime.rules import ADAM

_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class HybridAdam(Optimizer):
    """Adam (Kingma & Ba 2015) or AdamW (Loshchilov & Hutter 2019) in C++ on all CPU cores.

    Alone, it updates dense CPU parameters in place. float32 parameters are updated directly,
    bfloat16 and float16 parameters through an exact float32 master in the state ("master"). Given
    to booster.boost, it updates the model's chunks. The result does not depend on thread count or
    instruction set.

    optim_state_format is the format of the state of bfloat16 parameters (docs/design/0012):

    - "fp32": master and moments, 12 bytes a parameter.
    - "split": the master's low half beside the parameter, 10 bytes; the same weights bit for bit.
    - "split_bf16": bfloat16 moments, 6 bytes.
    - "split_int8": 8-bit moments in blocks, 4 bytes.

    Parameters of other types take "fp32" only. state_dict() has float32 moments and masters in
    every format, as torch.optim.AdamW has them, and load_state_dict() takes any of them.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate.
        bias_correction: Only True is supported.
        betas: Decay of the first and second moment.
        eps: Term added to the denominator.
        weight_decay: Decay coefficient.
        adamw_mode: True decays the weights (AdamW), False adds the decay to the gradient (Adam).
        optim_state_format: "fp32", "split", "split_bf16" or "split_int8". Default: "fp32"; when
            boosted, the choice of GeminiPlugin.
        seed: Seed of the stochastic rounding in "split_bf16" and "split_int8", from 0 to
            ``2**64 - 1``. The same seed gives the same bits. Default: 0; when boosted,
            GeminiPlugin's seed.
        nvme_offload_fraction: Share of the state that goes to NVMe when the optimizer is boosted,
            in [0, 1]; needs nvme_offload_dir. Without boost HybridAdam refuses to step with a
            fraction above 0.
        nvme_offload_dir: Directory on the NVMe device.

    Raises:
        ValueError: A hyper-parameter is out of range.
        NotImplementedError: An argument asks for something this version lacks.
    """

    keeps_masters = True
    """Whether the state of a 16-bit parameter has its float32 master; for checkpoints."""

    def __init__(
        self,
        params: ParamsT,
        *,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adamw_mode: bool = True,
        optim_state_format: str | None = None,
        seed: int | None = None,
        nvme_offload_fraction: float = 0.0,
        nvme_offload_dir: str | None = None,
    ) -> None:
        if not bias_correction:
            raise NotImplementedError("HybridAdam: bias_correction=False is not supported")
        if not 0.0 <= nvme_offload_fraction <= 1.0:
            raise ValueError(
                f"HybridAdam: nvme_offload_fraction is {nvme_offload_fraction}; it must lie in "
                "[0, 1]"
            )
        if (nvme_offload_fraction > 0.0) != (nvme_offload_dir is not None):
            raise ValueError(
                "HybridAdam: nvme_offload_fraction and nvme_offload_dir belong together: give a "
                "fraction above 0 and a directory, or neither"
            )
        if optim_state_format is not None and optim_state_format not in STATE_FORMATS:
            raise ValueError(
                f"HybridAdam: optim_state_format is {optim_state_format!r}; it must be one of "
                f"{', '.join(STATE_FORMATS)}"
            )
        if seed is not None and not 0 <= seed < 2**64:
            raise ValueError(f"HybridAdam: seed is {seed}; it must lie in [0, 2**64)")
        self.optim_state_format = optim_state_format or "fp32"
        self.seed = seed or 0
        self.requested_state: tuple[str | None, int | None] = (optim_state_format, seed)
        """Format and seed as they were given, for booster.boost."""
        self.requested_nvme = (nvme_offload_fraction, nvme_offload_dir)
        """nvme_offload_fraction and nvme_offload_dir as they were given, for booster.boost."""
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": adamw_mode,
        }
        ADAM.checked([defaults])
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates every parameter that has a gradient.

        Args:
            closure: Function that re-evaluates the model and returns the loss.

        Returns:
            The result of the closure.

        Raises:
            TypeError: A parameter is not float32, bfloat16 or float16, is not on the CPU, or has a
                sparse gradient.
            ValueError: optim_state_format is not "fp32", and a parameter is float16 or none is
                bfloat16. Or an option of a group is out of range. Nothing was changed.
            UsageError: nvme_offload_fraction was given, and the optimizer is not boosted.
        """
        if self.requested_nvme[1] is not None:
            raise UsageError(
                "HybridAdam(nvme_offload_dir=...) keeps the states of a boosted model on NVMe: "
                "call booster.boost(model, optimizer) before the first step, or leave it out"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        entries = []
        stream = 0
        for group, options in zip(self.param_groups, ADAM.checked(self.param_groups), strict=True):
            for param in group["params"]:
                if param.grad is not None:
                    entries.append(self._entry(param, stream) | options)
                stream += 1
        _C.adam_update(entries)
        for entry in entries:  # after the update: a step that raises has changed nothing
            self.state[entry["param"]]["step"] += 1
        return loss

    def _entry(self, param: torch.Tensor, stream: int) -> dict[str, Any]:
        if param.dtype not in _TYPES or param.device.type != "cpu" or param.grad is None:
            raise TypeError(
                f"HybridAdam updates float32, bfloat16 and float16 CPU parameters; this one is "
                f"{param.dtype} on {param.device}. For other devices, hand the optimizer to "
                "booster.boost"
            )
        if param.grad.is_sparse:
            raise TypeError("HybridAdam does not take sparse gradients; use sparse=False")
        state_format = self.format_of(param)
        split = state_format != "fp32"
        unsplit = self.optim_state_format != "fp32" and not split and not self._has_bfloat16()
        if unsplit or (split and param.dtype != torch.bfloat16):
            raise ValueError(
                f"HybridAdam: optim_state_format={self.optim_state_format!r} splits the float32 "
                f"master of bfloat16 parameters; parameter {stream}, of shape "
                f"{tuple(param.shape)}, is {param.dtype}: use optim_state_format='fp32' for it, in "
                "an optimizer of its own if need be"
            )
        state = self.state[param]
        if "step" not in state:
            state["step"] = torch.tensor(0.0)
        if split:
            if "remainder" not in state:
                state.update(new_state(param, state_format))
        else:
            # Any may be missing after a checkpoint of a parameter that had no gradient yet.
            if param.dtype != torch.float32 and "master" not in state:
                state["master"] = param.detach().float()
                _C.round_to_param(param, state["master"])
            for key in ("exp_avg", "exp_avg_sq"):
                if key not in state:
                    state[key] = _C.zero_state_like(param, torch.float32)
        grad = param.grad
        if grad.stride() != param.stride():
            grad = torch.empty_like(param).copy_(grad)
        return {
            "param": param,
            "grad": grad,
            "master": None if split else state.get("master", param),
            "remainder": state.get("remainder"),
            "exp_avg": state["exp_avg"],
            "exp_avg_sq": state["exp_avg_sq"],
            "scales": state.get("scales"),
            "step": int(state["step"]) + 1,
            "format": state_format,
            "seed": self.seed,
            "stream": stream,
        }

    def format_of(self, param: torch.Tensor) -> str:
        """Returns the state format of a parameter; float32 has no master to split."""
        return "fp32" if param.dtype == torch.float32 else self.optim_state_format

    def _has_bfloat16(self) -> bool:
        groups = self.param_groups
        return any(param.dtype == torch.bfloat16 for group in groups for param in group["params"])

    @property
    def rounding_seed(self) -> int | None:
        """Seed of the stochastic rounding, which is saved and loaded; None: nothing is rounded."""
        return self.seed if self.optim_state_format in ROUNDING_FORMATS else None

    @rounding_seed.setter
    def rounding_seed(self, seed: int) -> None:
        self.seed = seed

    def portable_state(self, param: torch.Tensor) -> dict[str, Any]:
        """Returns the state of one parameter as state_dict() has it, for checkpoints."""
        state = self.state.get(param, {})
        return state if self.format_of(param) == "fp32" else to_portable(param, state)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state in the layout of torch.optim.AdamW, with float32 moments.

        16-bit parameters also have "master", their float32 weights. In the split formats the
        masters and moments are copies, made here. "scales" let split_int8 resume bit for bit. In
        formats that round moments there is a "rounding_seed" beside "state".
        """
        packed: dict[str, Any] = super().state_dict()
        if self.rounding_seed is not None:
            packed["rounding_seed"] = self.rounding_seed
        if self.optim_state_format != "fp32":
            params = [param for group in self.param_groups for param in group["params"]]
            packed["state"] = {
                i: to_portable(params[i], state) if isinstance(i, int) else state
                for i, state in packed["state"].items()
            }
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state of torch.optim.Adam, AdamW or of HybridAdam in any format.

        float32 entries stay float32 whatever the parameter's type. Moments are rounded to nearest
        if the format is narrower. A state of the same format resumes bit for bit, with its seed.
        """
        super().load_state_dict(state_dict)
        if self.rounding_seed is not None and "rounding_seed" in state_dict:
            self.rounding_seed = state_dict["rounding_seed"]
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        mine = [param for group in self.param_groups for param in group["params"]]
        for i, param in zip(saved, mine, strict=True):
            if i in state_dict["state"]:
                entries = state_dict["state"][i]
                portable = to_portable(param, entries)
                state = from_portable(param, portable, self.format_of(param))
                if "remainder" in state and "remainder" in entries:
                    state["remainder"].copy_(entries["remainder"])  # whatever the weights are now
                self.state[param] = state

    def __getstate__(self) -> dict[str, Any]:
        """Returns the attributes for copy.deepcopy and pickle."""
        own = {
            "optim_state_format": self.optim_state_format,
            "seed": self.seed,
            "requested_state": self.requested_state,
            "requested_nvme": self.requested_nvme,
        }
        return super().__getstate__() | own
