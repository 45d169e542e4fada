"""Adam and AdamW on the CPU, fused, for ordinary parameters and for boosted models alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from castor import _C

_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class HybridAdam(Optimizer):
    """Adam (Kingma & Ba 2015) or AdamW (Loshchilov & Hutter 2019) in C++ on all CPU cores.

    Alone, it updates dense CPU parameters in place: float32 ones directly, bfloat16 and float16
    ones through an exact float32 master that it keeps in its state ("master"). Handed to
    booster.boost, it updates the model's chunks. The result does not depend on thread count or
    instruction set.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate.
        bias_correction: Only True is supported.
        betas: Decay of the first and second moment.
        eps: Added to the denominator.
        weight_decay: Decay coefficient.
        adamw_mode: True decays the weights (AdamW), False adds the decay to the gradient (Adam).
        nvme_offload_fraction: Only 0 is supported.
        nvme_offload_dir: Only None is supported.

    Raises:
        ValueError: A hyper-parameter is out of range.
        NotImplementedError: An argument asks for what this version lacks.
    """

    keeps_masters = True
    """The state of a 16-bit parameter holds its float32 master; checkpoints look at this."""

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
        nvme_offload_fraction: float = 0.0,
        nvme_offload_dir: str | None = None,
    ) -> None:
        if not bias_correction:
            raise NotImplementedError("HybridAdam: bias_correction=False is not supported")
        if nvme_offload_fraction != 0.0:
            raise NotImplementedError("HybridAdam: nvme_offload_fraction is not supported yet")
        if nvme_offload_dir is not None:
            raise NotImplementedError("HybridAdam: nvme_offload_dir is not supported yet")
        if not lr >= 0.0:
            raise ValueError(f"HybridAdam: lr is {lr}; it must be at least 0")
        if not eps >= 0.0:
            raise ValueError(f"HybridAdam: eps is {eps}; it must be at least 0")
        if not weight_decay >= 0.0:
            raise ValueError(f"HybridAdam: weight_decay is {weight_decay}; it must be at least 0")
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"HybridAdam: betas are {betas}; each must lie in [0, 1)")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": adamw_mode,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates every parameter that has a gradient.

        Args:
            closure: Re-evaluates the model and returns the loss.

        Returns:
            What the closure returned.

        Raises:
            TypeError: A parameter is not float32, bfloat16 or float16, not on the CPU, or its
                gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        entries = []
        for group in self.param_groups:
            options = adam_options(group)
            for param in group["params"]:
                if param.grad is not None:
                    entries.append(self._entry(param) | options)
        _C.adam_update(entries)
        return loss

    def _entry(self, param: torch.Tensor) -> dict[str, Any]:
        if param.dtype not in _TYPES or param.device.type != "cpu" or param.grad is None:
            raise TypeError(
                f"HybridAdam updates float32, bfloat16 and float16 CPU parameters; this one is "
                f"{param.dtype} on {param.device}. For other devices, hand the optimizer to "
                "booster.boost"
            )
        if param.grad.is_sparse:
            raise TypeError("HybridAdam does not take sparse gradients; use sparse=False")
        state = self.state[param]
        if "step" not in state:
            state["step"] = torch.tensor(0.0)
            if param.dtype == torch.float32:
                master = param
            elif "master" in state:  # from a checkpoint, of a parameter that had no gradient yet
                master = state["master"]
            else:
                master = state["master"] = param.detach().float()
                _C.round_to_param(param, master)
            state["exp_avg"] = _C.zero_state_like(master)
            state["exp_avg_sq"] = _C.zero_state_like(master)
        state["step"] += 1
        grad = param.grad
        if grad.stride() != param.stride():
            grad = torch.empty_like(param).copy_(grad)
        return {
            "param": param,
            "grad": grad,
            "master": state.get("master", param),
            "exp_avg": state["exp_avg"],
            "exp_avg_sq": state["exp_avg_sq"],
            "step": int(state["step"]),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state; float32 entries stay float32 whatever the parameter's type."""
        super().load_state_dict(state_dict)
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        mine = [param for group in self.param_groups for param in group["params"]]
        for i, param in zip(saved, mine, strict=True):
            for key, value in state_dict["state"].get(i, {}).items():
                self.state[param][key] = value.detach().clone()


def adam_options(group: dict[str, Any]) -> dict[str, float | bool]:
    """The hyper-parameters of a torch Adam, AdamW or HybridAdam group, as the core takes them."""
    return {
        "lr": float(group["lr"]),
        "beta1": float(group["betas"][0]),
        "beta2": float(group["betas"][1]),
        "eps": float(group["eps"]),
        "weight_decay": float(group["weight_decay"]),
        "decoupled": bool(group["decoupled_weight_decay"]),
    }
