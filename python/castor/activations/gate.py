"""Keeps "auto", where it is only the default, out of forwards that it would change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling

from castor.activations.caches import held_for, layer_of
from castor.activations.choices import BlockRanks
from castor.activations.recompute import Recomputation
from castor.runtime.hooks import ModuleHook

_SWITCH, _FUNCTION = "gradient_checkpointing", "_gradient_checkpointing_func"
_NOTHING = object()
_OF_LIBRARIES = ("castor", "transformers", "peft", "torch")
"""Packages whose hooks within a block may run in both of its forwards."""


class Gate:
    """Turns transformers' gradient checkpointing of one block on for a forward, and then off.

    Between forwards the block and its copies have the attributes that the user gave them. Gradient
    checkpointing stays as the user set it in a forward for which one of these holds:

    - there is room for everything, or the user's own gradient checkpointing is on;
    - the forward is passed a filled key-value cache, which checkpointing would take away;
    - the block has written a buffer in its first forward, which would be written twice;
    - user code has registered a hook within the block, which would be called twice;
    - torch.compile, a tracer or a functorch transform runs the forward.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        recomputation: Recomputation,
        is_wanted: Callable[[], bool],
        block_ranks: BlockRanks,
    ) -> None:
        """Registers the gate on a block.

        Args:
            module: The block, which has transformers' gradient checkpointing.
            name: Name of the block in the model.
            recomputation: Runs the block's forward when checkpointing is on.
            is_wanted: Whether the current forward of the model may need decisions.
            block_ranks: The ranks that compute the block together.
        """
        self._name = name
        self._recomputation = recomputation
        self._is_wanted = is_wanted
        self._block_ranks = block_ranks
        self._layer = layer_of(module)
        self._before: list[tuple[Any, Any]] = []
        self.acts = False
        """Whether the latest training forward was decided by castor."""
        module.register_forward_pre_hook(ModuleHook(self._enter), with_kwargs=True)
        module.register_forward_hook(ModuleHook(self._leave), always_call=True)

    @property
    def recomputes(self) -> bool:
        """Whether backward recomputes the block of the latest training forward."""
        return self.acts and self._recomputation.recomputes

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        own = module.__dict__
        self._before.append((own.get(_SWITCH, _NOTHING), own.get(_FUNCTION, _NOTHING)))
        if not (module.training and torch.is_grad_enabled()):
            return
        acts = self._may_act(module, args, kwargs)
        self.acts = all(self._block_ranks.all_gather(f"the start of '{self._name}'", acts))
        if self.acts:
            own[_SWITCH], own[_FUNCTION] = True, self._recomputation

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if not self._before:  # the pre-hook has failed
            return
        for name, value in zip((_SWITCH, _FUNCTION), self._before.pop(), strict=True):
            if value is _NOTHING:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = value

    def _may_act(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return not (
            is_compiling()
            or getattr(module, _SWITCH) is True
            or self._recomputation.refused
            or not self._is_wanted()
            or torch._C._is_tracing()
            or torch._C._are_functorch_transforms_active()
            or held_for(self._layer, args, kwargs) != ""
            or any(_has_hooks(part) for part in module.modules() if part is not module)
        )


def _has_hooks(module: nn.Module) -> bool:
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return any(not _is_known(hook) for hook in hooks)


def _is_known(hook: Any) -> bool:
    if isinstance(hook, ModuleHook):
        return True
    place = getattr(hook, "__module__", None) or type(hook).__module__
    return place.partition(".")[0] in _OF_LIBRARIES
