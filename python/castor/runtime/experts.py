"""Mixtures of experts whose passes fetch single experts (docs/design/0059)."""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.utils.checkpoint
from torch import nn
from torch.compiler import is_compiling

from castor import _C
from castor.config.names import GatherExperts
from castor.errors import UsageError
from castor.runtime.expert_steps import Hooks, Rows, SavedRows, StepRows, Steps
from castor.runtime.hooks import ModuleHook
from castor.runtime.spec import ModelSpec

_IN_ANY_ORDER = ("grouped_mm", "batched_mm")
"""Implementations of transformers whose sums do not depend on the experts' numbers."""
_DECISIONS = 64
"""Number of sets of a layer's experts of which decisions under checkpoints are kept."""


@dataclass(frozen=True, kw_only=True)
class ExpertFigures:
    """Figures of experts that are fetched one by one; see MemoryReport."""

    expert_hits: int = 0
    expert_misses: int = 0
    expert_fetched_bytes: int = 0
    expert_cache_bytes: int = 0
    expert_guessed_bytes: int = 0
    expert_right_guesses: int = 0


def expert_modules(spec: ModelSpec) -> list[int]:
    """Returns the positions, in `spec.modules`, of modules whose experts can be fetched one by one.

    These are classes of transformers' `use_experts_implementation`. All parameters that such a
    module owns have the experts as their first dimension.
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
        and all(owners[i] == 1 for i in part.params)
        and len(part.params) == len(_own(part.module))
    ]


def frozen_experts(spec: ModelSpec, frozen: Sequence[bool]) -> list[int]:
    """Returns the modules of expert_modules whose values do not change in steps.

    Args:
        spec: Description of the model.
        frozen: Per parameter, whether no optimizer steps it.
    """
    return [m for m in expert_modules(spec) if all(frozen[i] for i in spec.modules[m].params)]


def params_by_row(spec: ModelSpec, frozen: Sequence[bool]) -> list[bool]:
    """Returns per parameter whether a module of frozen_experts owns it: gather_experts="auto"."""
    by_row = [False] * len(spec.params)
    for position in frozen_experts(spec, frozen):
        for i in spec.modules[position].params:
            by_row[i] = True
    return by_row


def choose_experts(
    model: nn.Module, spec: ModelSpec, frozen: Sequence[bool], choice: GatherExperts
) -> list[int]:
    """Returns the modules of expert_modules that the setting `gather_experts` asks for.

    With True these are all, with "auto" those of frozen_experts.

    Raises:
        UsageError: gather_experts is True, and the model has no such module.
    """
    if choice is not True:
        return frozen_experts(spec, frozen) if choice else []
    found = expert_modules(spec)
    if not found:
        raise UsageError(
            f"gather_experts=True, but {type(model).__name__} has no mixture of experts whose "
            "experts are one tensor of transformers' use_experts_implementation; leave "
            "gather_experts out"
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

    def __init__(self, modules: Sequence[int], choice: GatherExperts) -> None:
        """Takes the modules.

        Args:
            modules: Positions of the modules in the model's spec, as of choose_experts.
            choice: The setting `gather_experts`; with True, steps take rows without a measurement.
        """
        self._modules = modules
        self._cache: _C.Experts | None = None
        self._steps = Steps(measures=choice is not True)

    def start(
        self, spec: ModelSpec, session: _C.Session, frozen: Sequence[bool]
    ) -> dict[int, ExpertCall]:
        """Makes the cache, once there is a session.

        Args:
            spec: Description of the model.
            session: Session of the model.
            frozen: Per parameter, whether no optimizer steps it.

        Returns:
            The calls of the modules, by position in the spec, for `follow`.
        """
        if not self._modules:
            return {}
        parts = [spec.modules[position] for position in self._modules]
        cache = self._cache = _C.Experts(session, [part.params for part in parts])
        model = spec.modules[0].module
        own = sum(spec.params[i].nbytes for part in parts for i in part.params)
        share = own / sum(param.nbytes for param in spec.params)
        model.register_forward_pre_hook(
            ModuleHook(_model_called, cache, self._steps, session, share)
        )
        calls: dict[int, ExpertCall] = {}
        routers = [_router(model, part.module) for part in parts]
        trains = [[not frozen[i] for i in part.params] for part in parts]
        stored = {id(p) for i, p in enumerate(spec.params) if session.weight_stored(i)}
        for layer, (at, part) in enumerate(zip(self._modules, parts, strict=True)):
            params = [spec.params[i] for i in part.params]
            rows = StepRows(cache, layer, params, self._steps)
            ahead = routers[layer + 1] if layer + 1 < len(parts) else None
            # Each guess would read the router from NVMe, or there is no cache to guess for.
            if id(ahead) in stored or (ahead is not None and any(trains[layer + 1])):
                ahead = None
            calls[at] = ExpertCall(part.module, cache, layer, rows, ahead, trains[layer])
        return calls

    def figures(self) -> ExpertFigures:
        """Returns the figures so far."""
        if self._cache is None:
            return ExpertFigures()
        found = self._cache.figures()
        found["expert_misses"] += self._steps.experts
        found["expert_fetched_bytes"] += self._steps.fetched_bytes
        return ExpertFigures(**found)


def _model_called(
    cache: _C.Experts, steps: Steps, session: _C.Session, share: float, *_: Any
) -> None:
    """Gives the cache's memory to a step that begins, which plans with all that there is."""
    if torch.is_grad_enabled():
        cache.clear()
    steps.model_called(session, cache, share)


def _router(model: nn.Module, experts: nn.Module) -> nn.Parameter | None:
    """Returns the weight [experts, hidden] of the router of a module of experts, if it has one.

    The router is the one module beside the experts whose `weight` has a row for each of them.
    """
    beside = [parent for parent in model.modules() if experts in parent.children()]
    weights = [
        weight
        for parent in beside
        for child in parent.children()
        if isinstance(weight := getattr(child, "weight", None), nn.Parameter)
        and weight.dim() == 2
        and weight.shape[0] == experts.num_experts
    ]
    return weights[0] if len(weights) == 1 else None


class ExpertCall:
    """The call of a module of experts, which computes with the experts that it needs.

    A forward computes with rows of the parameters in their place, and with the experts' places in
    these in place of their numbers. The rows are in a cache where no gradients are needed and the
    call needs at most half of the experts. In a step they have memory of their own, and backward
    fetches them again (SavedRows). Every other forward is the module's own, between castor's hooks.

    It is in the place of a compiled call, which torch leaves out of copies and pickles.
    """

    def __init__(
        self,
        module: nn.Module,
        cache: _C.Experts,
        layer: int,
        rows: StepRows,
        next_router: nn.Parameter | None,
        trains: list[bool],
    ) -> None:
        """Takes the place of the module's compiled call.

        Args:
            module: A module of expert_modules.
            cache: Cache of the model's experts.
            layer: Number of the module in the cache.
            rows: Rows of the module's parameters, for training steps.
            next_router: Weight of the next layer's router, by which its experts are guessed.
            trains: Per parameter of the module, whether an optimizer steps it.
        """
        self._owner = weakref.ref(module)
        self._cache = cache
        self._layer = layer
        self._rows = rows
        self._next_router = next_router
        self._full = False
        """Whether steps take the full layer now."""
        self._decisions = _Decisions()
        self._params = _own(module)
        self._trains = any(trains)
        self._untrained = [p for p, t in zip(self._params.values(), trains, strict=True) if not t]
        self._arguments = _arguments(module)
        # Eager code that knows the number of experts from elsewhere would not take another one.
        self._eager = "config" not in inspect.unwrap(type(module).forward).__code__.co_names
        self._num_experts = int(module.num_experts)  # type: ignore[arg-type]
        self._thread: int | None = None
        """Thread whose call computes with rows."""
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
        """Whether this thread is in a call that computes with rows."""
        return self._thread == threading.get_ident()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of the module's forward, between all hooks that it has."""
        module = self._owner()
        assert module is not None
        index = self._index(args, kwargs)
        needed = self._needed(module, index)
        call = self._begin(needed) if needed else None
        if call is None:
            return module._call_impl(*args, **kwargs)
        assert index is not None
        if isinstance(call, _CachedCall):
            self._guess(args, kwargs, index)
        # In place of forward, so that users' hooks see the experts' own numbers.
        own = module.__dict__.get("forward")
        try:
            unwritten = _unwritten(index)
            self._thread = threading.get_ident()
            module.__dict__["forward"] = functools.partial(
                self._forward, module, module.forward, call, index, unwritten
            )
            return module._call_impl(*args, **kwargs)
        finally:
            if own is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = own
            self._thread = None
            call.end()

    def _forward(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        call: _Call,
        index: torch.Tensor,
        unwritten: Callable[[], bool],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Runs the module's forward with rows of experts in place of its parameters."""
        if self._index(args, kwargs) is not index or not unwritten():
            return forward(*args, **kwargs)  # a hook of the user's chose others
        own = module.__dict__["_parameters"]
        places, num_places, take = call.places, call.num_places, call.take
        if self._implementation(module) == "eager" and places != sorted(places):
            # A sum over experts in the order of their numbers.
            select = torch.tensor(places, device=index.device)
            places, num_places = list(range(len(places))), len(places)
            take = functools.partial(_selected, call.take, select)
        args, kwargs = self._at_places(args, kwargs, call.needed, places)
        try:
            module.__dict__["_parameters"] = _Awaited(own, list(self._params), take, self)
            module.num_experts = num_places  # type: ignore[assignment]
            with call.saving():
                return forward(*args, **kwargs)
        finally:
            module.__dict__["_parameters"] = own
            module.num_experts = self._num_experts  # type: ignore[assignment]

    def _guess(self, args: Any, kwargs: Any, index: torch.Tensor) -> None:
        """Begins to fetch an expert that the next layer's router would choose now.

        The link rests from here until that router has chosen, but for this call's own copies, which
        come first. Hidden states change little from layer to layer (Eliseev & Mazur 2023, "Fast
        Inference of Mixture-of-Experts Language Models with Offloading", section 3.2).
        """
        weight = self._next_router
        if weight is None or not self._cache.takes_guesses(self._layer + 1):
            return
        hidden = dict(zip(self._arguments, args, strict=False), **kwargs).get(self._arguments[0])
        if hidden is None or hidden.shape[-1] != weight.shape[1]:
            return
        scores = nn.functional.linear(hidden.reshape(-1, weight.shape[1]).to(weight.dtype), weight)
        likely = scores.amax(0).topk(min(index.shape[-1], weight.shape[0])).indices.tolist()
        self._cache.guess(self._layer + 1, likely)

    def _begin(self, needed: list[int]) -> _Call | None:
        """Begins to fetch the experts that a call needs; None: it takes the full parameters."""
        # Updates do not reach the cache.
        cached = not torch.is_grad_enabled() and not self._trains
        if cached and 2 * len(needed) <= self._num_experts:
            rows = self._cache.fetch(self._layer, needed)
            if rows is not None:
                return _CachedCall(self._cache, self._layer, needed, rows)
        return self._begin_in_step(needed)

    def _begin_in_step(self, needed: list[int]) -> _Call | None:
        """Same, for a step's forward: the first, or the one of a checkpoint's backward.

        A layer is fetched by the row until a call needs more than 10 of 11 experts, and in full
        from then on, until one needs at most half of them. The bytes of both differ by a tenth
        there, and a plan is of steps that go on in the same way.
        """
        hooks: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
        compared = getattr(hooks and hooks[0], "__module__", "") == torch.utils.checkpoint.__name__
        checkpoint = not torch.is_grad_enabled() or compared
        again = torch._C._current_graph_task_id() != -1
        decided = None
        if again:
            decided = self._decisions.of_second(needed)
        elif compared:
            decided = self._decisions.of_others(needed)
        if not again:
            self._rows.needs(needed)
        if not self._rows.steps.by_row:
            return None
        if decided is None:
            if 11 * len(needed) > 10 * self._num_experts:
                self._full = True
            elif 2 * len(needed) <= self._num_experts:
                self._full = False
        by_row = not self._full if decided is None else decided
        rows: Rows | None = self._rows.fetch(needed) if by_row else None
        if decided and rows is None:  # a checkpoint wants what its first forward had
            rows = self._rows.read(needed)
        if compared and not again:
            self._decisions.note(needed, rows is not None)
        if rows is None:
            return None
        if again:
            self._rows.steps.backward(self._rows, needed)
        elif checkpoint:
            self._rows.steps.forward(self._rows, needed)
        # A checkpoint keeps no rows in forward, and needs them at once in backward.
        keeps = checkpoint or again
        saved = None if keeps else SavedRows(self._rows, needed, hooks)
        return _StepCall(self._rows, rows, needed, saved)

    def _implementation(self, module: nn.Module) -> str:
        return getattr(module.config, "_experts_implementation", None) or "eager"

    def _index(self, args: Any, kwargs: Any) -> torch.Tensor | None:
        """Returns the argument with the experts' numbers; None: there is no such tensor."""
        index = dict(zip(self._arguments, args, strict=False), **kwargs).get(self._arguments[1])
        return index if isinstance(index, torch.Tensor) else None

    def _needed(self, module: nn.Module, index: torch.Tensor | None) -> list[int]:
        """Returns the experts that a call needs, ascending; none: it takes the full parameters."""
        if is_compiling() or torch._C._is_tracing() or torch._C._are_functorch_transforms_active():
            return []
        implementation = self._implementation(module)
        if implementation not in _IN_ANY_ORDER and not (implementation == "eager" and self._eager):
            return []
        own = module._parameters
        if module.num_experts != self._num_experts or any(
            own.get(name) is not param for name, param in self._params.items()
        ):  # adapters compute with other values meanwhile
            return []
        if torch.is_grad_enabled() and any(param.requires_grad for param in self._untrained):
            return []  # they get gradients of full tensors
        if index is None or index.is_floating_point() or not index.numel():
            return []
        if index.numel() > 4 * self._num_experts:
            index = index.unique()
        needed = sorted(set(index.flatten().tolist()))
        return needed if needed[0] >= 0 and needed[-1] < self._num_experts else []

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


class _Decisions:
    """Decisions of a layer's forwards under torch's checkpoints: rows, or the full layer.

    Torch compares what the second forward of a checkpoint saves with what the first one saved. The
    second one, within backward, is told by the experts that it needs. So all first forwards that
    need the same ones, and whose backward is to come, take the same. Passes without gradients
    between them save nothing, and decide for themselves.
    """

    def __init__(self) -> None:
        self._by_row: dict[tuple[int, ...], bool] = {}
        self._waiting: dict[tuple[int, ...], int] = {}
        """Number of forwards whose backward is to come."""

    def of_second(self, needed: list[int]) -> bool | None:
        """Returns whether the first forward took rows; None: it is not known."""
        key = tuple(needed)
        if key in self._by_row:
            self._waiting[key] = max(0, self._waiting[key] - 1)
        return self._by_row.get(key)

    def of_others(self, needed: list[int]) -> bool | None:
        """Returns whether other first forwards took rows; None: none waits for its backward."""
        key = tuple(needed)
        return self._by_row[key] if self._waiting.get(key) else None

    def note(self, needed: list[int], by_row: bool) -> None:
        """Takes the decision of a first forward."""
        key = tuple(needed)
        waiting = self._waiting.pop(key, 0)
        self._by_row.pop(key, None)
        self._by_row[key], self._waiting[key] = by_row, waiting + 1
        while len(self._by_row) > _DECISIONS:
            oldest = next(iter(self._by_row))
            del self._by_row[oldest], self._waiting[oldest]


class _Call(Protocol):
    """Experts of one call, on the device."""

    needed: list[int]
    """Numbers of the experts, ascending."""
    places: list[int]
    """Place of each of them in the rows."""
    num_places: int
    """Number of rows."""

    def take(self, position: int) -> torch.Tensor:
        """Returns the rows of the parameter at that position, once they have come."""
        ...

    def saving(self) -> AbstractContextManager[Any]:
        """Returns the context of the forward, for what it saves for backward."""
        ...

    def end(self) -> None:
        """Ends the call, also where it failed."""
        ...


class _CachedCall:
    """Experts of a call without gradients, in the cache."""

    def __init__(
        self,
        cache: _C.Experts,
        layer: int,
        needed: list[int],
        rows: tuple[list[torch.Tensor], list[int], int],
    ) -> None:
        self._cache = cache
        self._layer = layer
        self.needed = needed
        self._tensors, self.places, self.num_places = rows

    def take(self, position: int) -> torch.Tensor:
        self._cache.wait_for(self._layer, position)
        return self._tensors[position]

    def saving(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def end(self) -> None:
        self._cache.release(self._layer)


class _StepCall:
    """Experts of a training step's forward, in memory of their own."""

    def __init__(
        self, layer: StepRows, rows: Rows, needed: list[int], saved: SavedRows | None
    ) -> None:
        self._layer = layer
        self._rows = rows
        self._saved = saved
        self.needed = needed
        self.places = list(range(len(needed)))
        self.num_places = len(needed)

    def take(self, position: int) -> torch.Tensor:
        rows = self._rows.take(position)
        if self._saved:
            self._saved.know(position, rows)
        return self._layer.followed(position, rows, self.needed)

    def saving(self) -> AbstractContextManager[Any]:
        return self._saved.hooks() if self._saved else nullcontext()

    def end(self) -> None:
        if self._saved:
            self._saved.forward_ends()


def _unwritten(index: torch.Tensor) -> Callable[[], bool]:
    """Returns a function that says whether nobody has written to a tensor since."""
    if index.is_inference():  # which counts no versions
        values = index.clone()
        return lambda: torch.equal(index, values)
    version = index._version
    return lambda: index._version == version


def _selected(
    take: Callable[[int], torch.Tensor], select: torch.Tensor, position: int
) -> torch.Tensor:
    return take(position).index_select(0, select)


class _Awaited(dict[str, torch.Tensor]):
    """A module's parameters during a forward, whose thread finds rows in their place.

    A tensor is taken when it is read first, once its copies have come. Other threads find the
    parameters: one of them may save the model meanwhile.
    """

    def __init__(
        self,
        own: dict[str, nn.Parameter],
        names: list[str],
        take: Callable[[int], torch.Tensor],
        call: ExpertCall,
    ) -> None:
        super().__init__(own)
        self._names = names
        self._take = take
        self._tensors: dict[str, torch.Tensor] = {}
        self._call = call

    def __getitem__(self, name: str) -> torch.Tensor:
        if not self._call.by_row or name not in self._names:
            return super().__getitem__(name)
        if name not in self._tensors:
            self._tensors[name] = self._take(self._names.index(name))
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
