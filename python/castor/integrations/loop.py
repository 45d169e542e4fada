"""Loops of one's own, in plain PyTorch, over models that castor boosts: for `castor run`."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import FunctionType
from typing import Any

import torch
from torch import distributed, multiprocessing, nn
from torch.nn import parallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from castor.booster import Booster
from castor.errors import Error, UsageError
from castor.integrations.common import (
    boost,
    boosted,
    lay_out_anew,
    lays_out_anew,
    plugin_of,
)
from castor.integrations.data_parallel import (
    DistributedDataParallel,
    check_device,
    wrapper_of,
)
from castor.integrations.several_modules import CalledBySubmodules, root_of
from castor.plugins import GeminiPlugin
from castor.runtime.engine import Engine, engine_of
from castor.runtime.ranks import launched_size
from castor.runtime.rules import params_of

_TORCHS = parallel.DistributedDataParallel
_CLIPS = "a loop clips its gradients itself (torch.nn.utils.clip_grad_norm_)"


class Loops:
    """Boosts what a loop trains when it first calls it: a model, with the optimizers made for it.

    An optimizer waits from when it is made. The first module that is called and has its parameters
    is its model, together with whatever else has some of them; without gradients a part may be
    called before. One that is made later joins those that train the model, or takes the place of
    those that hold the same parameters. A model that the loop
    moves to a device stays on the CPU until it is called: castor places what is boosted then, and
    anything else is moved. While something waits nn.Module.__call__ asks for it, and so does each
    __call__ of a subclass, which may not come to torch's; otherwise they are as they were.
    On several ranks a model is one in DistributedDataParallel, which is castor's.

    Args:
        settings: GeminiPlugin's arguments, as JSON holds them.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._waiting: list[weakref.ref[Optimizer]] = []
        self._unmoved: weakref.WeakKeyDictionary[nn.Module, torch.device] = (
            weakref.WeakKeyDictionary()
        )
        self._shared: list[weakref.ref[Engine]] = []
        """Engines of models that several ranks train, in the order of their boost."""
        self._calls: dict[Any, Callable[..., Any]] = {}
        """Each class's own __call__, while castor's is in its place."""
        self._frozen: weakref.WeakKeyDictionary[nn.Module, list[torch.Tensor]] = (
            weakref.WeakKeyDictionary()
        )
        """Boosted models, and what of their optimizers' parameters was frozen then."""
        self._to: Callable[..., Any] = nn.Module.to

    def watch(self) -> None:
        """From now on every optimizer that is made, and module that is moved, waits for a call."""
        made, to = Optimizer.__init__, self._to

        @functools.wraps(made)
        def init(optimizer: Optimizer, *arguments: Any, **keywords: Any) -> None:
            made(optimizer, *arguments, **keywords)
            self._waiting.append(weakref.ref(optimizer))
            self._see_calls()

        @functools.wraps(to)
        def moved(module: nn.Module, *arguments: Any, **keywords: Any) -> Any:
            parsed: Any = torch._C._nn._parse_to(*arguments, **keywords)
            device, dtype, *_ = parsed
            wrapper = wrapper_of(module)
            model = wrapper.module if wrapper else module
            if device is None or dtype is not None or not self._may_stay(model, device):
                return to(module, *arguments, **keywords)
            self._unmoved[model] = device
            self._see_calls()
            return module

        def cuda(module: nn.Module, device: int | torch.device | None = None) -> Any:
            index = device if device is not None else torch.cuda.current_device()
            return moved(module, torch.device("cuda", index) if isinstance(index, int) else index)

        module: Any = nn.Module
        module.to, module.cuda = moved, cuda
        optimizer: Any = Optimizer
        optimizer.__init__ = init
        for place in (parallel, parallel.distributed):
            vars(place)["DistributedDataParallel"] = DistributedDataParallel
        vars(multiprocessing)["spawn"] = _refuse_to_spawn
        vars(distributed)["barrier"] = self._answering(distributed.barrier)

    def _may_stay(self, module: nn.Module, device: torch.device) -> bool:
        """It is on the CPU, with something to train, and the device is the one that castor uses."""
        params = list(module.parameters())
        return (
            device.type != "cpu"
            and any(param.requires_grad for param in params)
            and all(param.device.type == "cpu" for param in params)
            and self._plugin.config.device != "cpu"
        )

    def _see_calls(self) -> None:
        for kind, call in _own_calls(nn.Module):
            if kind not in self._calls:
                self._calls[kind] = call
                kind.__call__ = self._seen(call)

    def _see_no_calls(self) -> None:
        for kind, call in self._calls.items():
            kind.__call__ = call
        self._calls.clear()

    def _seen(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def called(module: nn.Module, *arguments: Any, **keywords: Any) -> Any:
            wrapper = wrapper_of(module)
            model = wrapper.module if wrapper else module
            if self._waiting and any(map(is_lazy, model.parameters())):
                self._see_no_calls()  # this call makes its parameters, and the next one boosts it
                try:
                    return call(module, *arguments, **keywords)
                finally:
                    self._see_calls()
            self._boost_what_waits_for(model, wrapper)
            self._boost_what_is_thawed(model)
            self._move_what_is_called(model)
            if not (self._waiting or self._unmoved or self._frozen):
                self._see_no_calls()
            return call(module, *arguments, **keywords)

        return called

    def _boost_what_waits_for(
        self, module: nn.Module, wrapper: DistributedDataParallel | None
    ) -> None:
        waiting = [one for one in (ref() for ref in self._waiting) if one and not boosted(one)]
        has = set(module.parameters()) if waiting else set()
        mine = [one for one in waiting if has.intersection(params_of(one))]
        if not torch.is_grad_enabled():
            mine = [one for one in mine if has.issuperset(params_of(one))]
        if mine and wrapper is None:  # a module around it, as Fabric has one: it is called within
            parts = [one for one in module.modules() if isinstance(one, DistributedDataParallel)]
            within = {param for part in parts for param in part.parameters()}
            mine = [one for one in mine if not within.issuperset(params_of(one))]
        for optimizer in mine:
            _check_model(module, optimizer, wrapped=wrapper is not None)
        if mine and wrapper:
            check_device(wrapper, torch.device(self._plugin.config.device))
        if mine:
            model, mine = root_of(module, mine, waiting)
            with wrapper.keeping_its_buffers() if wrapper else nullcontext(), _thawed(mine):
                boost(self._booster, model, mine)
            self._note_frozen(model)
            if launched_size() > 1:
                self._shared.append(weakref.ref(engine_of(model)))
            for part in model.modules():
                self._unmoved.pop(part, None)
        self._waiting = [weakref.ref(one) for one in waiting if one not in mine]

    def _note_frozen(self, model: nn.Module) -> None:
        engine = engine_of(model)
        held = {param for one in engine.optimizers for param in params_of(one)}
        frozen = [param for param in held if not param.requires_grad]
        self._frozen.pop(model, None)
        if frozen and lays_out_anew(engine):
            self._frozen[model] = frozen

    def _boost_what_is_thawed(self, module: nn.Module) -> None:
        """Makes places for gradients and states of parameters that the loop has unfrozen since."""
        for model in [module] if module in self._frozen else _wholes_of(module, self._frozen):
            if any(param.requires_grad for param in self._frozen[model]):
                engine = engine_of(model)
                made = sorted(engine.optimizers, key=lambda one: one._castor.position or 0)  # type: ignore[attr-defined]
                lay_out_anew(self._booster, model, made)
                self._note_frozen(model)

    def _answering(self, barrier: Callable[..., Any]) -> Callable[..., Any]:
        """Torch's barrier, in which ranks also give what rank 0 reads of states to save them."""

        @functools.wraps(barrier)
        def answering(
            group: Any = None, async_op: bool = False, *arguments: Any, **keywords: Any
        ) -> Any:
            if not async_op and group in (None, distributed.group.WORLD):
                self._shared = [ref for ref in self._shared if _answers_first(ref())]
            return barrier(group, async_op, *arguments, **keywords)

        return answering

    def _move_what_is_called(self, module: nn.Module) -> None:
        for root, device in list(self._unmoved.items()):
            if any(module is part for part in root.modules()):
                self._to(root, device)
                del self._unmoved[root]

    @functools.cached_property
    def _booster(self) -> Booster:
        """One for all models of the loop, which share its plugin's budgets."""
        return Booster(self._plugin)

    @functools.cached_property
    def _plugin(self) -> GeminiPlugin:
        return plugin_of(self._settings, {}, _CLIPS, None)


def _own_calls(kind: Any) -> Iterator[tuple[Any, Callable[..., Any]]]:
    """Finds the classes that define how their modules are called: a class, and what derives."""
    kinds, found = [kind], {kind}
    for one in kinds:
        call = vars(one).get("__call__")
        if isinstance(call, FunctionType):
            yield one, call
        derived = [other for other in one.__subclasses__() if other not in found]
        kinds += derived
        found.update(derived)


@contextmanager
def _thawed(optimizers: list[Optimizer]) -> Iterator[None]:
    """Has parameters require gradients whose optimizer holds nothing else, as it is to step them.

    A discriminator is frozen during a step of the generator, which may be where it is called first.
    """
    frozen = [
        param
        for held in map(params_of, optimizers)
        if not any(param.requires_grad for param in held)
        for param in held
    ]
    for param in frozen:
        param.requires_grad_(True)
    try:
        yield
    finally:
        for param in frozen:
            param.requires_grad_(False)


def _wholes_of(module: nn.Module, models: Iterable[nn.Module]) -> list[nn.Module]:
    """Finds models of which a loop calls this part by itself."""
    return [
        one for one in models if isinstance(one, CalledBySubmodules) and module in one.submodules
    ]


def _answers_first(engine: Engine | None) -> bool:
    """Answers rank 0; whether all ranks have the model still."""
    if engine is None:
        return False
    try:
        engine.answer_first()
    except UsageError:
        raise
    except Error:  # a rank has let go of it; of one that is gone the barrier itself tells
        return False
    return True


def _refuse_to_spawn(*_: Any, **__: Any) -> None:
    """Instead of torch.multiprocessing.spawn."""
    raise NotImplementedError(
        "the script starts processes with torch.multiprocessing.spawn, which would train without "
        "castor: castor run --nproc N starts the ranks, each with RANK, LOCAL_RANK and WORLD_SIZE; "
        "have each run what spawn was given"
    )


def _check_model(module: nn.Module, optimizer: Optimizer, *, wrapped: bool) -> None:
    """It is all that the optimizer trains, and nothing else divides it among ranks."""
    kind, name, size = type(module).__name__, type(optimizer).__name__, launched_size()
    if isinstance(module, nn.DataParallel | _TORCHS):
        raise NotImplementedError(
            f"castor run trains a model in one process or in DistributedDataParallel as torch.nn."
            f"parallel has it, and this loop calls a {type(module).__module__}.{kind}: leave it "
            "out, or start as many ranks with --nproc (docs/guides/own-loops.md)"
        )
    if any(base.__name__ == "ZeroRedundancyOptimizer" for base in type(optimizer).__mro__):
        raise NotImplementedError(
            f"the loop's {name} shards optimizer states over ranks, as castor does itself: make "
            "the optimizer that it was given (optimizer_class) without it"
        )
    params, has = params_of(optimizer), set(module.parameters())
    others = sum(param not in has for param in params)
    if others and size > 1:
        raise UsageError(
            f"the loop calls a {kind} which has {len(params) - others} of the {len(params)} "
            f"parameters of its {name}: on several ranks castor run follows a model that is called "
            "as a whole; put all of them into one module in one DistributedDataParallel, or boost "
            "it in the script"
        )
    if size > 1 and not wrapped:
        raise NotImplementedError(
            f"the loop calls a {kind} on {size} ranks without DistributedDataParallel, where each "
            "would train a model of its own: put it into DistributedDataParallel before it is "
            "called first, or start one process"
        )
