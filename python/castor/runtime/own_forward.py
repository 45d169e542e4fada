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
    """A forward of one module of a boosted model; a copied module gets its class's forward."""

    def __init__(self, module: nn.Module) -> None:
        self._owner = weakref.ref(module)

    @property
    def module(self) -> nn.Module:
        """The module whose forward this is."""
        module = self._owner()
        assert module is not None
        return module

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Returns the forward of a copy of the module: its class's."""
        copy, forward = memo.get(id(self.module)), type(self.module).forward
        return forward if copy is None else types.MethodType(forward, copy)

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        """Makes an unpickled module have its class's forward; see ModuleHook."""
        return getattr, (self.module, "forward")


class WrappedForward(OwnForward):
    """A forward that wraps the previous one: the class's, or one that user code put there."""

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
    """The class's forward, called through a function around it."""

    def __init__(self, module: nn.Module, around: Around) -> None:
        super().__init__(module)
        self._around = around

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of the class's forward."""
        module = self.module
        return self._around(functools.partial(type(module).forward, module), *args, **kwargs)


def has_own_forward(module: nn.Module) -> bool:
    """Whether a module has a forward other than its class's.

    A copy of a boosted module has its class's forward as an attribute, which does not count.
    """
    forward = module.__dict__.get("forward")
    return forward is not None and not (
        getattr(forward, "__func__", None) is type(module).forward
        and getattr(forward, "__self__", None) is module
    )
