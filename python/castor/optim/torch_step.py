"""The optimizers' own steps on clipped gradients, for models that torch's own classes train."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from castor.config.settings import StepSettings
from castor.optim.nonfinite import nonfinite_error, warn_of_skip
from castor.runtime.boosted_model import BoostedStep
from castor.runtime.rules import params_of
from castor.runtime.shards import is_dtensor
from castor.runtime.torch_model import TorchModel, here

_steps: weakref.WeakKeyDictionary[Optimizer, TorchStep] = weakref.WeakKeyDictionary()

Hooked = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of step, the optimizer first."""


class TorchStep:
    """castor's part of the steps of one model's optimizers, through torch's step hooks.

    As with ModelStep, the first step after a pass checks and clips all gradients together.
    """

    loss_scale = 1.0

    def __init__(
        self,
        boosted: TorchModel,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        settings: StepSettings,
    ) -> None:
        """Hooks the steps of the optimizers.

        Args:
            boosted: Record of the boosted model.
            model: The model, for the parameters' names in checkpoints.
            optimizers: Optimizers over the model's parameters.
            settings: Norm to clip to, and reaction to gradients that are not finite.
        """
        self._boosted = boosted
        self.model = weakref.ref(model)
        self._max_norm, self._nonfinite = settings.max_norm, settings.nonfinite
        self._warned = False
        self._updates = True
        self._taken_by: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._known: dict[torch.Tensor, tuple[weakref.ref[torch.Tensor], int]] = {}
        """Gradients that were checked last, and their versions."""
        self._aside: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        """Gradients that are hidden from a skipped step."""
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._before)
            optimizer.register_step_post_hook(self._after)
            _steps[optimizer] = self

    def backward(self, loss: torch.Tensor) -> None:
        """See BoostedStep."""
        loss.backward()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Hooked:
        hooked = _with_closure_run(args, kwargs)
        self._put_back()
        if optimizer in self._taken_by or self._has_new_gradients():
            self._taken_by.clear()
            self._updates = self._check_and_clip()
        if not self._updates:
            params = params_of(optimizer)
            self._aside = [(param, param.grad) for param in params]
            for param in params:
                param.grad = None
        return hooked

    def _after(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._put_back()
        first = not self._taken_by
        self._taken_by.add(optimizer)
        if not first:
            return
        self._boosted.steps += 1
        self._boosted.step_skipped = not self._updates
        if not self._updates:
            self._boosted.skipped_steps += 1
            if not self._warned:
                self._warned = True
                warn_of_skip(self._first_nonfinite(), stacklevel=3)  # past step and its decorator

    def _has_new_gradients(self) -> bool:
        for param in self._boosted.params:
            if param.grad is not None:
                known = self._known.get(param)
                if known is None or known[0]() is not param.grad or known[1] != param.grad._version:
                    return True
        return not self._taken_by

    @torch.no_grad()
    def _check_and_clip(self) -> bool:
        """Checks and clips the gradients; returns whether the optimizers may update."""
        boosted = self._boosted
        boosted.reduce_gradients()
        boosted.gradient_norm = None
        updates = True
        if self._max_norm > 0 or self._nonfinite != "ignore":
            total = get_total_norm([p.grad for p in boosted.params if p.grad is not None])
            whole = total.full_tensor() if is_dtensor(total) else total
            norm = boosted.gradient_norm = whole.item()
            updates = math.isfinite(norm) or self._nonfinite == "ignore"
            if not updates and self._nonfinite == "raise":
                raise nonfinite_error(self._first_nonfinite(), norm)
            if updates and self._max_norm > 0:
                clip_grads_with_norm_(boosted.params, self._max_norm, total)
        self._known = {
            param: (weakref.ref(param.grad), param.grad._version)
            for param in boosted.params
            if param.grad is not None
        }
        return updates

    def _put_back(self) -> None:
        for param, grad in self._aside:
            param.grad = grad
        self._aside = []

    def _first_nonfinite(self) -> str:
        """Names the first non-finite gradient of this rank."""
        named = zip(self._boosted.names, self._boosted.params, strict=True)
        bad = (n for n, p in named if p.grad is not None and not here(p.grad).isfinite().all())
        return next(bad, "? (another rank has it)")


def torch_step_of(optimizer: Optimizer) -> TorchStep | None:
    """Returns the step of an optimizer that one of torch's own plugins boosted; else None."""
    return _steps.get(optimizer)


def step_of(optimizer: Optimizer) -> BoostedStep | None:
    """Returns the step of a boosted optimizer, of any plugin; None: it is not boosted."""
    driver: BoostedStep | None = getattr(optimizer, "_castor", None)
    return driver or torch_step_of(optimizer)


def _with_closure_run(args: Any, kwargs: Any) -> Hooked:
    """Runs the closure now, so that the step takes its gradients; returns the step's arguments."""
    optimizer, *positional = args
    named = dict(kwargs)
    closure: Callable[[], Any] | None = positional[0] if positional else named.get("closure")
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        loss = closure()
    named.pop("closure", None)
    return (optimizer, lambda: loss, *positional[1:]), named
