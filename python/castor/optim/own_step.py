"""Steps of optimizers that no rule runs, on host copies of what a chunk cannot show them."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Muon, Optimizer

from castor.optim.weight_digests import WeightDigests
from castor.runtime.rules import MASTER

_HOST = torch.device("cpu")

Step = Callable[[], Any]
Part = list[tuple[dict[str, Any], list[torch.Tensor]]]
"""Groups, each with some of its parameters."""


class OwnStep:
    """The step of an optimizer's class where parameters are in 16 bits, or on a GPU.

    It sees float32 tensors on the host instead, gradients as well: of 16-bit parameters their
    masters, which are entries of `optimizer.state`; of float32 ones what they hold now. Optimizers
    of torch step one parameter at a time, so that few copies exist at once; of others nobody knows
    whether they may, and all parameters are there. Muon multiplies matrices, 30 n^3 operations for
    one of n x n: its copies, and its state for as long, are where the parameter computes.
    """

    def __init__(self, optimizer: Optimizer, digests: WeightDigests | None) -> None:
        """Of an optimizer that is about to be boosted, over the model's parameters.

        Args:
            optimizer: It.
            digests: Of what its steps leave; None: there is one rank.
        """
        self._optimizer = weakref.ref(optimizer)
        self._digests = digests
        for param, entry in optimizer.state.items():  # as some begin, in the parameter's type
            optimizer.state[param] = {key: _in_float32(value) for key, value in entry.items()}
        self._on_device = type(optimizer) is Muon
        self._singly = type(optimizer).__module__.startswith(("torch.optim.", "castor.optim."))

    @torch.no_grad()
    def __call__(self, step: Step, scale: float) -> None:
        """Updates every parameter that has a gradient.

        Args:
            step: Of the class, over the groups that the optimizer has at that moment.
            scale: What gradients are multiplied with, in float32.
        """
        for part in self._parts():
            with self._copied(part, scale):
                step()

    def take(self, entries: Iterable[tuple[torch.Tensor, dict[str, Any] | None]]) -> None:
        """Saved states, in copies of their types: torch would load those of the parameters.

        Args:
            entries: A parameter of the model each, and its state, if it has one.
        """
        state = self._held().state
        for param, entry in entries:
            if entry is not None:
                state[param] = {
                    key: value.to(_HOST, copy=True) if isinstance(value, torch.Tensor) else value
                    for key, value in entry.items()
                }

    def _held(self) -> Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None  # it is stepping
        return optimizer

    def _parts(self) -> Iterator[Part]:
        """What is stepped together: all parameters that have gradients, or each of them."""
        groups = [
            (group, [param for param in group["params"] if param.grad is not None])
            for group in self._held().param_groups
        ]
        if not self._singly:
            yield groups
            return
        for group, params in groups:
            yield from ([(group, [param])] for param in params)

    @contextmanager
    def _copied(self, part: Part, scale: float) -> Iterator[None]:
        optimizer = self._held()
        all_groups, state = optimizer.param_groups, optimizer.state
        copies = {p: self._copy_of(p, scale) for _, params in part for p in params}
        optimizer.param_groups = [
            {**group, "params": [copies[param] for param in params]} for group, params in part
        ]
        optimizer.state = defaultdict(
            dict,
            {
                copy: {
                    key: _placed(value, copy.device)
                    for key, value in state[param].items()
                    if key != MASTER
                }
                for param, copy in copies.items()
                if param in state
            },
        )
        try:
            yield
            found = optimizer.state
            for (group, _), stepped in zip(part, optimizer.param_groups, strict=True):
                group.update({key: stepped[key] for key in stepped if key != "params"})
        finally:
            optimizer.param_groups, optimizer.state = all_groups, state
        for param, copy in copies.items():
            entry = {key: _placed(value, _HOST) for key, value in found.get(copy, {}).items()}
            if param.dtype != torch.float32:
                entry[MASTER] = _placed(copy.detach(), _HOST)
            if entry:
                state[param] = entry
            param.copy_(copy)
            if self._digests:
                self._digests.add(param, copy)

    def _copy_of(self, param: torch.Tensor, scale: float) -> nn.Parameter:
        device = param.device if self._on_device else _HOST
        copy = nn.Parameter(self._master_of(param).to(device))
        grad = param.grad
        assert grad is not None
        copy.grad = grad.to(device, torch.float32, copy=True).mul_(scale)
        return copy

    def _master_of(self, param: torch.Tensor) -> torch.Tensor:
        """What is to be updated; of 16 bits, the master that rounds to what the parameter holds."""
        now = param.detach().to("cpu", copy=True)
        master: torch.Tensor | None = self._held().state.get(param, {}).get(MASTER)
        if master is None or param.dtype == torch.float32:
            return now.float()
        # What was written since the last step becomes its own master, as in chunks (0012).
        return torch.where(master.to(now.dtype) == now, master, now.float())


def _placed(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _in_float32(value: Any) -> Any:
    """What is in 16 bits; all on the host."""
    if not isinstance(value, torch.Tensor):
        return value
    narrow = value.is_floating_point() and value.element_size() < 4
    return value.to("cpu", torch.float32 if narrow else value.dtype)
