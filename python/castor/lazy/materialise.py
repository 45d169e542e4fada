"""Gives the lazy tensors of a model their values."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import swap_tensors

from castor.errors import UsageError
from castor.lazy import replay
from castor.lazy.program import Value
from castor.lazy.tensor import LazyTensor, Recording

Place = Callable[[nn.Parameter, torch.dtype], torch.Tensor | None]
"""(parameter, dtype it was made with) -> contiguous memory for its values, or None to allocate."""
Finish = Callable[[nn.Parameter, torch.Tensor], None]
"""(parameter, its values): puts them where they belong, if they are not there yet."""


class Materialisation:
    """The lazy tensors of a model, on their way to values.

    While one exists, each lazy parameter is an ordinary one over a single zero, of the right shape,
    dtype and attributes, so that whoever lays out memory for it sees what it expects. Every tensor
    stays the same Python object throughout: optimizers and ties keep their references.
    """

    def __init__(self, model: nn.Module) -> None:
        tensors = _lazy_tensors(model)
        for recording in {tensor._recording for tensor in tensors}:
            recording.program.check_constants()  # while nothing has been changed
        # (what stands in the model, the lazy tensor it was)
        self._params = [_disguise(t) for t in tensors if isinstance(t, nn.Parameter)]
        self._others = [tensor for tensor in tensors if not isinstance(tensor, nn.Parameter)]

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters that are to get values."""
        return [param for param, _ in self._params]

    def cancel(self) -> None:
        """Makes the parameters lazy again."""
        for param, lazy in self._params:
            lazy._recording.tensors.pop(id(lazy), None)
            swap_tensors(param, lazy)
            param._recording.tensors[id(param)] = param  # type: ignore[attr-defined]

    def run(self, place: Place, finish: Finish) -> None:
        """Replays what was recorded.

        A parameter is finished as soon as it has its values. Besides the memory that `place` gives,
        only what is under way is held.

        Args:
            place: Asked once for each lazy parameter whose values fill memory of their own.
            finish: Called for each lazy parameter.
        """
        lazy_of_param = [lazy for _, lazy in self._params]
        # In the order of the model, which is the same on every rank.
        recordings = dict.fromkeys(t._recording for t in (*lazy_of_param, *self._others))
        for recording in recordings:
            self._run(recording, place, finish)

    def _run(self, recording: Recording, place: Place, finish: Finish) -> None:
        params = [(param, lazy) for param, lazy in self._params if lazy._recording is recording]
        others = [tensor for tensor in self._others if tensor._recording is recording]
        owner = _sole_owners([(p, lazy._value) for p, lazy in params if lazy._computed is None])

        def place_value(value: Value) -> torch.Tensor | None:
            param = owner.get(value.memory)
            return None if param is None else place(param, value.meta.dtype)

        def settle(tensor: LazyTensor, value: torch.Tensor) -> None:
            recording.tensors.pop(id(tensor), None)
            swap_tensors(tensor, _dressed(value.requires_grad_(tensor.requires_grad), tensor))

        users: dict[Value, list[Callable[[torch.Tensor], None]]] = {}
        for lazy, use in [
            *((lazy, partial(finish, param)) for param, lazy in params),
            *((tensor, partial(settle, tensor)) for tensor in others),
        ]:
            if lazy._computed is None:
                users.setdefault(lazy._value, []).append(use)
            else:
                use(lazy._computed)

        def done(value: Value, tensor: torch.Tensor) -> None:
            for use in users[value]:
                use(tensor)

        replay.run(recording.program, users, done, place=place_value)


def materialise(model: nn.Module) -> None:
    """Replaces every lazy tensor of `model`, in place, by an ordinary one with its values."""

    def finish(param: nn.Parameter, value: torch.Tensor) -> None:
        param.data = value

    Materialisation(model).run(lambda _param, _dtype: None, finish)


def give_each(
    tensors: Mapping[str, torch.Tensor], take: Callable[[str, torch.Tensor], None]
) -> None:
    """Gives lazy tensors' values to a function, one after the other, and keeps none.

    Args:
        tensors: By name; those that are not lazy are given as they are.
        take: Called once for each, in the order in which they are computed.
    """
    users: dict[Recording, dict[Value, list[str]]] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, LazyTensor) and tensor._computed is None:
            of_recording = users.setdefault(tensor._recording, {})
            of_recording.setdefault(tensor._value, []).append(name)
        else:
            take(name, value_of(tensor))
    for recording, named in users.items():

        def done(value: Value, values: torch.Tensor, named: Any = named) -> None:
            for name in named[value]:
                take(name, values)

        replay.run(recording.program, named, done)


def value_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with the values of a lazy one, which stays lazy.

    Raises:
        UsageError: Random numbers decide over them.
    """
    if not isinstance(tensor, LazyTensor):
        return tensor
    if tensor._computed is not None:
        return tensor._computed
    values = replay.compute(tensor._recording.program, tensor._value)
    if values is None:
        raise UsageError("the values of a lazy tensor are drawn at random; materialise the model")
    return values


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether it has no values yet."""
    return isinstance(tensor, LazyTensor)


def random_states(model: nn.Module) -> str:
    """A digest of where the random numbers of the model's lazy tensors come from."""
    digest = hashlib.sha256()
    for recording in dict.fromkeys(tensor._recording for tensor in _lazy_tensors(model)):
        for operation in recording.program.operations:
            if operation.random and operation.random.state is not None:
                digest.update(operation.random.state.numpy().tobytes())
    return digest.hexdigest()[:12]


def _lazy_tensors(model: nn.Module) -> list[LazyTensor]:
    """Parameters, buffers, and what a module's attributes hold."""
    found: dict[int, LazyTensor] = {}
    for module in model.modules():
        for value in _leaves(vars(module), depth=2):
            if isinstance(value, LazyTensor):
                found[id(value)] = value
    return list(found.values())


def _leaves(holder: Any, *, depth: int) -> Iterator[Any]:
    if depth > 0 and isinstance(holder, dict | list | tuple):
        for value in holder.values() if isinstance(holder, dict) else holder:
            yield from _leaves(value, depth=depth - 1)
    else:
        yield holder


def _disguise(lazy: LazyTensor) -> tuple[nn.Parameter, LazyTensor]:
    zero = torch.zeros((), dtype=lazy.dtype).expand(lazy.shape)
    other: Any = _dressed(nn.Parameter(zero, lazy.requires_grad), lazy)
    param: Any = lazy
    lazy._recording.tensors.pop(id(lazy), None)  # tensors with weak references cannot be swapped
    swap_tensors(param, other)
    other._recording.tensors[id(other)] = other
    return param, other


def _dressed(tensor: torch.Tensor, lazy: LazyTensor) -> torch.Tensor:
    """`tensor` with the attributes that user code set on `lazy`."""
    own = {"_recording", "_value", "_computed", "_is_param"}
    vars(tensor).update({key: value for key, value in vars(lazy).items() if key not in own})
    return tensor


def _sole_owners(params: list[tuple[nn.Parameter, Value]]) -> dict[int, nn.Parameter]:
    """Memory to parameter, where one parameter is all that lies there."""
    counts = Counter(value.memory for _, value in params)
    return {
        value.memory: param
        for param, value in params
        if counts[value.memory] == 1 and value.fills_its_memory
    }
