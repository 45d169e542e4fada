"""Blocks whose activations wait for backward in host memory."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from castor import _C


class OffloadingCall:
    """Runs the forward of a module, with what autograd saves in it handed to an offload."""

    def __init__(self, module: nn.Module, offload: _C.ActivationOffload) -> None:
        """Takes a module whose activations go through the model's `offload`."""
        self._owner = weakref.ref(module)
        self._offload = offload

    def __call__(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Gives what `call`, the module's forward, gives.

        Raises:
            castor.OutOfMemoryError: Host memory has no room for what the block before saved.
        """
        module = self._owner()
        assert module is not None
        if not module.training or not torch.is_grad_enabled():
            return call(*args, **kwargs)
        with offloading(self._offload):
            return call(*args, **kwargs)


def offloading(offload: _C.ActivationOffload) -> saved_tensors_hooks:
    """Within it autograd saves what backward needs there: one forward of a block.

    Raises:
        castor.OutOfMemoryError: Host memory has no room for what the block before saved.
    """
    return saved_tensors_hooks(functools.partial(offload.save, offload.begin()), offload.restore)
