"""Mixtures of experts whose passes fetch single experts (docs/design/0059)."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling

from castor import _C
from castor.config.names import GatherExperts
from castor.errors import UsageError
from castor.runtime.hooks import ModuleHook
from castor.runtime.spec import ModelSpec

_IN_ANY_ORDER = ("grouped_mm", "batched_mm")
"""Implementations of transformers whose sums do not depend on the experts' numbers."""


@dataclass(frozen=True, kw_only=True)
class ExpertFigures:
    """Figures of experts that are fetched one by one; see MemoryReport."""

    expert_hits: int = 0
    expert_misses: int = 0
    expert_fetched_bytes: int = 0
    expert_cache_bytes: int = 0


def expert_modules(spec: ModelSpec, frozen: Sequence[bool]) -> list[int]:
    """Returns the positions, in `spec.modules`, of modules whose experts can be fetched one by one.

    These are classes of transformers' `use_experts_implementation`. All parameters that such a
    module owns have the experts as their first dimension, and their values do not change in steps.

    Args:
        spec: Description of the model.
        frozen: Per parameter, whether no optimizer steps it.
    """
    owners = [0] * len(spec.params)
    for module in spec.modules:
        for i in module.params:
            owners[i] += 1
    return [
        position
        for position, part in enumerate(spec.modules)
        if position > 0
        and not part.compiled
        and _has_experts_by_number(part.module)
        and all(frozen[i] and owners[i] == 1 for i in part.params)
        and len(part.params) == len(_own(part.module))
    ]


def params_by_row(spec: ModelSpec, frozen: Sequence[bool]) -> list[bool]:
    """Returns per parameter whether a module of expert_modules owns it."""
    by_row = [False] * len(spec.params)
    for position in expert_modules(spec, frozen):
        for i in spec.modules[position].params:
            by_row[i] = True
    return by_row


def choose_experts(
    model: nn.Module, spec: ModelSpec, frozen: Sequence[bool], choice: GatherExperts
) -> list[int]:
    """Returns the modules of expert_modules that the setting `gather_experts` asks for.

    Raises:
        UsageError: gather_experts is True, and the model has no such module.
    """
    found = [] if choice is False else expert_modules(spec, frozen)
    if choice is True and not found:
        raise UsageError(
            f"gather_experts=True, but {type(model).__name__} has no mixture of experts whose "
            "experts are one tensor of transformers' use_experts_implementation that no optimizer "
            "steps; freeze the experts (requires_grad_(False)), or leave gather_experts out"
        )
    return found


def _own(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: param for name, param in module._parameters.items() if param is not None}


def _has_experts_by_number(module: nn.Module) -> bool:
    """Whether the module computes with rows of its parameters, whose numbers its input gives."""
    number, own = getattr(module, "num_experts", None), _own(module)
    return (
        getattr(module, "_is_expert_parallel", None) is False
        and hasattr(getattr(module, "config", None), "_experts_implementation")
        and isinstance(number, int)
        and bool(own)
        and all(
            param.dim() > 1
            and param.shape[0] == number
            and param.is_contiguous()
            and param.is_floating_point()
            for param in own.values()
        )
        and not any(buffer is not None for buffer in module._buffers.values())
        and len(_arguments(module)) == 3
    )


def _arguments(module: nn.Module) -> list[str]:
    """Returns the names of the arguments of forward: hidden states, experts' numbers, weights."""
    forward = inspect.unwrap(type(module).forward)
    return list(inspect.signature(forward).parameters)[1:]


class Experts:
    """The mixtures of experts of one boosted model whose experts are fetched one by one.

    It holds no module: they hold the model's engine, which holds this.
    """

    def __init__(self, modules: Sequence[int]) -> None:
        """Takes the positions of the modules in the model's spec, as of choose_experts."""
        self._modules = modules
        self._cache: _C.ExpertCache | None = None

    def start(self, spec: ModelSpec, session: _C.Session) -> dict[int, ExpertCall]:
        """Makes the cache, once there is a session.

        Returns:
            The calls of the modules, by position in the spec, for `follow`.
        """
        if not self._modules:
            return {}
        parts = [spec.modules[position] for position in self._modules]
        cache = self._cache = _C.ExpertCache(session, [part.params for part in parts])
        model = spec.modules[0].module
        model.register_forward_pre_hook(ModuleHook(_clear_for_training, cache))
        calls = enumerate(zip(self._modules, parts, strict=True))
        return {at: ExpertCall(part.module, cache, layer) for layer, (at, part) in calls}

    def figures(self) -> ExpertFigures:
        """Returns the figures so far."""
        return ExpertFigures(**self._cache.figures()) if self._cache else ExpertFigures()


def _clear_for_training(cache: _C.ExpertCache, *_: Any) -> None:
    """Gives the cache's memory to a step that begins, which plans with all that there is."""
    if torch.is_grad_enabled():
        cache.clear()


class ExpertCall:
    """The call of a module of experts, which computes with the experts that it needs.

    A forward without gradients that needs at most half of the experts computes with a cache of
    experts in place of the parameters, and with its places in place of the experts' numbers. Every
    other forward is the module's own, between castor's hooks.

    It is in the place of a compiled call, which torch leaves out of copies and pickles.
    """

    def __init__(self, module: nn.Module, cache: _C.ExpertCache, layer: int) -> None:
        """Takes the place of the module's compiled call.

        Args:
            module: A module of expert_modules.
            cache: Cache of the model's experts.
            layer: Number of the module in the cache.
        """
        self._owner = weakref.ref(module)
        self._cache = cache
        self._layer = layer
        self._params = _own(module)
        self._arguments = _arguments(module)
        # Eager code that knows the number of experts from elsewhere would not take another one.
        self._eager = "config" not in inspect.unwrap(type(module).forward).__code__.co_names
        self._num_experts = int(module.num_experts)  # type: ignore[arg-type]
        self._thread: int | None = None
        """Thread whose call computes with the cache."""
        module._compiled_call_impl = self

    def remove(self) -> None:
        """Gives the module its own call back."""
        module = self._owner()
        if module is not None and module._compiled_call_impl is self:
            del module._compiled_call_impl

    def unless_by_row(self, hook: Callable[..., None]) -> ModuleHook:
        """Returns a hook that fetches or leaves the module's chunks, for calls that need them."""
        return ModuleHook(_unless_by_row, self, hook)

    @property
    def by_row(self) -> bool:
        """Whether this thread is in a call that computes with the cache."""
        return self._thread == threading.get_ident()

    def wait_for(self, position: int) -> None:
        """Waits for the copies of the module's parameter at that position."""
        self._cache.wait_for(self._layer, position)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of the module's forward, between all hooks that it has."""
        module = self._owner()
        assert module is not None
        needed = self._needed(module, args, kwargs)
        rows = self._cache.fetch(self._layer, needed) if needed else None
        if rows is None:
            return module._call_impl(*args, **kwargs)
        own = module.__dict__["_parameters"]
        try:
            self._thread = threading.get_ident()
            tensors, places, num_places = rows
            fetched = dict(zip(self._params, tensors, strict=True))
            params = _Awaited(own, fetched, self)
            if self._implementation(module) == "eager" and places != sorted(places):
                # A sum over experts in the order of their numbers.
                select = torch.tensor(places, device=tensors[0].device)
                compact = {name: params[name].index_select(0, select) for name in self._params}
                params = _Awaited(own, compact, self)
                places, num_places = list(range(len(places))), len(places)
            args, kwargs = self._at_places(args, kwargs, needed, places)
            module.__dict__["_parameters"] = params
            module.num_experts = num_places  # type: ignore[assignment]
            return module._call_impl(*args, **kwargs)
        finally:
            module.__dict__["_parameters"] = own
            module.num_experts = self._num_experts  # type: ignore[assignment]
            self._thread = None
            self._cache.release(self._layer)

    def _implementation(self, module: nn.Module) -> str:
        return getattr(module.config, "_experts_implementation", None) or "eager"

    def _needed(self, module: nn.Module, args: Any, kwargs: Any) -> list[int]:
        """Returns the experts that a call needs, ascending; none: it takes the full parameters."""
        if torch.is_grad_enabled() or is_compiling() or torch._C._is_tracing():
            return []
        implementation = self._implementation(module)
        if implementation not in _IN_ANY_ORDER and not (implementation == "eager" and self._eager):
            return []
        own = module._parameters
        if module.num_experts != self._num_experts or any(
            own.get(name) is not param for name, param in self._params.items()
        ):  # adapters compute with other values meanwhile
            return []
        index = dict(zip(self._arguments, args, strict=False), **kwargs).get(self._arguments[1])
        if not isinstance(index, torch.Tensor) or index.is_floating_point() or not index.numel():
            return []
        if index.numel() > 4 * self._num_experts:
            index = index.unique()
        needed = sorted(set(index.flatten().tolist()))
        inside = needed[0] >= 0 and needed[-1] < self._num_experts
        return needed if inside and 2 * len(needed) <= self._num_experts else []

    def _at_places(
        self, args: Any, kwargs: Any, needed: list[int], places: list[int]
    ) -> tuple[Any, Any]:
        """Returns the call's arguments with the places of experts in place of their numbers."""
        name = self._arguments[1]
        index = kwargs[name] if name in kwargs else args[1]
        place_of = [0] * self._num_experts
        for expert, place in zip(needed, places, strict=True):
            place_of[expert] = place
        at = torch.tensor(place_of, dtype=index.dtype, device=index.device)[index.long()]
        if name in kwargs:
            return args, {**kwargs, name: at}
        return (args[0], at, *args[2:]), kwargs


class _Awaited(dict[str, torch.Tensor]):
    """A module's parameters during a call, whose thread finds the cache's tensors in their place.

    A tensor is read once its copies have come. Other threads find the parameters: one of them may
    save the model meanwhile.
    """

    def __init__(
        self, own: dict[str, nn.Parameter], tensors: dict[str, torch.Tensor], call: ExpertCall
    ) -> None:
        super().__init__(own)
        self._tensors = tensors
        self._waiting = {name: position for position, name in enumerate(tensors)}
        self._call = call

    def __getitem__(self, name: str) -> torch.Tensor:
        if not self._call.by_row or name not in self._tensors:
            return super().__getitem__(name)
        position = self._waiting.pop(name, None)
        if position is not None:
            self._call.wait_for(position)
        return self._tensors[name]

    def _all(self) -> dict[str, torch.Tensor]:
        return {name: self[name] for name in self}

    def items(self) -> Any:
        """Waits for all of them."""
        return self._all().items()

    def values(self) -> Any:
        """Waits for all of them."""
        return self._all().values()

    def get(self, name: str, default: Any = None) -> Any:
        """Waits for the one."""
        try:
            return self[name]
        except KeyError:
            return default


def _unless_by_row(call: ExpertCall, hook: Callable[..., None], *args: Any) -> None:
    if not call.by_row:
        hook(*args)
