"""The Lion optimizer, which torch does not have."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from castor.runtime.rules import LION


class Lion(Optimizer):
    """Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2).

    A step moves each weight by `lr`, with the sign of an average of the gradient and its moving
    average. The state is one tensor a parameter, "exp_avg". Weight decay is decoupled. Against
    AdamW the authors take an `lr` 3 to 10 times smaller, and a `weight_decay` as many times larger.

    Alone it runs torch's operators, on any device and in the parameters' own type. Given to
    booster.boost it runs fused on the model's chunks. In fp32 the bits are the same; 16-bit
    parameters have float32 masters there.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate, by which a step moves each weight.
        betas: Share of the moving average in the step, and the decay of that average.
        weight_decay: Decay coefficient; the weights lose lr * weight_decay of themselves.

    Raises:
        ValueError: A hyper-parameter is out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        *,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        LION.checked([defaults])
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates every parameter that has a gradient.

        Args:
            closure: Function that re-evaluates the model and returns the loss.

        Returns:
            What the closure returned.

        Raises:
            TypeError: A gradient is sparse.
            ValueError: An option of a group is out of range; nothing was changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        LION.checked(self.param_groups)
        held = [(param, group) for group in self.param_groups for param in group["params"]]
        if any(param.grad is not None and param.grad.is_sparse for param, _ in held):
            raise TypeError("Lion does not take sparse gradients; use sparse=False")
        for param, group in held:
            if param.grad is None:
                continue
            state = self.state[param]
            if "exp_avg" not in state:
                state["exp_avg"] = torch.zeros_like(param)
            exp_avg, lr, (beta1, beta2) = state["exp_avg"], group["lr"], group["betas"]
            update = exp_avg.mul(beta1).add_(param.grad, alpha=1 - beta1).sign_()
            param.mul_(1 - lr * group["weight_decay"]).add_(update, alpha=-lr)
            exp_avg.mul_(beta2).add_(param.grad, alpha=1 - beta2)
        return loss
