"""Blocks whose activations wait for backward in host memory."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from castor import _C
from castor.activations.own_forward import OwnForward


class OffloadingForward(OwnForward):
    """The forward of a module, with what autograd saves in it handed to an ActivationOffload."""

    def __init__(self, module: nn.Module, offload: _C.ActivationOffload) -> None:
        """Takes the place of `module.forward`.

        Args:
            module: The module.
            offload: Its model's.
        """
        super().__init__(module)
        self._offload = offload

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Gives what the class's forward gives.

        Raises:
            castor.OutOfMemoryError: Host memory has no room for what the block before saved.
        """
        module = self.module
        forward = functools.partial(type(module).forward, module)
        if not module.training or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with offloading(self._offload):
            return forward(*args, **kwargs)


def offloading(offload: _C.ActivationOffload) -> saved_tensors_hooks:
    """Within it autograd saves what backward needs there: one forward of a block.

    Raises:
        castor.OutOfMemoryError: Host memory has no room for what the block before saved.
    """
    return saved_tensors_hooks(functools.partial(offload.save, offload.begin()), offload.restore)
