"""Steps of optimizers that no update rule runs: the class's own step, on float32 copies."""

from __future__ import annotations

import inspect
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import LBFGS, Muon, Optimizer

from castor.optim.weight_digests import WeightDigests
from castor.runtime.rules import MASTER

_HOST = torch.device("cpu")

Part = list[tuple[dict[str, Any], list[torch.Tensor]]]
"""Parameter groups, each with some of its parameters."""
Evaluate = Callable[[], tuple[Any, float]]
"""Calls the closure of a step; returns the loss, and the factor to multiply its gradients with."""


def unhooked_step(boosted: Optimizer) -> Callable[..., Any]:
    """Returns the step of the class an optimizer had before boost, without torch's step hooks."""
    before: Any = type(boosted).__mro__[1]
    step = before.step
    unwrapped: Callable[..., Any] = getattr(step, "__wrapped__", step)
    return unwrapped


def patched_step_of(optimizer: Optimizer) -> Callable[..., Any] | None:
    """Returns a function that user code has set as an optimizer's step; None: there is none.

    The wrapper of a learning-rate scheduler around the class's own step does not count.
    """
    step: Callable[..., Any] | None = vars(optimizer).get("step")
    if step is None:
        return None
    if getattr(step, "_wrapped_by_lr_sched", False):
        inner = inspect.unwrap(step)
        own = inspect.unwrap(type(optimizer).step)
        return None if inner is own else step
    return step


def evaluates_inside(optimizer: Optimizer, patched: Callable[..., Any] | None) -> bool:
    """Whether a step may call its closure at any time, as line searches do.

    torch's optimizers but LBFGS, and castor's, call it once, before everything else.
    """
    return patched is not None or not _looks_at_one(optimizer)


def _looks_at_one(optimizer: Optimizer) -> bool:
    """Whether an optimizer's step looks at one parameter at a time: torch's and castor's do."""
    module = f"{type(optimizer).__module__}."  # some of torch's classes say "torch.optim" alone
    return module.startswith(("torch.optim.", "castor.optim.")) and not isinstance(optimizer, LBFGS)


def closure_of(args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """Returns the closure among the arguments of a step; None: there is none."""
    closure = kwargs.get("closure", args[0] if args else None)
    return closure if callable(closure) else None


def with_closure(
    args: Sequence[Any], kwargs: dict[str, Any], closure: Callable[[], Any] | None
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Returns the arguments of a step with their closure replaced."""
    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure}
    return (closure, *args[1:]), kwargs


class OwnStep:
    """The step of an optimizer's own class for parameters in 16 bits, or on a GPU.

    The class gets float32 copies on the host instead of parameters and gradients. For a 16-bit
    parameter it is a copy of the master, an entry of `optimizer.state`; for a float32 parameter a
    copy of its values. torch's optimizers step one parameter at a time, so that few copies exist
    at once. Other optimizers may use all parameters together, and all copies exist then. Muon
    multiplies matrices, with 30 n^3 operations for one of n x n. Its copies, and its state during
    the step, are on the parameter's device.
    """

    def __init__(self, optimizer: Optimizer, digests: WeightDigests | None) -> None:
        """Prepares an optimizer that is about to be boosted, over the model's parameters.

        Args:
            optimizer: The optimizer.
            digests: Checksums of the weights after its steps; None: there is one rank.
        """
        self._optimizer = weakref.ref(optimizer)
        self._digests = digests
        self._masters: dict[torch.Tensor, torch.Tensor] = {}
        """Masters of the last step, for states that user code clears after it."""
        for param, entry in optimizer.state.items():  # made before boost
            if isinstance(param, torch.Tensor):
                optimizer.state[param] = {key: _in_float32(value) for key, value in entry.items()}
        self._on_device = type(optimizer) is Muon
        self._singly = _looks_at_one(optimizer) and patched_step_of(optimizer) is None

    @torch.no_grad()
    def __call__(
        self,
        step: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        scale: float,
        evaluate: Evaluate | None,
    ) -> Any:
        """Updates every parameter that has a gradient.

        Args:
            step: Step of the class, over the groups that the optimizer has when it is called.
            args: Arguments of the step.
            kwargs: Keyword arguments of the step.
            scale: Factor of the gradients, applied in float32.
            evaluate: Replacement of the closure among the arguments; None: there is no closure.

        Returns:
            The result of the step.
        """
        if not self._singly or evaluate is not None:
            return self._step_collectively(step, args, kwargs, scale, evaluate)
        result = None
        for group in self._held().param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    with self._alone(group, param, scale):
                        result = step(*args, **kwargs)
        return result

    def take(self, entries: Iterable[tuple[torch.Tensor, dict[str, Any] | None]]) -> None:
        """Loads copies of saved states in their own types; torch would use the parameters' types.

        Args:
            entries: Parameters of the model, each with its state, or None if it has none.
        """
        state = self._held().state
        self._masters.clear()
        for param, entry in entries:
            if entry is not None:
                state[param] = {
                    key: value.to(_HOST, copy=True) if isinstance(value, torch.Tensor) else value
                    for key, value in entry.items()
                }

    def _held(self) -> Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None  # it is alive in its step
        return optimizer

    @contextmanager
    def _alone(self, group: dict[str, Any], param: torch.Tensor, scale: float) -> Iterator[None]:
        """Makes a context in which the optimizer has a copy of one parameter, and no other."""
        optimizer = self._held()
        all_groups, state = optimizer.param_groups, optimizer.state
        copy = self._copy_of(param, scale)
        optimizer.param_groups = [{**group, "params": [copy]}]
        optimizer.state = defaultdict(dict)
        if param in state:
            optimizer.state[copy] = _shown_to_class(state[param], copy)
        try:
            yield
            found = optimizer.state.get(copy, {})
            (stepped,) = optimizer.param_groups
            group.update({key: stepped[key] for key in stepped if key != "params"})
        finally:
            optimizer.param_groups, optimizer.state = all_groups, state
        self._take_back(state, param, copy, found)

    def _step_collectively(
        self,
        step: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        scale: float,
        evaluate: Evaluate | None,
    ) -> Any:
        """Runs one step over copies of all parameters, also in optimizers inside of this one."""
        optimizers = _nested(self._held())
        copies: dict[torch.Tensor, torch.Tensor] = {
            param: self._copy_of(param, scale)
            for group in self._held().param_groups
            for param in group["params"]
            if param.grad is not None or (evaluate is not None and param.requires_grad)
        }
        originals = {copy: param for param, copy in copies.items()}
        scales = [scale]

        @torch.no_grad()
        def inner_closure() -> Any:
            assert evaluate is not None
            self._exchange(optimizers, originals)
            try:
                for param, copy in copies.items():
                    param.copy_(copy)
                    if copy.grad is None:
                        param.grad = None
                    elif param.grad is not None:
                        param.grad.copy_(copy.grad / scales[-1])
                loss, now = evaluate()
                scales.append(now)
                for param, copy in copies.items():
                    copy.grad = self._copy_of(param, now).grad
            finally:
                self._exchange(optimizers, copies)
            return loss

        if evaluate is not None:
            args, kwargs = with_closure(args, kwargs, inner_closure)
        state = self._held().state
        for param in copies:
            if MASTER in state.get(param, {}):
                self._masters[param] = state[param].pop(MASTER)
                if not state[param]:
                    del state[param]
        self._exchange(optimizers, copies)
        try:
            result = step(*args, **kwargs)
        finally:
            self._exchange(optimizers, originals)
            state = self._held().state
            for param in copies.keys() & self._masters.keys():
                state[param] = {**state.get(param, {}), MASTER: self._masters[param]}
        for param, copy in copies.items():
            found = {key: value for key, value in state.get(param, {}).items() if key != MASTER}
            self._take_back(state, param, copy, found)
        return result

    def _exchange(
        self, optimizers: Sequence[Optimizer], others: dict[torch.Tensor, torch.Tensor]
    ) -> None:
        """Replaces tensors in the groups and states of optimizers, in the existing containers.

        A class may hold a list of `param_groups` itself, as LBFGS does, or share it with an
        optimizer that it wraps.
        """
        exchanged: set[int] = set()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                params = group["params"]
                if id(params) not in exchanged:
                    exchanged.add(id(params))
                    params[:] = [others.get(param, param) for param in params]
            state = optimizer.state
            if id(state) not in exchanged:
                exchanged.add(id(state))
                for param in [one for one in state if one in others]:
                    other = others[param]
                    state[other] = state.pop(param)

    def _take_back(
        self,
        state: dict[torch.Tensor, Any],
        param: torch.Tensor,
        copy: torch.Tensor,
        found: dict[str, Any],
    ) -> None:
        """Copies the values of a copy to its parameter, and the class's state to the entry."""
        entry = {key: _placed(value, _HOST) for key, value in found.items()}
        if param.dtype != torch.float32:
            entry[MASTER] = self._masters[param] = _placed(copy.detach(), _HOST)
        if entry:
            state[param] = entry
        param.copy_(copy)
        if self._digests:
            self._digests.add(param, copy)

    def _copy_of(self, param: torch.Tensor, scale: float) -> nn.Parameter:
        device = param.device if self._on_device else _HOST
        copy = nn.Parameter(self._master_of(param, device), requires_grad=param.requires_grad)
        if param.grad is not None:
            copy.grad = param.grad.to(device, torch.float32, copy=True).mul_(scale)
        return copy

    def _master_of(self, param: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Returns the float32 values to update: the master where it rounds to the parameter.

        A parameter that is on `device` does not go through host memory.
        """
        now = param.detach().to(device, copy=True)
        entry = self._held().state.get(param, {})
        master: torch.Tensor | None = entry.get(MASTER, self._masters.get(param))
        if master is None or param.dtype == torch.float32:
            return now.float()
        master = master.to(device)
        # Values written since the last step become their own masters, as in chunks (0012).
        return torch.where(master.to(now.dtype) == now, master, now.float())


def _nested(optimizer: Optimizer) -> list[Optimizer]:
    """Returns an optimizer and the optimizers among its attributes, which it may step itself."""
    found = [optimizer]
    for one in found:
        for value in vars(one).values():
            if isinstance(value, Optimizer) and not any(value is other for other in found):
                found.append(value)
    return found


def _shown_to_class(entry: dict[str, Any], copy: torch.Tensor) -> dict[str, Any]:
    return {key: _placed(value, copy.device) for key, value in entry.items() if key != MASTER}


def _placed(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _in_float32(value: Any) -> Any:
    """Returns a tensor on the host, in float32 if it had 16 bits; other values as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    narrow = value.is_floating_point() and value.element_size() < 4
    return value.to("cpu", torch.float32 if narrow else value.dtype)
