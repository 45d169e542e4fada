"""Refuses changes to a boosted model's structure, at the line that makes them.

A parametrization without parameters to train is allowed: the module's parameter is the same one
under another name, and comes back when the parametrization is removed. PEFT adapts fused experts in
this way in each forward (docs/design/0004).
"""

from __future__ import annotations

import types
import weakref
from functools import cache
from typing import Any, NoReturn

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.utils.parametrize import register_parametrization

from castor.errors import UsageError
from castor.runtime.boosted_model import all_boosted, modules_of_other_models
from castor.runtime.hooks import ModuleHook

_guarded: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_parameters: weakref.WeakKeyDictionary[nn.Module, dict[str, weakref.ref[nn.Parameter]]] = (
    weakref.WeakKeyDictionary()
)
"""The parameters that guarded modules had when they were boosted."""
_parametrized: weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[nn.Module], str]] = (
    weakref.WeakKeyDictionary()
)
"""Modules that hold parametrizations of a guarded module: (that module, the parameter's name), with
the name "" for the ModuleDict over all its parameters."""
_CHANGING = ("resize_token_embeddings", "add_adapter", "merge_and_unload", "unload")
"""Methods of transformers and PEFT that write into a model before they first register anything."""


def guard(model: nn.Module) -> None:
    """Makes any registration of a module or parameter in `model` raise UsageError from now on.

    Methods that would change the model before they register anything raise it at once.
    """
    if not _guarded:
        _install()
    _watch(model)
    for module in model.modules():
        for name in _CHANGING:
            if callable(getattr(type(module), name, None)) and name not in vars(module):
                vars(module)[name] = _Refused(module, name)


def _watch(model: nn.Module) -> None:
    """Records the modules as guarded, and the parameters that each has now."""
    _guarded.update(model.modules())
    for module in model.modules():
        _parameters[module] = {
            name: weakref.ref(param)
            for name, param in module._parameters.items()
            if param is not None
        }


def unguard(model: nn.Module) -> None:
    """Allows changes of the model's structure again."""
    own = set(model.modules()) - modules_of_other_models(model)
    _guarded.difference_update(own)
    for module in own:
        _parameters.pop(module, None)
        for name in _CHANGING:
            if isinstance(vars(module).get(name), _Refused):
                del vars(module)[name]


class _Refused:
    """The replacement of a method that boosted models refuse; a copied module gets the method."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self._owner = weakref.ref(module)
        self._name = name

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            f"{self._name}() would change a {type(self._owner()).__name__} of a boosted model, "
            "which castor has laid out in chunks, and sharded over ranks, in booster.boost: call "
            "it before boost; in one process booster.release(model) gives the model back"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        owner = self._owner()
        method = getattr(type(owner), self._name)
        return types.MethodType(method, memo.get(id(owner), owner))

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        return getattr, (self._owner(), self._name)  # unpickled before the module has attributes


def _refuse_module(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    if is_compiling():  # tracing makes temporary module lists, from slices
        return
    if module in _parametrized:
        _check_parametrization(module, name, submodule)
    if module in _guarded and (held := module._modules.get(name)) is not submodule:
        if name == "parametrizations" and submodule is not None:
            _parametrized[submodule] = weakref.ref(module), ""  # empty, filled later
            return
        if held is None and submodule is not None and _stateless(submodule):
            _watch(submodule)
            return
        if held is None or submodule is None or not _takes_over(submodule, held):
            _refuse(module, f"module '{name}'")
        _guarded.difference_update(held.modules())
        _watch(submodule)


def _stateless(module: nn.Module) -> bool:
    """Whether a module has nothing for castor to place: a loss, a metric, an activation."""
    return next(module.parameters(), None) is None and next(module.buffers(), None) is None


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
    if module not in _guarded or module._parameters.get(name) is param:
        return
    if param is None or param is not _parameter_at_boost(module, name):
        _refuse(module, f"parameter '{name}'")


def _parameter_at_boost(module: nn.Module, name: str) -> nn.Parameter | None:
    known = _parameters.get(module, {}).get(name)
    return None if known is None else known()


def _check_parametrization(holder: nn.Module, name: str, added: nn.Module | None) -> None:
    """Raises UsageError if a parametrization has parameters to train, and takes it off again."""
    owner, parametrized = _parametrized[holder]
    module = owner()
    if module is None or module not in _guarded or added is None:
        return
    had = _parameter_at_boost(module, parametrized or name)
    new = {id(p) for p in added.parameters() if p is not had and p.requires_grad}
    if not new or new <= {id(p) for boosted in all_boosted() for p in boosted.params}:
        if not parametrized:
            _parametrized[added] = owner, name
            if had is not None and added._parameters.get("original") is had:
                _forget_write(had)
        return
    if not parametrized:  # the first one on this parameter
        _take_off(module, holder, name, had)
    _refuse(module, f"a parametrization of '{parametrized or name}' with parameters to train")


def _forget_write(param: nn.Parameter) -> None:
    """Takes back the version count of a parametrization, which writes no new values.

    Otherwise the chunk would be copied to the host as written, and recomputation of its block would
    be refused.
    """
    if not param.is_inference():
        version = param._version - _versions_of_parametrizing()
        torch._C._autograd._unsafe_set_version_counter((param,), (version,))


@cache
def _versions_of_parametrizing() -> int:
    """Returns the number of version counts that torch adds when it parametrizes a parameter."""
    with torch.inference_mode(mode=False):  # tensors made in it count nothing
        module = nn.Module()
        param = nn.Parameter(torch.zeros(1, device="cpu"))
        module.weight = param
        before = param._version
        register_parametrization(module, "weight", nn.Identity())
        return param._version - before


def _take_off(
    module: nn.Module, parametrizations: nn.Module, name: str, param: nn.Parameter | None
) -> None:
    """Undoes what torch.nn.utils.parametrize has done before it registers a parametrization."""
    delattr(type(module), name)  # the class was made for this module alone
    if not parametrizations._modules:
        del module._modules["parametrizations"]
        module.__class__ = type(module).__bases__[0]
    if param is not None:
        module._parameters[name] = param


def _refuse(module: nn.Module, what: str) -> NoReturn:
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
