"""What castor registers on the modules of a boosted model, and replaces there."""

from __future__ import annotations

import contextlib
import functools
import operator
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from castor import _C
from castor.runtime.spec import ModelSpec

does_nothing: Callable[..., None] = contextlib.nullcontext().__exit__
"""The hook of a copy: takes anything, and is the standard library's, which every reader of the
copy's pickle has."""


class ModuleHook(functools.partial[Any]):
    """A hook that belongs to one boosted model: it keeps the model's engine alive, as modules do.

    copy.deepcopy and pickle take a module's hooks along. The copy is an ordinary module, which must
    neither run a boosted model's hooks nor keep its memory: it gets one that does nothing.
    """

    def __deepcopy__(self, _: dict[int, Any]) -> Any:
        """What a copy of the module gets."""
        return does_nothing

    def __reduce_ex__(self, _: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """What a pickle of the module holds, and torch.save: it is read as an ordinary model."""
        return operator.itemgetter(0), ((does_nothing,),)


def follow(spec: ModelSpec, events: _C.StepEvents) -> list[RemovableHandle]:
    """Has the modules of a model tell of a step.

    Every module that owns parameters tells when it is entered and left, and has backward tell when
    it comes to its outputs (csrc/torch/step_hooks.h); `events` follow the gradients by themselves.

    Args:
        spec: Of the model.
        events: What is told: a session, or a recorder.

    Returns:
        What takes the hooks away again.
    """
    handles = []
    for i, owner in enumerate(spec.modules):
        module = owner.module
        enter = ModuleHook(events.forward_pre_hook(i, module))
        leave = ModuleHook(events.forward_hook(i, module))
        handles.append(module.register_forward_pre_hook(enter, prepend=True))
        handles.append(module.register_forward_hook(leave, always_call=True))
    return handles


class Replaced:
    """Attributes of modules that castor replaces, as they were. Holds no module."""

    def __init__(self) -> None:
        self._before: list[tuple[weakref.ref[nn.Module], str, Any]] = []

    def put(self, module: nn.Module, name: str, value: Any) -> None:
        """Sets an attribute of the module itself, which keeps its class's."""
        self._before.append((weakref.ref(module), name, module.__dict__.get(name, _NOTHING)))
        setattr(module, name, value)

    def put_back(self) -> None:
        """What was there before, on modules that are alive."""
        while self._before:
            owner, name, before = self._before.pop()
            module = owner()
            if module is not None and before is _NOTHING:
                module.__dict__.pop(name, None)
            elif module is not None:
                setattr(module, name, before)


_NOTHING = object()
