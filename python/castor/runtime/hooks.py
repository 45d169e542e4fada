"""Hooks and replacements on the modules of a boosted model."""

from __future__ import annotations

import contextlib
import functools
import operator
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import nn
from torch.compiler import is_compiling

from castor import _C
from castor.runtime.boosted_model import compiled_from
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
        """Gives a copy of the module a hook that does nothing."""
        return does_nothing

    def __reduce_ex__(self, _: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Makes pickle and torch.save write a hook that does nothing."""
        return operator.itemgetter(0), ((does_nothing,),)


Around = Callable[..., Any]
"""Called with a call and its arguments: gives what it gives."""


class CompiledCall:
    """The call of a module that is compiled, and what stands around it.

    Within what torch.compile makes of a forward castor's hooks would break the graph: they run
    before it and after it. The module has this as its compiled call, which torch leaves out of
    copies and pickles.
    """

    def __init__(
        self, module: nn.Module, enter: Callable[..., None], leave: Callable[..., None]
    ) -> None:
        """Takes the place of the module's compiled call, if it has one.

        Args:
            module: One that torch.compile has wrapped, or whose compile() has been called.
            enter: A pre-hook of its forward.
            leave: A hook of its forward; what it is given is None where that failed.
        """
        self.around: Around | None = None
        """Runs the compiled forward in its own way, and perhaps again in backward."""
        self._owner = weakref.ref(module)
        self._compiled = module._compiled_call_impl
        self._enter = enter
        self._leave = leave
        module._compiled_call_impl = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Gives what the compiled forward gives."""
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
        """Before the model's forward: compile() may have been called again, and replaced this."""
        module = self._owner()
        if module is not None and module._compiled_call_impl is not self:
            self._compiled = module._compiled_call_impl
            module._compiled_call_impl = self

    def remove(self) -> None:
        """Leaves the module what it stands around."""
        module = self._owner()
        if module is not None and module._compiled_call_impl is self:
            module._compiled_call_impl = self._compiled


class _DirectCall:
    """The call of a module that has castor's two hooks and no others, past torch's loop over them.

    It stands where a compiled call would, which torch leaves out of copies and pickles. The hooks
    are there as well: whoever asks sees them, and with others beside them, or while torch.compile
    or torch.jit.trace follows the call, they run as ever.
    """

    def __init__(self, module: nn.Module, call: _C.ModuleCall) -> None:
        self._owner = weakref.ref(module)
        module._compiled_call_impl = call

    def remove(self) -> None:
        """Leaves the module its own call."""
        module = self._owner()
        if module is not None:
            forget_direct_call(module)


def forget_direct_call(module: nn.Module) -> None:
    """A module that is followed no longer; no effect on one that has been compiled meanwhile."""
    if isinstance(module._compiled_call_impl, _C.ModuleCall):
        del module._compiled_call_impl


def compiled_calls(model: nn.Module) -> dict[nn.Module, CompiledCall]:
    """Returns the calls of a followed model's modules that torch.compile has compiled."""
    return {
        compiled_from(module): call
        for module in model.modules()
        if isinstance(call := module._compiled_call_impl, CompiledCall)
    }


class Handle(Protocol):
    """The handle of a hook."""

    def remove(self) -> None:
        """Takes it away again."""
        ...


def follow(spec: ModelSpec, events: _C.StepEvents) -> list[Handle]:
    """Has the modules of a model tell of a step.

    Every module that owns parameters tells when it is entered and left, and has backward tell when
    it comes to its outputs (csrc/torch/step_hooks.h); `events` follow the gradients by themselves.
    One that is compiled tells from outside of what is compiled, also for the modules in it.

    Args:
        spec: Of the model.
        events: What is told: a session, or a recorder.

    Returns:
        What takes the hooks away again.
    """
    handles: list[Handle] = []
    calls: list[CompiledCall] = []
    for i, owner in enumerate(spec.modules):
        module = owner.module
        enter = ModuleHook(events.forward_pre_hook(i, module))
        leave = ModuleHook(events.forward_hook(i, module))
        if owner.compiled:
            calls.append(CompiledCall(module, enter, leave))
            continue
        hooks = (
            module.register_forward_pre_hook(enter, prepend=True),
            module.register_forward_hook(leave, always_call=True),
        )
        handles.extend(hooks)
        # The model itself is called once a step.
        if i > 0 and type(module)._call_impl is nn.Module._call_impl:
            handles.append(
                _DirectCall(module, events.module_call(i, module, *(h.id for h in hooks)))
            )
    if calls:
        model = spec.modules[0].module
        handles.append(model.register_forward_pre_hook(ModuleHook(_stay, calls)))
    return [*handles, *calls]


def warn_of_late_compiles(model: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
    """Has the model warn, once, of blocks that are compiled from now on: their graphs will break.

    Args:
        model: One that is followed.
        blocks: Its, by name.
    """
    waiting = [(name, weakref.ref(block)) for name, block in blocks.items()]
    model.register_forward_pre_hook(ModuleHook(_warn_of_late, waiting))


def _warn_of_late(waiting: list[tuple[str, weakref.ref[nn.Module]]], *_: Any) -> None:
    if is_compiling():  # the whole model is
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
    """Attributes of modules that castor replaces, as they were. Holds no module."""

    def __init__(self) -> None:
        self._before: list[tuple[weakref.ref[nn.Module], str, Any]] = []

    def put(self, module: nn.Module, name: str, value: Any) -> None:
        """Sets an attribute of the module itself, which keeps its class's."""
        self._before.append((weakref.ref(module), name, module.__dict__.get(name, _NOTHING)))
        setattr(module, name, value)

    def put_back(self) -> None:
        """Puts back what was there before, on modules that are alive."""
        while self._before:
            owner, name, before = self._before.pop()
            module = owner()
            if module is not None and before is _NOTHING:
                module.__dict__.pop(name, None)
            elif module is not None:
                setattr(module, name, before)


_NOTHING = object()
