"""Loops of one's own, as plain PyTorch has them, over models that castor boosts: for `castor run`."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from castor.booster import Booster
from castor.errors import UsageError
from castor.integrations.common import boost, boosted, plugin_of
from castor.runtime.ranks import rank_and_size

_CLIPS = "a loop clips its gradients itself (torch.nn.utils.clip_grad_norm_)"


class Loops:
    """Boosts what a loop trains when it first calls it: a model, with the optimizers made for it.

    An optimizer waits from when it is made. The first module that is called where gradients are
    recorded, and that has its parameters, is its model. While one waits nn.Module.__call__ asks for
    it, and otherwise it is torch's.

    Args:
        settings: GeminiPlugin's arguments, as JSON holds them.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._booster: Booster | None = None
        self._waiting: list[weakref.ref[Optimizer]] = []
        self._call: Callable[..., Any] = nn.Module.__call__

    def watch(self) -> None:
        """From now on every optimizer that is made waits for its model."""
        made = Optimizer.__init__

        @functools.wraps(made)
        def init(optimizer: Optimizer, *arguments: Any, **keywords: Any) -> None:
            made(optimizer, *arguments, **keywords)
            self._await_model_of(optimizer)

        Optimizer.__init__ = init  # type: ignore[method-assign]

    def _await_model_of(self, optimizer: Optimizer) -> None:
        self._waiting.append(weakref.ref(optimizer))
        call = self._call

        @functools.wraps(call)
        def called(module: nn.Module, *arguments: Any, **keywords: Any) -> Any:
            if torch.is_grad_enabled():
                self._boost_what_waits_for(module)
            return call(module, *arguments, **keywords)

        nn.Module.__call__ = called

    def _boost_what_waits_for(self, module: nn.Module) -> None:
        waiting = [one for one in (ref() for ref in self._waiting) if one and not boosted(one)]
        has = set(module.parameters())
        mine = [one for one in waiting if has.intersection(_params(one))]
        for optimizer in mine:
            _check_model(module, optimizer)
        if mine:
            boost(self._own_booster(), module, mine)
        self._waiting = [weakref.ref(one) for one in waiting if one not in mine]
        if not self._waiting:
            nn.Module.__call__ = self._call

    def _own_booster(self) -> Booster:
        """One for all models of the loop, which share its plugin's budgets."""
        if self._booster is None:
            self._booster = Booster(plugin_of(self._settings, {}, _CLIPS, None))
        return self._booster


def _params(optimizer: Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _check_model(module: nn.Module, optimizer: Optimizer) -> None:
    """It is all that the optimizer trains, and nothing else divides it among ranks."""
    kind, name = type(module).__name__, type(optimizer).__name__
    _, size = rank_and_size()
    if isinstance(module, DistributedDataParallel | nn.DataParallel) or size > 1:
        raise NotImplementedError(
            f"a loop of one's own trains in one process under castor run, and here it calls a {kind}"
            f"{f' on {size} ranks' if size > 1 else ''}: boost the model in the script instead of "
            "wrapping it (docs/guides/several-ranks.md), or start one process without the wrapper"
        )
    params, has = _params(optimizer), set(module.parameters())
    others = sum(param not in has for param in params)
    if others:
        raise UsageError(
            f"the loop calls a {kind} which has {len(params) - others} of the {len(params)} "
            f"parameters of its {name}: castor run follows a model that is called as a whole; "
            "boost it in the script instead"
        )
