"""The optimizer state of a boosted model: its format, and its way to and from float32."""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import ItemsView, Iterator, KeysView, Sequence, ValuesView
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from castor import _C
from castor.config import GeminiConfig, Precision, StateFormat, check_format_of_precision
from castor.errors import UsageError
from castor.optim.state_formats import ROUNDING_FORMATS, fill_rounded, to_portable
from castor.runtime.engine import Engine
from castor.runtime.rules import FusedRule

_DEFAULT_FORMATS: dict[Precision, StateFormat] = {"fp32": "fp32", "bf16": "split", "fp16": "fp32"}

Entries = list[tuple[torch.Tensor, dict[str, Any]]]
"""Parameters, each with its state in any format, or what a file holds of it."""


@dataclass(frozen=True, kw_only=True)
class StateChoice:
    """The state format and seed that follow from plugin, optimizer and precision."""

    state_format: StateFormat
    seed: int


def choose_state_format(
    optimizers: Sequence[Optimizer], config: GeminiConfig, rule: FusedRule | None
) -> StateChoice:
    """The state format and the seed of a model that is about to be boosted.

    Args:
        optimizers: That will step it.
        config: The plugin's.
        rule: Which runs on its chunks; None: there is none.

    Raises:
        ValueError: GeminiPlugin and a HybridAdam, or two of them, ask for different ones, or the
            precision or the rule does not have the format.
        NotImplementedError: A format was given, and no optimizer has a rule.
    """
    chosen, seed = config.optim_state_format, config.seed
    asked_by = {"optim_state_format": "GeminiPlugin", "seed": "GeminiPlugin"}
    for optimizer in optimizers:
        own_format, own_seed = getattr(optimizer, "requested_state", (None, None))
        for name, mine, other in (
            ("optim_state_format", chosen, own_format),
            ("seed", seed, own_seed),
        ):
            if mine is None and other is not None:
                asked_by[name] = type(optimizer).__name__
            elif other is not None and mine != other:
                raise ValueError(
                    f"{asked_by[name]}({name}={mine!r}) and "
                    f"{type(optimizer).__name__}({name}={other!r}) contradict each other; give one"
                )
        chosen = chosen or own_format
        seed = own_seed if seed is None else seed
    if rule is None and optimizers and chosen not in (None, "fp32"):
        names = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
        raise NotImplementedError(
            f"optim_state_format={chosen!r} is how fused optimizers keep their states, and {names} "
            "steps itself, with float32 masters: leave it out"
        )
    chosen = chosen or _DEFAULT_FORMATS[config.precision]
    what = f"{asked_by['optim_state_format']}(optim_state_format={chosen!r})"
    check_format_of_precision(what, chosen, config.precision)
    if rule is not None and chosen not in rule.formats:
        raise ValueError(
            f"{what} rounds what Adam keeps, and {' and '.join(rule.classes)} keeps "
            f"{', '.join(rule.states) or 'nothing'} in float32: choose one of "
            f"{', '.join(map(repr, rule.formats))}"
        )
    return StateChoice(state_format=chosen, seed=seed or 0)


class StoredState(dict[str, Any]):
    """Entry of `optimizer.state` of a parameter whose state lies on NVMe, or of a model on a GPU.

    Holds "step" where torch's has it, and shows the keys that the state has in memory. A tensor is
    read when it is asked for: a copy, of which an edit goes back before the next read, step or
    save. Copied or pickled the entry becomes an OrderedDict.
    """

    def __init__(self, engine: Engine, index: int) -> None:
        super().__init__(_count(engine, index))
        self._engine = engine
        self._index = index
        self._step = dict.get(self, "step")
        self._given: dict[str, _Given] = {}
        self.cleared = False
        """Whether the state starts anew in the next step."""

    def __missing__(self, key: str) -> torch.Tensor:
        """A copy of one of the rule's states; the one that was given before, if it is current."""
        if key not in self._stored_names():
            raise KeyError(key)
        given = self._given.get(key)
        if given is not None and (tensor := given.tensor()) is not None and self._current(given):
            return tensor
        for entry in list(self._engine.states_given):
            entry.settle_given()
        self.take_up()
        tensors = self._engine.session.read_states(self._index)
        moments: torch.Tensor = tensors[self._stored_names().index(key)]
        self._given[key] = _Given(moments, self._taken())
        if not any(entry is self for entry in self._engine.states_given):
            self._engine.states_given.append(self)
        return moments

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or key in self._stored_names()

    def __iter__(self) -> Iterator[str]:
        yield from super().__iter__()
        for key in self._stored_names():
            if not super().__contains__(key):
                yield key

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return len(self) > 0

    def __delitem__(self, key: str) -> None:
        if not super().__contains__(key) and key in self._stored_names():
            raise UsageError(
                f"'{key}' cannot be taken out of the optimizer state of parameter "
                f"'{self._engine.names[self._index]}' alone: clear() its entry, or zero_() the "
                "tensor"
            )
        super().__delitem__(key)

    def __reduce_ex__(self, _: object) -> tuple[Any, ...]:
        # An OrderedDict: torch.load(weights_only=True) builds these and no other class's.
        return OrderedDict, (), None, None, iter(self.loaded().items())

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a value as dict does; a moment is read from its storage."""
        try:
            return self[key]
        except KeyError:
            return default

    def pop(self, key: str, *default: Any) -> Any:
        """Removes a value as dict does; UsageError for a moment, see __delitem__."""
        if key not in self:
            return super().pop(key, *default)
        value = self[key]
        del self[key]
        return value

    def popitem(self) -> tuple[str, Any]:
        """Removes a value as dict does; UsageError for a moment, see __delitem__."""
        key = list(self)[-1]
        return key, self.pop(key)

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Returns a value as dict does; a moment is read from its storage."""
        if key not in self:
            self[key] = default
        return self[key]

    def clear(self) -> None:
        """Starts the state anew in the next step, as torch's optimizers do with an empty entry."""
        super().clear()
        self._given.clear()
        self.cleared = True

    def keys(self) -> KeysView[str]:  # type: ignore[override]
        """Keys of what is held and what is stored."""
        return KeysView(self)

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        """Reads the moments one by one."""
        return ValuesView(self)

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        """Reads the moments one by one."""
        return ItemsView(self)

    def held(self) -> dict[str, Any]:
        """The entries in memory: "step", and what somebody has put there."""
        return dict(super().items())

    def loaded(self) -> dict[str, Any]:
        """A state as a dict of its own, in memory, with the edits of copies that were given."""
        self.take_up()
        if self.cleared:
            return self.held()
        session = self._engine.session
        states = session.read_states(self._index)
        stored = dict(zip(self._names(), states, strict=True))
        return {**self.held(), **stored, **self.held()}

    @torch.no_grad()
    def take_up(self) -> bool:
        """Writes edits back: of copies that were given, and of what was put into the entry.

        Returns:
            Whether there were any.

        Raises:
            UsageError: A copy was edited that a step has outdated, or a tensor of another shape was
                put into the entry.
        """
        held = self.held()
        edited = {key: held[key] for key in self._names() if key in held}
        if self.cleared and not edited and "step" not in held:
            reset_states(self._engine, self._index, self._engine.params[self._index])
            return True
        for key, given in self._given.items():
            if given.edited():
                if not self._current(given):
                    raise UsageError(
                        f"optimizer.state['{key}'] of parameter "
                        f"'{self._engine.names[self._index]}' was read before a step and edited "
                        "after it: where states lie on NVMe or on a GPU it is a copy of that time; "
                        "read it again before the edit"
                    )
                edited.setdefault(key, given.values)
                given.taken()
        step = held.get("step")
        if step is not None and step is not self._step:
            edited["step"] = step
        if not edited:
            return False
        write_states(self._engine, self._index, self._engine.params[self._index], edited)
        self.cleared = False
        for key in edited:
            if key != "step":
                super().pop(key, None)
        if self._step is not None:
            super().__setitem__("step", self._step)
        return True

    def settle_given(self) -> None:
        """Writes edits back, and forgets the copies that user code has no more."""
        self.take_up()
        self._given = {key: given for key, given in self._given.items() if given.in_use()}
        if not self._given:
            self._not_given()

    def part_from_chunk(self) -> None:
        """Ends the entry's tie to the chunk: user code has taken it out of `optimizer.state`.

        Where user code still holds it, the entry keeps the values that it has now.
        """
        self._not_given()
        held_by_castor = 3  # attribute of who calls, `self`, getrefcount's argument
        if sys.getrefcount(self) > held_by_castor and not self.cleared:
            values = self.loaded()
            if self._step is not None:
                values["step"] = self._step.clone()
            super().update(values)
        self._given.clear()
        self._step = None
        self.cleared = True

    def _not_given(self) -> None:
        given_of = self._engine.states_given
        given_of[:] = [entry for entry in given_of if entry is not self]

    def _stored_names(self) -> list[str]:
        return [] if self.cleared else self._names()

    def _names(self) -> list[str]:
        return self._engine.session.state_names(self._index)

    def _taken(self) -> tuple[int, float]:
        """Steps of the model in this process, and of the parameter."""
        return self._engine.updates, float(self._engine.session.steps[self._index])

    def _current(self, given: _Given) -> bool:
        """Whether no step has updated the state since: user code may set its "step" as well."""
        return any(one == now for one, now in zip(given.taken_at, self._taken(), strict=True))


class _Given:
    """A copy of a state that user code was given, which it may edit in place."""

    def __init__(self, tensor: torch.Tensor, taken_at: tuple[int, float]) -> None:
        self.values = tensor.detach()  # shares memory and the version counter
        self.taken_at = taken_at
        self.tensor = weakref.ref(tensor)
        self._version = tensor._version

    def edited(self) -> bool:
        return self.values._version != self._version

    def taken(self) -> None:
        self._version = self.values._version

    def in_use(self) -> bool:
        """Whether somebody else has the tensor, or a view of it."""
        return _C.storage_uses(self.values) > 1


def state_entry(engine: Engine, index: int) -> dict[str, Any]:
    """Makes the entry of `optimizer.state` for a parameter: views of its payloads.

    They have the parameter's shape and are float32; Adam's exp_avg and exp_avg_sq of a bfloat16
    parameter are bfloat16 in "split_bf16" and uint8 codes in "split_int8", which has "scales" too,
    float32 of shape (blocks, 2). These are the types that a standalone HybridAdam
    has. What lies on NVMe has no views, nor what may be now in a GPU's memory and now on the host:
    see StoredState.
    """
    session = engine.session
    if not session.shown(index):
        return StoredState(engine, index)
    states = dict(zip(session.state_names(index), session.states(index), strict=True))
    return _count(engine, index) | states


def _count(engine: Engine, index: int) -> dict[str, Any]:
    """The steps of a parameter's state, where torch's has them."""
    counts = engine.rule is not None and engine.rule.counts_steps
    return {"step": engine.session.steps[index]} if counts else {}


@torch.no_grad()
def write_entries(engine: Engine, entries: Entries) -> None:
    """Copies states into the chunks; parameters without one start from zero.

    They are rounded to nearest where the format is narrower; what the same format gave comes back
    bit for bit.

    Raises:
        ValueError: exp_avg_sq has a negative element, in a format that rounds.
    """
    assert engine.rule is not None
    engine.session.await_updates()  # not all that writes is an operator of torch, which would wait
    for param, entry in entries:
        if param not in engine.index_of or not param.requires_grad:
            continue
        index = engine.index_of[param]  # type: ignore[index]
        portable = to_portable(param, entry)
        engine.session.steps[index] = engine.rule.steps_of(portable)
        if "master" in portable:
            engine.session.set_master(index, portable["master"])
        _write_all(engine, index, param, portable)


def reset_states(engine: Engine, index: int, param: torch.Tensor) -> None:
    """Makes the states of a parameter those of one that has taken no step."""
    engine.session.await_updates()
    engine.session.steps[index] = 0
    _write_all(engine, index, param, {})


def write_states(engine: Engine, index: int, param: torch.Tensor, values: dict[str, Any]) -> None:
    """Gives some states of a parameter other values; those that `values` lacks stay.

    Args:
        engine: Of the model.
        index: The parameter's there.
        param: The parameter.
        values: Tensors by the rule's names, in the type that the format keeps or in float32, and
            "step", a number or a tensor of one.
    """
    assert engine.rule is not None
    step = float(values.get("step", 0.0))
    if step < 0 or not step.is_integer():
        raise UsageError(
            f"optimizer.state['step'] of parameter '{engine.names[index]}' is {step}: it counts "
            "the steps that the parameter has taken"
        )
    session = engine.session
    session.await_updates()
    shown = session.shown(index)
    tensors = session.states(index) if shown else session.read_states(index)
    states = dict(zip(session.state_names(index), tensors, strict=True))
    given = {key: value for key, value in values.items() if key in states}
    if any(states[key].dtype == torch.uint8 and value.dtype != torch.uint8
           for key, value in given.items()):  # fmt: skip
        portable = {key: value for key, value in to_portable(param, states).items()
                    if key != "scales"}  # fmt: skip
        fill_rounded(param, states, portable | given, session.state_format(index))
    else:
        for key, value in given.items():
            states[key].copy_(value)
    if not shown:
        session.write_states(index, tensors)
    if "step" in values:
        session.steps[index] = float(values["step"])
    elif not engine.rule.counts_steps:
        session.steps[index] = max(1.0, float(session.steps[index]))


def _write_all(engine: Engine, index: int, param: torch.Tensor, portable: dict[str, Any]) -> None:
    """Gives states the values of `portable`; those that it lacks become zeros."""
    session = engine.session
    shown = session.shown(index)
    tensors = session.states(index) if shown else session.read_states(index)
    states = dict(zip(session.state_names(index), tensors, strict=True))
    if (state_format := session.state_format(index)) in ROUNDING_FORMATS:
        fill_rounded(param, states, portable, state_format)
    else:
        for name, state in states.items():
            if portable.get(name) is None:
                state.zero_()
            else:
                state.copy_(portable[name])
    if not shown:
        session.write_states(index, tensors)
