"""The optimizer state of a boosted model: its format, and conversions to and from float32."""

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
"""Parameters, each with its state in any format, or its entries from a file."""


@dataclass(frozen=True, kw_only=True)
class StateChoice:
    """The state format and seed that follow from plugin, optimizer and precision."""

    state_format: StateFormat
    seed: int


def choose_state_format(
    optimizers: Sequence[Optimizer], config: GeminiConfig, rule: FusedRule | None
) -> StateChoice:
    """Chooses the state format and the seed of a model that is about to be boosted.

    Args:
        optimizers: Optimizers of the model.
        config: Settings of the plugin.
        rule: Update rule of its chunks; None: there is none.

    Raises:
        ValueError: GeminiPlugin and a HybridAdam, or two of the latter, ask for different formats
            or seeds. Or the precision or the rule does not have the format.
        NotImplementedError: A format was given, and no optimizer has an update rule.
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
    """An entry of `optimizer.state` for a parameter with its state on NVMe, or of a model on a GPU.

    The entry has "step" if torch's has it, and all keys that a state in memory has. Access to a
    tensor reads a copy; edits of the copy are written back before the next read, step or save.
    Copied or pickled, the entry becomes an OrderedDict.
    """

    def __init__(self, engine: Engine, index: int) -> None:
        super().__init__(_count(engine, index))
        self._engine = engine
        self._index = index
        self._step = dict.get(self, "step")
        self._given: dict[str, _Given] = {}
        self.cleared = False
        """Whether the state starts from zero in the next step."""

    def __missing__(self, key: str) -> torch.Tensor:
        """Returns a copy of one of the rule's states; the previous copy if it is still current."""
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
        # torch.load(weights_only=True) accepts an OrderedDict, and no other class of dict.
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
        """Makes the state start from zero in the next step, as an empty entry does in torch."""
        super().clear()
        self._given.clear()
        self.cleared = True

    def keys(self) -> KeysView[str]:  # type: ignore[override]
        """Returns the keys in memory and of stored states."""
        return KeysView(self)

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        """Reads the moments one by one."""
        return ValuesView(self)

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        """Reads the moments one by one."""
        return ItemsView(self)

    def held(self) -> dict[str, Any]:
        """Returns the values in memory: "step", and values that user code has put there."""
        return dict(super().items())

    def loaded(self) -> dict[str, Any]:
        """Returns the state as an ordinary dict in memory, with edits of copies."""
        self.take_up()
        if self.cleared:
            return self.held()
        session = self._engine.session
        states = session.read_states(self._index)
        stored = dict(zip(self._names(), states, strict=True))
        return {**self.held(), **stored, **self.held()}

    @torch.no_grad()
    def take_up(self) -> bool:
        """Writes back edits of copies, and values that user code has put into the entry.

        Returns:
            Whether there were any.

        Raises:
            UsageError: User code has edited a copy that a step has outdated, or has put a tensor of
                another shape into the entry.
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
        """Writes edits back, and forgets copies that user code no longer holds."""
        self.take_up()
        self._given = {key: given for key, given in self._given.items() if given.in_use()}
        if not self._given:
            self._not_given()

    def part_from_chunk(self) -> None:
        """Detaches the entry from its chunk, after user code took it out of `optimizer.state`.

        If user code still holds the entry, it keeps its present values.
        """
        self._not_given()
        held_by_castor = 3  # the caller's attribute, `self`, getrefcount's argument
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
        """Returns the number of steps of the model in this process, and of the parameter."""
        return self._engine.updates, float(self._engine.session.steps[self._index])

    def _current(self, given: _Given) -> bool:
        """Whether no step has updated the state since; user code may have set its "step" too."""
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
        """Whether user code holds the tensor, or a view of it."""
        return _C.storage_uses(self.values) > 1


def state_entry(engine: Engine, index: int) -> dict[str, Any]:
    """Makes the entry of `optimizer.state` for a parameter: views of its payloads.

    The views have the parameter's shape and are float32. For a bfloat16 parameter Adam's exp_avg
    and exp_avg_sq are bfloat16 in "split_bf16" and uint8 codes in "split_int8", which has "scales"
    too, float32 of shape (blocks, 2). A standalone HybridAdam has the same types. States on NVMe
    have no views, nor do states that move between a GPU's memory and the host; see StoredState.
    """
    session = engine.session
    if not session.shown(index):
        return StoredState(engine, index)
    states = dict(zip(session.state_names(index), session.states(index), strict=True))
    return _count(engine, index) | states


def _count(engine: Engine, index: int) -> dict[str, Any]:
    """Returns the "step" entry of a parameter's state; empty if torch's state has none."""
    counts = engine.rule is not None and engine.rule.counts_steps
    return {"step": engine.session.steps[index]} if counts else {}


@torch.no_grad()
def write_entries(engine: Engine, entries: Entries) -> None:
    """Copies states into the chunks; parameters without a state start from zero.

    States are rounded to nearest if the format is narrower. States of the same format come back bit
    for bit.

    Raises:
        ValueError: exp_avg_sq has a negative element, in a format that rounds.
    """
    assert engine.rule is not None
    engine.session.await_updates()  # writes below may bypass torch's operators, which wait
    for param, entry in entries:
        index = engine.trained_index(param)
        if index is None:
            continue
        portable = to_portable(param, entry)
        engine.session.steps[index] = engine.rule.steps_of(portable)
        if "master" in portable:
            engine.session.set_master(index, portable["master"])
        _write_all(engine, index, param, portable)


def reset_states(engine: Engine, index: int, param: torch.Tensor) -> None:
    """Resets the states of a parameter to those before its first step."""
    engine.session.await_updates()
    engine.session.steps[index] = 0
    _write_all(engine, index, param, {})


def write_states(engine: Engine, index: int, param: torch.Tensor, values: dict[str, Any]) -> None:
    """Writes new values of some states of a parameter; states that `values` lacks stay.

    Args:
        engine: Engine of the model.
        index: Position of the parameter in the model.
        param: The parameter.
        values: Tensors by the rule's names, in the type of the format or in float32, and "step", a
            number or a tensor of one element.

    Raises:
        UsageError: "step" is negative or no whole number.
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
    """Writes the values of `portable` to the states; states that it lacks become zeros."""
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
