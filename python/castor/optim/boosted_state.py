"""The optimizer state of a boosted model: its format, and its way to and from float32."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import ItemsView, Iterator, KeysView, Sequence, ValuesView
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from castor.config import GeminiConfig, Precision, StateFormat, check_format_of_precision
from castor.optim.state_formats import ROUNDING_FORMATS, fill_rounded, to_portable
from castor.runtime.engine import Engine
from castor.runtime.rules import FusedRule

_DEFAULT_FORMATS: dict[Precision, StateFormat] = {"fp32": "fp32", "bf16": "split", "fp16": "fp32"}

Entries = list[tuple[torch.Tensor, dict[str, Any]]]
"""Parameters, each with its state in any format, or what a file holds of it."""


@dataclass(frozen=True, kw_only=True)
class StateChoice:
    """What plugin, optimizer and precision come to."""

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
    """optimizer.state of a parameter whose state lies on NVMe, or of a model on a GPU.

    Holds "step" where torch's has it, and shows the keys that the state has in memory. Tensors are
    read when they are asked for: copies, of which nothing goes back. Copied or pickled it becomes
    an OrderedDict.
    """

    def __init__(self, engine: Engine, index: int) -> None:
        super().__init__(_count(engine, index))
        self._engine = engine
        self._index = index

    def __missing__(self, key: str) -> torch.Tensor:
        """A copy of one of the rule's states."""
        if key not in self._names():
            raise KeyError(key)
        moments: torch.Tensor = self.loaded()[key]
        return moments

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or key in self._names()

    def __iter__(self) -> Iterator[str]:
        yield from super().__iter__()
        for key in self._names():
            if not super().__contains__(key):
                yield key

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __reduce_ex__(self, _: object) -> tuple[Any, ...]:
        # An OrderedDict: torch.load(weights_only=True) builds these and no other class's.
        return OrderedDict, (), None, None, iter(self.loaded().items())

    def get(self, key: str, default: Any = None) -> Any:
        """As a dict's; a moment is read."""
        try:
            return self[key]
        except KeyError:
            return default

    def keys(self) -> KeysView[str]:  # type: ignore[override]
        """Of what is held and what is stored."""
        return KeysView(self)

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        """Reads the moments one by one."""
        return ValuesView(self)

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        """Reads the moments one by one."""
        return ItemsView(self)

    def held(self) -> dict[str, Any]:
        """What is in memory: "step", and what somebody has put there."""
        return dict(super().items())

    def loaded(self) -> dict[str, Any]:
        """A state as a dict of its own, in memory."""
        session = self._engine.session
        states = session.read_states(self._index)
        stored = dict(zip(self._names(), states, strict=True))
        return {**self.held(), **stored, **self.held()}

    def _names(self) -> list[str]:
        return self._engine.session.state_names(self._index)


def state_entry(engine: Engine, index: int) -> dict[str, Any]:
    """optimizer.state of a parameter: views of its payloads, in the type its format has.

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
        _write_states(engine, index, param, portable)


def _write_states(
    engine: Engine, index: int, param: torch.Tensor, portable: dict[str, Any]
) -> None:
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
