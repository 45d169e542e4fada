"""Optimizers of boosted models: the user's classes, with a step over chunks."""

from __future__ import annotations

import copy
import functools
import operator
import weakref
from collections import defaultdict
from typing import Any

import torch
from torch.optim import Optimizer

from castor.errors import UsageError
from castor.optim.boosted_state import StoredState, write_entries
from castor.optim.hybrid_adam import HybridAdam
from castor.optim.state_formats import ROUNDING_FORMATS, from_portable, to_portable
from castor.optim.step_driver import StepDriver
from castor.runtime.engine import Engine
from castor.runtime.rules import EXACT_ONLY, params_of

# --- Makes ordinary copies of boosted optimizers, over ordinary parameters ------------------------


@torch.no_grad()
def ordinary_copy(
    optimizer: Optimizer,
    base: type[Optimizer],
    engine: Engine,
    *,
    fused: bool,
    memo: dict[int, Any],
) -> Optimizer:
    """Makes the ordinary optimizer that copy.deepcopy gives for a boosted one.

    Args:
        optimizer: The boosted optimizer.
        base: Class that it had before boost, which the copy gets.
        engine: Engine of its model.
        fused: Whether its state lies in chunks.
        memo: Memo of copy.deepcopy: the copy uses parameters that were copied already, with their
            model.

    Returns:
        An optimizer in memory, with the same groups and state, over copies of the parameters.

    Raises:
        UsageError: The copy could not hold the float32 masters, or the run is broken.
    """
    check_holds_masters(
        base,
        engine,
        fused=fused,
        what="a copy of ",
        instead="write the state with booster.save_optimizer",
    )
    engine.session.settle()
    twin = base.__new__(base)
    memo[id(optimizer)] = twin
    own: dict[str, Any] = base.__getstate__(optimizer)
    state = own.pop("state")
    if issubclass(base, HybridAdam):
        own["requested_nvme"] = (0.0, None)  # its state is in memory
    twin.__setstate__({**copy.deepcopy(own, memo), "state": defaultdict(dict)})
    param: Any
    for param, entry in state.items():
        if not isinstance(param, torch.Tensor):
            twin.state[param] = copy.deepcopy(entry, memo)
        elif fused:
            mine: torch.Tensor = copy.deepcopy(param, memo)
            index = engine.index_of[param]  # type: ignore[index]
            twin.state[mine] = ordinary_entry(twin, mine, engine, index, entry)
        else:
            twin.state[copy.deepcopy(param, memo)] = copy.deepcopy(entry, memo)
    return twin


def check_holds_masters(
    base: type[Optimizer], engine: Engine, *, fused: bool, what: str, instead: str
) -> None:
    """Checks that an ordinary optimizer of a class can hold the state of a boosted one.

    Args:
        base: Class that the optimizer had before boost.
        engine: Engine of its model.
        fused: Whether its state lies in chunks.
        what: Beginning of the message, which names the action: "a copy of ".
        instead: Advice at the end of the message.

    Raises:
        UsageError: The class cannot hold the float32 masters.
    """
    precision = engine.settings.precision
    if precision != "fp32" and not issubclass(base, HybridAdam):
        holder = engine.rule.holds_masters if fused and engine.rule else None
        other = f"boost castor.{holder}, which keeps them, or " if holder else ""
        raise UsageError(
            f"{what}this boosted {base.__name__} would lose the float32 masters of its {precision} "
            f"parameters, which a plain {base.__name__} cannot hold: {other}{instead}"
        )


def ordinary_entry(
    twin: Optimizer, param: torch.Tensor, engine: Engine, index: int, entry: dict[str, Any]
) -> dict[str, Any]:
    """Makes an ordinary optimizer's state of one parameter, in memory of its own.

    Args:
        twin: The ordinary optimizer.
        param: Its parameter.
        engine: Engine of the boosted model.
        index: Position of the parameter in the boosted model.
        entry: State of the parameter in the boosted optimizer.
    """
    held = entry.loaded() if isinstance(entry, StoredState) else entry
    if not isinstance(twin, HybridAdam):
        return {
            key: value.detach().to(value.device if key == "step" else param.device, copy=True)
            for key, value in held.items()
        }
    portable = to_portable(param, held)
    master = engine.session.master(index) if param.dtype != torch.float32 else None
    if master is not None:
        portable["master"] = master
    return from_portable(param, portable, twin.format_of(param))


# --- Optimizers of boosted models: the user's classes, with a step over chunks --------------------


class BoostedOptimizer(Optimizer):
    """The methods of an optimizer that was given to booster.boost, in place of its own.

    The optimizer stays the same object; its class becomes a subclass of its own class with these
    methods. Each step, save and state_dict reads `param_groups` and `state`, so that edits of them
    count as in torch. `state` has views of the states in the chunks, in the type of the state
    format (state_entry); state_dict() has them in torch's own layout.
    """

    _castor: StepDriver

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Updates the model's chunks; takes the arguments of the class's own step."""
        if self._castor.patched_step is not None:  # it ends in the class's step, which runs hooks
            with self._castor.turn_of_step(args, kwargs):
                return self._castor.step(self, args, kwargs)
        return _hooked_step(self, *args, **kwargs)

    # torch reads this before it wraps step, in load_state_dict and when unpickling. A second
    # wrapper would run step hooks twice.
    step.hooked = True  # type: ignore[attr-defined]

    @property
    def keeps_masters(self) -> bool:
        """Whether the float32 master of a 16-bit parameter is in its state, and not in a chunk."""
        return self._castor.own_step is not None

    @property
    def rounding_seed(self) -> int | None:
        """Seed of the stochastic rounding, which is saved and loaded; None: nothing is rounded."""
        narrow = self._castor.engine.session.optim_state_format in ROUNDING_FORMATS
        return self._castor.model_step.seed if narrow else None

    @rounding_seed.setter
    def rounding_seed(self, seed: int) -> None:
        self._castor.model_step.seed = seed
        if hasattr(self, "requested_state"):  # HybridAdam
            self.seed = seed

    def state_dict(self) -> dict[str, Any]:
        """Returns the state in the layout of torch's class, with float32 tensors.

        States that are float32 in chunks in memory are views, others are copies. With an NVMe tier
        all states come into memory, which save_optimizer avoids. Adam's state has "scales", with
        which split_int8 resumes bit for bit. In formats that round moments there is a
        "rounding_seed" beside "state". Masters are left out; save_optimizer writes them.
        """
        if not self._castor.fused:
            packed: dict[str, Any] = class_before(type(self)).state_dict(self)
            return packed
        self._castor.engine.session.settle()
        self._castor.take_up_edits(self)
        packed = Optimizer.state_dict(self)
        params = params_of(self)
        packed["state"] = {
            i: to_portable(params[i], entry.loaded() if isinstance(entry, StoredState) else entry)
            if isinstance(i, int) and isinstance(entry, dict)
            else entry
            for i, entry in packed["state"].items()
        }
        if self.rounding_seed is not None:
            packed["rounding_seed"] = self.rounding_seed
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state in the layout of torch's class, or of HybridAdam, into the chunks.

        Adam's moments are rounded to nearest if the format is narrower. A state of the same format
        comes back bit for bit, with its seed.

        Raises:
            UsageError: A parameter's state lacks a tensor, or has one of another shape or one that
                the rule does not keep.
            ValueError: The groups do not match, as in torch.
        """
        own_step = self._castor.own_step
        own_load = functools.partial(class_before(type(self)).load_state_dict, self)
        if not self._castor.fused and own_step is None:
            own_load(state_dict)
            return
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        mine = [param for group in self.param_groups for param in group["params"]]
        if len(saved) != len(mine):
            raise ValueError(
                f"the state dict is of an optimizer over {len(saved)} parameters; this one has "
                f"{len(mine)}"
            )
        if own_step:
            of_params = [state_dict["state"].get(i) for i in saved]
            others = {i: state_dict["state"][i] for i in state_dict["state"].keys() - set(saved)}
            own_load({**state_dict, "state": others})
            own_step.take(zip(mine, of_params, strict=True))
            return
        # torch.optim.SGD wrote a momentum_buffer of None before it left such entries out.
        states = (_without_none(state_dict["state"].get(i, {})) for i in saved)
        entries = list(zip(mine, states, strict=True))
        for param, entry in entries:
            _check_entry(self._castor.engine, param, entry)
        others = {i: state_dict["state"][i] for i in state_dict["state"].keys() - set(saved)}
        shown = self._castor.model_step.shown_states
        shown.forget(self)
        own_load({**state_dict, "state": others})
        with self._castor.engine.session.turn("optimizer.load_state_dict"):
            write_entries(self._castor.engine, entries)
        if self.rounding_seed is not None and "rounding_seed" in state_dict:
            self.rounding_seed = state_dict["rounding_seed"]
        shown.show_loaded(self, [param for param, entry in entries if entry])

    def __copy__(self) -> Optimizer:
        """Makes another optimizer over the same parameters, groups and state, as torch does."""
        twin = type(self).__new__(type(self))
        own = self.__getstate__()
        own["_castor"] = self._castor
        own["_step_supports_amp_scaling"] = False
        twin.__setstate__(own)
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Optimizer:
        """Makes an ordinary optimizer over copies of the parameters, in memory.

        copy.deepcopy((model, optimizer)) gives an ordinary model and its optimizer, as in torch.

        Raises:
            UsageError: The precision is bf16 or fp16, and the class is not HybridAdam, which alone
                can hold the masters.
        """
        driver = self._castor
        driver.take_up_states(self)
        return ordinary_copy(
            self, class_before(type(self)), driver.engine, fused=driver.fused, memo=memo
        )

    def __reduce_ex__(self, _: Any) -> Any:
        """Makes pickle and torch.save write an ordinary optimizer, as copy.deepcopy makes it.

        The optimizer that is written has the model's own parameters: what is pickled together,
        such as a model and its optimizer in one object, belongs together when it is read.

        Raises:
            UsageError: copy.deepcopy would raise it; see there.
        """
        own: dict[int, Any] = {id(param): param for param in params_of(self)}
        # The pickled expression gives the copy also where castor is not installed.
        return operator.itemgetter(0), ((self.__deepcopy__(own),),)


def _without_none(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if value is not None}


def _check_entry(engine: Engine, param: torch.Tensor, entry: dict[str, Any]) -> None:
    """Checks a state in torch's layout against the states that the rule keeps of the parameter."""
    rule = engine.rule
    if not entry or rule is None:
        return
    name = engine.names[engine.index_of[param]]  # type: ignore[index]
    for key in sorted(rule.entries):
        if key not in entry:
            raise UsageError(f"the optimizer state of parameter '{name}' has no '{key}'")
    for key, value in entry.items():
        if key in rule.states and value.shape != param.shape:
            raise UsageError(
                f"'{key}' of parameter '{name}' has shape {tuple(value.shape)} in the state dict; "
                f"the parameter has {tuple(param.shape)}"
            )
        if key not in rule.known and key not in EXACT_ONLY and key != "remainder":
            raise UsageError(
                f"the optimizer state of parameter '{name}' has '{key}', for which the model was "
                f"boosted without a place: {rule.name} keeps {', '.join(rule.states) or 'nothing'}"
            )


def class_before(boosted: type[Optimizer]) -> type[Optimizer]:
    """Returns the class that an optimizer had before it was boosted."""
    base: type[Optimizer] = boosted.__mro__[1]
    return base


@Optimizer.profile_hook_step
def _hooked_step(optimizer: BoostedOptimizer, *args: Any, **kwargs: Any) -> Any:
    """Runs the step, with torch's step hooks around it."""
    with optimizer._castor.turn_of_step(args, kwargs):
        return optimizer._castor.step(optimizer, args, kwargs)


_METHODS = {
    name: value
    for name, value in vars(BoostedOptimizer).items()
    if callable(value) or isinstance(value, property)
}


_classes: dict[type[Optimizer], type[Optimizer]] = {}


def boosted_class(base: type[Optimizer]) -> type[Optimizer]:
    """Returns the subclass of an optimizer's class that has the methods of BoostedOptimizer.

    It has one base, so that any object of the class can get it as its class, also if the class has
    an abstract base, slots or mixins.

    Raises:
        NotImplementedError: The class, or its metaclass, refuses subclasses.
    """
    if base in _classes:
        return _classes[base]
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    try:
        metaclass: Any = type(base)  # an abstract class has another
        made: type[Optimizer] = metaclass(base.__name__, (base,), {**_METHODS, **names})
    except Exception as error:
        raise NotImplementedError(
            f"{base.__name__} cannot be boosted: making a subclass of it failed "
            f"({type(error).__name__}: {error})"
        ) from error
    _classes[base] = made
    return made


def boost_optimizer(optimizer: Optimizer, driver: StepDriver) -> None:
    """Makes `optimizer` step the driver's chunks, in place: references to it stay valid."""
    engine = driver.engine
    engine.optimizers.add(optimizer)
    state: dict[Any, Any] = optimizer.state  # some classes keep further values in it
    old_state = [
        (param, dict(entry)) for param, entry in state.items() if isinstance(param, torch.Tensor)
    ]
    own_step = optimizer.__dict__.pop("step", None)
    optimizer.__class__ = boosted_class(type(optimizer))
    optimizer.__dict__["_castor"] = driver
    # torch's fused Adam has GradScaler leave the unscaling to step; this step needs unscaled
    # gradients.
    optimizer.__dict__["_step_supports_amp_scaling"] = False
    if isinstance(optimizer, HybridAdam):
        # Its own step takes float32 copies.
        own_format = engine.session.optim_state_format if driver.fused else "fp32"
        optimizer.optim_state_format = own_format
        optimizer.seed = driver.model_step.seed
    if getattr(own_step, "_wrapped_by_lr_sched", False):
        track_step(optimizer)
    if driver.fused and old_state:
        write_entries(engine, old_state)
        for param, _ in old_state:
            del optimizer.state[param]
        driver.model_step.shown_states.show_loaded(
            optimizer, [param for param, entry in old_state if entry]
        )


def track_step(optimizer: Optimizer) -> None:
    """Lets a learning-rate scheduler made before boost notice steps, as with the old step."""
    reference = weakref.ref(optimizer)
    function = type(optimizer).step

    @functools.wraps(function)
    def step(*args: Any, **kwargs: Any) -> Any:
        target = reference()
        target._opt_called = True  # type: ignore[union-attr]
        return function(target, *args, **kwargs)  # type: ignore[arg-type]

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step  # type: ignore[method-assign]
