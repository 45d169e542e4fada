"""Forwards that castor puts in place of a module's own."""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from castor.runtime.hooks import Around


class OwnForward:
    """The forward of one module of a boosted model; a copy of the module gets its class's back."""

    def __init__(self, module: nn.Module) -> None:
        self._owner = weakref.ref(module)

    @property
    def module(self) -> nn.Module:
        """The one whose forward this is."""
        module = self._owner()
        assert module is not None
        return module

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """The forward of a copy of the module."""
        copy, forward = memo.get(id(self.module)), type(self.module).forward
        return forward if copy is None else types.MethodType(forward, copy)

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        """The forward of a module that is read from a pickle: its class's, as ModuleHook gives."""
        return getattr, (self.module, "forward")


class WrappedForward(OwnForward):
    """One that calls what it takes the place of: the class's, or what somebody has put there."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._before = module.__dict__.get("forward")  # None: its class's
        self.__signature__ = inspect.signature(module.forward)

    @property
    def wrapped(self) -> Callable[..., Any]:
        """The forward that the module had."""
        module = self.module
        before: Callable[..., Any] = self._before or type(module).forward.__get__(module)
        return before


class ForwardAround(OwnForward):
    """The class's forward, run by what stands around it."""

    def __init__(self, module: nn.Module, around: Around) -> None:
        super().__init__(module)
        self._around = around

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Gives what the class's forward gives."""
        module = self.module
        return self._around(functools.partial(type(module).forward, module), *args, **kwargs)


def has_own_forward(module: nn.Module) -> bool:
    """Whether the module's forward is not its class's, but one that somebody has put there.

    A copy of a boosted module has its class's as an attribute.
    """
    forward = module.__dict__.get("forward")
    return forward is not None and not (
        getattr(forward, "__func__", None) is type(module).forward
        and getattr(forward, "__self__", None) is module
    )
