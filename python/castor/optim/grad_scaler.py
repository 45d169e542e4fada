"""Loss scales: torch.amp.GradScaler over boosted optimizers, and the dynamic scale of fp16."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from castor.config import LossScalerConfig
from castor.errors import UsageError

if TYPE_CHECKING:
    from castor.optim.step_driver import StepDriver


# --- Dynamic loss scaling for fp16 ----------------------------------------------------------------


class LossScaler:
    """A loss scale that keeps small fp16 gradients nonzero (Micikevicius et al. 2018, section 3.2).

    The scale falls after `hysteresis` overflows and grows after `growth_interval` good steps in a
    row.
    """

    def __init__(self, config: LossScalerConfig) -> None:
        self.scale = config.initial_scale
        self._config = config
        self._good_steps = 0
        self._overflows_left = config.hysteresis

    def update(self, *, overflow: bool) -> None:
        """Adapts the scale after a step."""
        config = self._config
        if overflow:
            self._good_steps = 0
            self._overflows_left -= 1
            if self._overflows_left <= 0:
                self.scale = max(config.min_scale, self.scale * config.backoff_factor)
            return
        self._good_steps += 1
        if self._good_steps == config.growth_interval:
            self._good_steps = 0
            self._overflows_left = config.hysteresis
            self.scale = min(config.max_scale, self.scale * config.growth_factor)

    def state_dict(self) -> dict[str, float | int]:
        """Returns the scale, and the counts that its next change depends on."""
        return {
            "scale": self.scale,
            "good_steps": self._good_steps,
            "overflows_left": self._overflows_left,
        }

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        """Restores the scale and counts of `state_dict`."""
        self.scale = float(state["scale"])
        self._good_steps = int(state["good_steps"])
        self._overflows_left = int(state["overflows_left"])


# --- torch.amp.GradScaler over boosted optimizers: gradients carry its scale until the update -----

# torch's GradScaler divides float32 gradients in place, and refuses float16 ones, because a
# gradient that is divided in 16 bits loses what the scale was for. The gradients of a boosted model
# lie in chunks in the model's precision. So `unscale_` leaves them as they are, shows each as a
# float32 tensor that is unscaled as it is read, and the update divides in float32.


class UnscaledGradient(torch.Tensor):
    """A float32 tensor whose elements are those of a scaled gradient, divided by the scale.

    It has no memory of its own: an operator gets the unscaled values, and what it writes is scaled
    and rounded back into the gradient. Views of it are tensors of the same kind.
    """

    scaled: torch.Tensor
    scale: float

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, scaled: torch.Tensor, scale: float) -> UnscaledGradient:
        """Makes the unscaled tensor of `scaled`, the gradient of a loss times `scale`."""
        made: UnscaledGradient = torch.Tensor._make_wrapper_subclass(
            cls, scaled.shape, strides=scaled.stride(), dtype=torch.float32, device=scaled.device
        )
        made.scaled, made.scale = scaled, scale
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self.unscaled())

    def unscaled(self) -> torch.Tensor:
        """Returns a copy of the unscaled values, in float32."""
        return self.scaled.detach().to(torch.float32, copy=True).mul_(1.0 / self.scale)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, _: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls an operator with the unscaled values, and scales back values that it writes."""
        given = (args, kwargs or {})
        if func.namespace != "aten":
            raise UsageError(
                f"{func} was called with a gradient between scaler.unscale_ and scaler.step, which "
                "castor shows unscaled and holds scaled: give it a copy (param.grad.clone()), and "
                "assign the result to param.grad"
            )
        if _is_view(func):
            one = next(value for value in args if isinstance(value, cls))
            positional, named = tree_map_only(cls, lambda shown: shown.scaled, given)
            result = func(*positional, **named)
            return tree_map_only(torch.Tensor, lambda view: cls(view, one.scale), result)
        opened: dict[int, tuple[UnscaledGradient, torch.Tensor]] = {}

        def open_one(shown: UnscaledGradient) -> torch.Tensor:
            return opened.setdefault(id(shown), (shown, shown.unscaled()))[1]

        positional, named = tree_map_only(cls, open_one, given)
        result = func(*positional, **named)
        shown_as = {id(values): shown for shown, values in opened.values()}
        written = [
            argument
            for place, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
            for argument in [args[place] if place < len(args) else given[1].get(argument.name)]
        ]
        tree_map_only(cls, lambda shown: shown._write(opened[id(shown)][1]), written)
        return tree_map_only(torch.Tensor, lambda one: shown_as.get(id(one), one), result)

    def _write(self, values: torch.Tensor) -> None:
        self.scaled.copy_(values * self.scale)


@cache
def _is_view(func: Any) -> bool:
    """Whether an operator returns other tensors over the memory of its argument."""
    infos = [one.alias_info for one in func._schema.returns]
    return any(info is not None and not info.is_write for info in infos)


class ScaledGradients:
    """The gradients of one optimizer's parameters that GradScaler was told to unscale."""

    def __init__(self) -> None:
        self.scale = 1.0
        """Factor of the loss whose gradients are in chunks, until the update."""
        self._scaler: weakref.ref[GradScaler] | None = None
        self._shown: dict[torch.Tensor, torch.dtype] = {}
        """Parameters whose p.grad is an UnscaledGradient, with the types of their gradients."""

    def show(self, params: Iterable[torch.Tensor], scaler: GradScaler, scale: float) -> None:
        """Makes p.grad of these parameters show the gradients without the scale.

        Raises:
            NotImplementedError: This torch does not let a gradient have another type than its
                parameter.
        """
        self.take_back()
        self.scale, self._scaler = scale, weakref.ref(scaler)
        for param in params:
            grad = param.grad
            if grad is None:
                continue
            if grad.dtype != torch.float32 and not hasattr(param, "grad_dtype"):
                raise NotImplementedError(
                    f"scaler.unscale_ shows gradients of {param.dtype} parameters in float32, and "
                    f"torch {torch.__version__} lets a gradient have its parameter's type alone: "
                    "use torch 2.10 or later, or precision='fp32'"
                )
            self._shown[param] = grad.dtype
            _set_gradient(param, UnscaledGradient(grad, scale))

    def take_back(self) -> None:
        """Makes p.grad the gradients in chunks again, with the edits made since `show`."""
        for param, dtype in self._shown.items():
            grad = param.grad
            if isinstance(grad, UnscaledGradient):
                grad = grad.scaled
            elif grad is not None:  # assigned by the user
                grad = (grad * self.scale).to(dtype)
            _set_gradient(param, grad, dtype)
        self._shown = {}

    def forget(self, scaler: GradScaler | None = None) -> None:
        """Resets the scale to 1: a step has used the gradients, or was skipped.

        Args:
            scaler: GradScaler whose iteration is over; None: any.
        """
        if scaler is None or (self._scaler is not None and self._scaler() is scaler):
            self.take_back()
            self.scale, self._scaler = 1.0, None


def _set_gradient(
    param: torch.Tensor, grad: torch.Tensor | None, dtype: torch.dtype = torch.float32
) -> None:
    param.grad = None
    if hasattr(param, "grad_dtype") and param.grad_dtype != dtype:
        param.grad_dtype = dtype
    param.grad = grad


_drivers: weakref.WeakSet[StepDriver] = weakref.WeakSet()
"""Drivers of the optimizers that a GradScaler has unscaled."""


@cache
def enter_grad_scaler() -> None:
    """Makes GradScaler have boosted optimizers' drivers unscale gradients from now on."""
    scaler: Any = GradScaler
    unscale, update = scaler._unscale_grads_, scaler.update

    def unscale_grads(
        self: GradScaler,
        optimizer: Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        driver: StepDriver | None = getattr(optimizer, "_castor", None)
        if driver is None:
            found: dict[torch.device, torch.Tensor] = unscale(
                self, optimizer, inv_scale, found_inf, allow_fp16
            )
            return found
        _drivers.add(driver)
        with driver.engine.session.turn("scaler.unscale_"):
            bad = driver.unscale(optimizer, self, 1.0 / inv_scale.double().item())
        return {} if bad is None else {found_inf.device: found_inf.fill_(float(bad))}

    def updated(self: GradScaler, *arguments: Any, **keywords: Any) -> None:
        update(self, *arguments, **keywords)
        for driver in _drivers:
            driver.scaled.forget(self)

    scaler._unscale_grads_, scaler.update = unscale_grads, updated
