"""Modules that share an optimizer, of a loop that calls each by itself: boosted as one model."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from castor.runtime.boosted_model import model_with
from castor.runtime.engine import engine_of, engines_holding
from castor.runtime.hooks import ModuleHook, WrappedForward
from castor.runtime.packed import is_packed
from castor.runtime.rules import params_of


class CalledBySubmodules(nn.Module):
    """A model that nobody calls: a call of one of its parts is a forward of it.

    Args:
        submodules: Modules; a loop calls them, or their children.
        alone: Parameters of no module, which a loss has.
    """

    def __init__(self, submodules: Iterable[nn.Module], alone: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.submodules = nn.ModuleList(submodules)
        self.alone = nn.ParameterList(alone)
        self._running: set[int] = set()
        """Threads that are in a forward."""

    def forward(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls the forward of a part."""
        return call(*args, **kwargs)

    def run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the forward of a part, as a forward of the model where it is the outermost."""
        thread = threading.get_ident()
        if thread in self._running:
            return call(*args, **kwargs)
        self._running.add(thread)
        try:
            return self(call, *args, **kwargs)
        finally:
            self._running.discard(thread)

    def follow_calls(self) -> None:
        """From now on calls of the parts are forwards of this model, which has been boosted."""
        engine = engine_of(self)
        for part in self._called():
            part.register_forward_pre_hook(ModuleHook(_keep_alive, self))
            if not any(param is not None for param in part._parameters.values()):
                if not isinstance(part.__dict__.get("forward"), _SubmoduleForward):
                    part.__dict__["forward"] = _SubmoduleForward(part, self)
            elif plain := [param for param in part.parameters() if not is_packed(param)]:
                cast = engine.input_cast(plain[0].dtype, engine.index_of[plain[0]])
                if cast.needed:
                    part.register_forward_pre_hook(cast, with_kwargs=True, prepend=True)

    def _called(self) -> Iterator[nn.Module]:
        seen: set[nn.Module] = set()
        for part in self.submodules:
            for one in (part, *part.children()):
                if one not in seen and next(one.parameters(), None) is not None:
                    seen.add(one)
                    yield one


class _SubmoduleForward(WrappedForward):
    """The forward of a part, within one of the model."""

    def __init__(self, module: nn.Module, model: CalledBySubmodules) -> None:
        super().__init__(module)
        self._model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Gives what the part's forward gives."""
        return self._model.run(self.wrapped, args, kwargs)


def _keep_alive(_model: CalledBySubmodules, *_: Any) -> None:
    """A hook that holds the model, which nobody else does."""


def boosted_around(module: nn.Module) -> nn.Module | None:
    """The model that a module's parameters are of, where one has been boosted; None: none has."""
    engines = engines_holding(module)
    return model_with(engines[0]) if engines else None


def root_of(
    module: nn.Module, mine: Sequence[Optimizer], made: Sequence[Optimizer]
) -> tuple[nn.Module, list[Optimizer]]:
    """Finds what is to be one model: a boosted one, one around it, or a new one.

    Arguments and results are those of `whole_of`.
    """
    known = boosted_around(module)
    if known is None:
        return whole_of(module, mine, made)
    has = set(known.parameters())
    if all(has.issuperset(params_of(one)) for one in mine):
        return known, [*mine]
    holds = set(module.modules()).issuperset(known.modules())
    return whole_of(module if holds else known, mine, made)


def whole_of(
    module: nn.Module, mine: Sequence[Optimizer], made: Sequence[Optimizer]
) -> tuple[nn.Module, list[Optimizer]]:
    """Finds what is to be one model, with all optimizers that train some of it.

    Args:
        module: A part of it, or all.
        mine: Optimizers over its parameters.
        made: All that have no model yet.

    Returns:
        The module, or what holds it and all else that the optimizers step; and these.
    """
    trained = {param for one in made for param in params_of(one)}
    modules, optimizers = [module], [*mine]
    alone: dict[torch.Tensor, None] = {}
    while True:
        has = {param for one in modules for param in one.parameters()}.union(alone)
        missing = {param for one in optimizers for param in params_of(one)} - has
        if not missing:
            break
        found = modules_with(missing, trained)
        owned = {param for one in found for param in one.parameters()}
        alone |= dict.fromkeys(
            p for one in optimizers for p in params_of(one) if p in missing and p not in owned
        )
        within = {part for one in found for part in one.modules()}
        modules = [one for one in modules if one not in within] + found
        has = owned.union(has, alone)
        optimizers = [one for one in made if has.intersection(params_of(one))]
    if modules == [module] and not alone:
        return module, optimizers
    return CalledBySubmodules(modules, alone), optimizers


def modules_with(params: Set[torch.Tensor], trained: Set[torch.Tensor]) -> list[nn.Module]:
    """Finds the outermost modules of the process that have some of the parameters.

    Args:
        params: What is looked for.
        trained: A module that has other parameters that require gradients is none of them.

    Returns:
        Modules, none of which is in another one.
    """
    # Not isinstance: objects may compute their __class__.
    live: list[nn.Module] = [
        one
        for one in gc.get_objects()
        if issubclass(type(one), nn.Module) and "_modules" in vars(one)
    ]
    around: dict[nn.Module, list[nn.Module]] = {}
    for one in live:
        for child in one._modules.values():
            if child is not None:
                around.setdefault(child, []).append(one)

    def fits(module: nn.Module) -> bool:
        return all(param in trained or not param.requires_grad for param in module.parameters())

    found: list[nn.Module] = []
    for one in live:
        if not any(param is not None and param in params for param in one._parameters.values()):
            continue
        outermost = one
        while outer := next(filter(fits, around.get(outermost, ())), None):
            outermost = outer
        if outermost not in found:
            found.append(outermost)
    submodules = {part for one in found for part in one.modules() if part is not one}
    return [one for one in found if one not in submodules]
