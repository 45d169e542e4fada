"""Gives a boosted model back as an ordinary one."""

from __future__ import annotations

import torch
from torch import nn

from castor.runtime.blocks import BlockPolicy
from castor.runtime.boosted_model import forget
from castor.runtime.engine import Engine
from castor.runtime.experts import ExpertCall
from castor.runtime.guard import unguard
from castor.runtime.hooks import CompiledCall, ModuleHook, forget_direct_call
from castor.runtime.input_cast import InputCast

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
)
"""Attributes of a module that keep its hooks by number."""
_FLAGS = (
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


@torch.no_grad()
def release_model(model: nn.Module, engine: Engine) -> None:
    """Removes everything of castor's from the model; the session ends with the engine.

    Parameters keep their host storage, which the session leaves to them. Parameters on NVMe get
    memory of their own.

    Args:
        model: The boosted model.
        engine: Engine of the model.

    Raises:
        UsageError: The run is broken; nothing was changed.
    """
    engine.session.move_to_host()
    for i, param in enumerate(engine.params):
        if engine.session.weight_stored(i):
            param.data = param.detach().clone()
    engine.replaced.put_back()
    engine.blocks = BlockPolicy()  # the policy before refers to the engine
    for module in model.modules():
        _remove_hooks(module)
    unguard(model)
    forget(model)


def _remove_hooks(module: nn.Module) -> None:
    if isinstance(module._compiled_call_impl, CompiledCall | ExpertCall):
        module._compiled_call_impl.remove()
    forget_direct_call(module)
    for registry in _HOOKS:
        hooks = getattr(module, registry)
        for number, hook in list(hooks.items()):
            # torch wraps some hooks.
            if isinstance(getattr(hook, "hook", hook), ModuleHook | InputCast):
                for numbered in (registry, *_FLAGS):
                    getattr(module, numbered).pop(number, None)
