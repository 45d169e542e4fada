"""Offloads the activations of blocks: they wait for backward in host memory."""

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
    """Wrapper of a module's forward that offloads the tensors saved for backward."""

    def __init__(self, module: nn.Module, offload: _C.ActivationOffload) -> None:
        """Takes a module, and the model's `offload` for its activations."""
        self._owner = weakref.ref(module)
        self._offload = offload

    def __call__(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Returns the result of `call`, the module's forward.

        Raises:
            castor.OutOfMemoryError: Host memory has no room for activations of the block before.
        """
        module = self._owner()
        assert module is not None
        if not module.training or not torch.is_grad_enabled():
            return call(*args, **kwargs)
        with offloading(self._offload):
            return call(*args, **kwargs)


def offloading(offload: _C.ActivationOffload) -> saved_tensors_hooks:
    """Returns a context that offloads the tensors saved for backward in one forward of a block.

    Raises:
        castor.OutOfMemoryError: Host memory has no room for activations of the block before.
    """
    return saved_tensors_hooks(functools.partial(offload.save, offload.begin()), offload.restore)
