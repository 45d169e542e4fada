"""Refuses changes to a boosted model's structure, at the line that makes them."""

from __future__ import annotations

import weakref

from torch import nn
from torch.compiler import is_compiling
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from castor.errors import UsageError

_guarded: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def guard(model: nn.Module) -> None:
    """From now on, registering a module or parameter anywhere in `model` raises UsageError."""
    if not _guarded:
        _install()
    _guarded.update(model.modules())


def unguard(model: nn.Module) -> None:
    """The model may be changed again."""
    _guarded.difference_update(model.modules())


def _refuse_module(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    if is_compiling():  # what is traced makes lists of modules of its own, by slices
        return
    if module in _guarded and module._modules.get(name) is not submodule:
        _refuse(module, f"module '{name}'")


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
