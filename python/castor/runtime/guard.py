"""Refuses changes to a boosted model's structure, at the line that makes them."""

from __future__ import annotations

import types
import weakref
from typing import Any, NoReturn

from torch import nn
from torch.compiler import is_compiling
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from castor.errors import UsageError
from castor.runtime.hooks import ModuleHook

_guarded: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_CHANGING = ("resize_token_embeddings", "add_adapter", "merge_and_unload", "unload")
"""Methods of transformers' and PEFT's that have written into a model when they first register."""


def guard(model: nn.Module) -> None:
    """From now on, registering a module or parameter anywhere in `model` raises UsageError.

    So do methods that would do so half-way.
    """
    if not _guarded:
        _install()
    _guarded.update(model.modules())
    for module in model.modules():
        for name in _CHANGING:
            if callable(getattr(type(module), name, None)) and name not in vars(module):
                vars(module)[name] = _Refused(module, name)


def unguard(model: nn.Module) -> None:
    """The model may be changed again."""
    _guarded.difference_update(model.modules())
    for module in model.modules():
        for name in _CHANGING:
            if isinstance(vars(module).get(name), _Refused):
                del vars(module)[name]


class _Refused:
    """In place of a method of a module of a boosted model; copies of the module have the method."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self._owner = weakref.ref(module)
        self._name = name

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            f"{self._name}() would change a {type(self._owner()).__name__} of a boosted model, "
            "which castor has laid out, and divided where ranks do, in booster.boost: call it "
            "before boost; in one process booster.release(model) gives the model back"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        owner = self._owner()
        method = getattr(type(owner), self._name)
        return types.MethodType(method, memo.get(id(owner), owner))

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        return getattr, (self._owner(), self._name)  # of a module that has no attributes yet


def _refuse_module(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    if is_compiling():  # what is traced makes lists of modules of its own, by slices
        return
    if module in _guarded and (held := module._modules.get(name)) is not submodule:
        if held is None or submodule is None or not _takes_over(submodule, held):
            _refuse(module, f"module '{name}'")
        _guarded.difference_update(held.modules())
        _guarded.update(submodule.modules())


def _takes_over(module: nn.Module, held: nn.Module) -> bool:
    """Whether a module has the parameters of another, in the same modules and by the same names.

    BigBird's attention goes over to full attention so, for sequences too short for blocks. Castor
    follows the modules that own parameters, and nothing of it stands on those that are left out.
    """
    if [*map(_named, held.named_parameters())] != [*map(_named, module.named_parameters())]:
        return False
    for left in {*held.modules()}.difference(module.modules()):
        hooks = (*left._forward_pre_hooks.values(), *left._forward_hooks.values())
        if left._parameters or any(isinstance(hook, ModuleHook) for hook in hooks):
            return False
    return True


def _named(item: tuple[str, nn.Parameter]) -> tuple[str, int]:
    return item[0], id(item[1])


def _refuse_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
    if is_compiling():
        return
    if module in _guarded and module._parameters.get(name) is not param:
        _refuse(module, f"parameter '{name}'")


def _refuse(module: nn.Module, what: str) -> None:
    raise UsageError(
        f"{what} is set on a {type(module).__name__} of a boosted model; castor laid the model out "
        "in booster.boost and would not move it: change the model first, then boost it, or call "
        "booster.release(model) before"
    )


_installed = False


def _install() -> None:
    global _installed
    if not _installed:
        register_module_module_registration_hook(_refuse_module)
        register_module_parameter_registration_hook(_refuse_parameter)
        _installed = True
