"""Hooks and replacements on the modules of a boosted model."""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import types
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import nn
from torch.compiler import is_compiling

from castor import _C
from castor.runtime.boosted_model import compiled_from
from castor.runtime.spec import ModelSpec

# --- Forwards that castor puts in place of a module's own -----------------------------------------


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


# --- Hooks and replacements on the modules of a boosted model -------------------------------------

does_nothing: Callable[..., None] = contextlib.nullcontext().__exit__
"""The hook of a copied module: takes any arguments. It is from the standard library, so that every
reader of the copy's pickle has it."""


class ModuleHook(functools.partial[Any]):
    """A hook of one boosted model, which keeps the model's engine alive.

    copy.deepcopy and pickle copy a module's hooks too. The copy is an ordinary module, which must
    neither run a boosted model's hooks nor keep its memory. It gets a hook that does nothing.
    """

    def __deepcopy__(self, _: dict[int, Any]) -> Any:
        """Gives a copy of the module a hook that does nothing."""
        return does_nothing

    def __reduce_ex__(self, _: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Makes pickle and torch.save write a hook that does nothing."""
        return operator.itemgetter(0), ((does_nothing,),)


Around = Callable[..., Any]
"""Function around a call: takes the call and its arguments, and returns the call's result."""


class CompiledCall:
    """The compiled call of a module, with castor's hooks around it.

    Inside of a compiled forward castor's hooks would break the graph, so that they run before and
    after it. The module has this object as its compiled call, which torch leaves out of copies and
    pickles.
    """

    def __init__(
        self, module: nn.Module, enter: Callable[..., None], leave: Callable[..., None]
    ) -> None:
        """Takes the place of the module's compiled call, if it has one.

        Args:
            module: Module that torch.compile has wrapped, or whose compile() has been called.
            enter: Pre-hook of its forward.
            leave: Hook of its forward; its output argument is None if the forward failed.
        """
        self.around: Around | None = None
        """Function that runs the compiled forward, and perhaps again in backward; None: none."""
        self._owner = weakref.ref(module)
        self._compiled = module._compiled_call_impl
        self._enter = enter
        self._leave = leave
        module._compiled_call_impl = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of the compiled forward."""
        module = self._owner()
        assert module is not None
        call = self._compiled or module._call_impl
        output = None
        self._enter(module, args)
        try:
            if self.around:
                output = self.around(call, *args, **kwargs)
            else:
                output = call(*args, **kwargs)
        finally:
            self._leave(module, args, output)
        return output

    def stay(self) -> None:
        """Takes its place again if compile() has replaced it; called before the model's forward."""
        module = self._owner()
        if module is not None and module._compiled_call_impl is not self:
            self._compiled = module._compiled_call_impl
            module._compiled_call_impl = self

    def remove(self) -> None:
        """Gives the module its own compiled call back."""
        module = self._owner()
        if module is not None and module._compiled_call_impl is self:
            module._compiled_call_impl = self._compiled


class _DirectCall:
    """A fast call of a module that has castor's two hooks and no others, without torch's hook loop.

    It is in the place of a compiled call, which torch leaves out of copies and pickles. The hooks
    are registered as well. They run as usual if the module has other hooks too, or while
    torch.compile or torch.jit.trace follows the call.
    """

    def __init__(self, module: nn.Module, call: _C.ModuleCall) -> None:
        self._owner = weakref.ref(module)
        module._compiled_call_impl = call

    def remove(self) -> None:
        """Gives the module its own call back."""
        module = self._owner()
        if module is not None:
            forget_direct_call(module)


def forget_direct_call(module: nn.Module) -> None:
    """Removes the direct call of a module; no effect if the module was compiled since."""
    if isinstance(module._compiled_call_impl, _C.ModuleCall):
        del module._compiled_call_impl


def compiled_calls(model: nn.Module) -> dict[nn.Module, CompiledCall]:
    """Returns the calls of a followed model's modules that torch.compile has compiled."""
    return {
        compiled_from(module): call
        for module in model.modules()
        if isinstance(call := module._compiled_call_impl, CompiledCall)
    }


class OwnCall(Protocol):
    """The call of a module that decides by itself whether castor's hooks run."""

    def unless_by_row(self, hook: Callable[..., None]) -> ModuleHook:
        """Returns the hook that is registered in place of `hook`."""
        ...


class Handle(Protocol):
    """The handle of a hook."""

    def remove(self) -> None:
        """Removes the hook."""
        ...


def follow(
    spec: ModelSpec, events: _C.StepEvents, own_calls: Mapping[int, OwnCall] | None = None
) -> list[Handle]:
    """Installs the hooks by which a model's modules report the events of a step.

    Every module that owns parameters reports when it is entered and left, and when backward reaches
    its outputs (csrc/torch/step_hooks.h). `events` follows the gradients by itself. A compiled
    module reports from outside of the compiled code, also for the modules in it.

    Args:
        spec: Description of the model.
        events: Receiver of the events: a session, or a recorder.
        own_calls: Calls that modules have in place of their own, by position in the spec; they
            decide whether the module's hooks run. None: there are none.

    Returns:
        Handles that remove the hooks.
    """
    handles: list[Handle] = []
    calls: list[CompiledCall] = []
    for i, owner in enumerate(spec.modules):
        module = owner.module
        enter = ModuleHook(events.forward_pre_hook(i, module))
        leave = ModuleHook(events.forward_hook(i, module))
        own_call = own_calls.get(i) if own_calls else None
        if own_call:
            enter, leave = own_call.unless_by_row(enter), own_call.unless_by_row(leave)
        if owner.compiled:
            calls.append(CompiledCall(module, enter, leave))
            continue
        hooks = (
            module.register_forward_pre_hook(enter, prepend=True),
            module.register_forward_hook(leave, always_call=True),
        )
        handles.extend(hooks)
        # The model itself is called once a step.
        if i > 0 and not own_call and type(module)._call_impl is nn.Module._call_impl:
            handles.append(
                _DirectCall(module, events.module_call(i, module, *(h.id for h in hooks)))
            )
    if calls:
        model = spec.modules[0].module
        handles.append(model.register_forward_pre_hook(ModuleHook(_stay, calls)))
    return [*handles, *calls]


def warn_of_late_compiles(model: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
    """Makes the model warn once if a block is compiled from now on: its graph will break.

    Args:
        model: Model whose modules are followed.
        blocks: Blocks of the model, by name.
    """
    waiting = [(name, weakref.ref(block)) for name, block in blocks.items()]
    model.register_forward_pre_hook(ModuleHook(_warn_of_late, waiting))


def _warn_of_late(waiting: list[tuple[str, weakref.ref[nn.Module]]], *_: Any) -> None:
    if is_compiling():  # the full model is compiled
        return
    for name, ref in waiting:
        block = ref()
        call = None if block is None else block._compiled_call_impl
        if call is not None and not isinstance(call, CompiledCall | _C.ModuleCall):
            waiting.clear()
            warnings.warn(
                f"block '{name}' ({type(block).__name__}) was compiled after boost, so its graph "
                "breaks at each of its modules, and fullgraph=True fails: compile blocks first, "
                "then boost the model",
                stacklevel=5,  # past the call of the model
            )
            return


def _stay(calls: list[CompiledCall], *_: Any) -> None:
    for call in calls:
        call.stay()


class Replaced:
    """The original values of module attributes that castor has replaced. Holds no module."""

    def __init__(self) -> None:
        self._before: list[tuple[weakref.ref[nn.Module], str, Any]] = []

    def put(self, module: nn.Module, name: str, value: Any) -> None:
        """Sets an attribute on the module itself; its class keeps its own."""
        self._before.append((weakref.ref(module), name, module.__dict__.get(name, _NOTHING)))
        setattr(module, name, value)

    def put_back(self) -> None:
        """Restores the original values on modules that are alive."""
        while self._before:
            owner, name, before = self._before.pop()
            module = owner()
            if module is not None and before is _NOTHING:
                module.__dict__.pop(name, None)
            elif module is not None:
                setattr(module, name, before)


_NOTHING = object()
