"""The record of a boosted model, whether castor's chunks or torch's own classes train it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Protocol

import torch
from torch import nn

from castor.errors import UsageError
from castor.runtime.model_shards import ShardFinder
from castor.runtime.rank_group import RankGroup, Result
from castor.runtime.report import MemoryReport, TorchReport

_WRAPPED = "_orig_mod"
"""Attribute of torch.compile's wrapper that holds the module."""


class BoostedModel(Protocol):
    """The interface of a boosted model to Booster and checkpoints.

    Engine implements it for models in chunks, TorchModel for models that torch's own classes train.
    """

    params: list[nn.Parameter]
    """Distinct parameters; tied parameters appear once."""
    skipped_steps: int
    """Steps whose update was left out because a gradient was not finite."""

    @property
    def ranks(self) -> RankGroup | None:
        """The ranks that share the model; None: this process is alone."""
        ...

    @property
    def shared(self) -> bool:
        """Whether other ranks train the model too, or have shards of it."""
        ...

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the run, skipped ones and those before a resume included."""
        ...

    @num_steps.setter
    def num_steps(self, steps: int) -> None: ...

    def unsynchronised(self) -> AbstractContextManager[None]:
        """Makes a context in which backward passes leave each rank its own gradients."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """Returns the picklable values of all ranks, in rank order. Collective."""
        ...

    def gather_to_load(self, value: Any) -> list[Any]:
        """Gathers as gather does, before a load of every rank."""
        ...

    def on_first(self, work: Callable[[], Result], shard_finder: ShardFinder) -> Result:
        """Runs `work` on rank 0 for all; the others send shards that it reads. Collective.

        Args:
            work: Called once, on rank 0.
            shard_finder: Finds this rank's shard of a tensor.

        Returns:
            What `work` returned, on every rank.

        Raises:
            Exception: What `work` raised on rank 0.
        """
        ...

    def report(self) -> MemoryReport | TorchReport:
        """Returns the figures so far."""
        ...


class BoostedStep(Protocol):
    """The step of a boosted optimizer."""

    @property
    def loss_scale(self) -> float:
        """Factor of the loss of the next backward."""
        ...

    def backward(self, loss: torch.Tensor) -> None:
        """Differentiates a loss, scaled where the precision asks for it."""
        ...


_models: weakref.WeakKeyDictionary[nn.Module, BoostedModel] = weakref.WeakKeyDictionary()
_listeners: list[Callable[[BoostedModel], None]] = []


def remember(model: nn.Module, boosted: BoostedModel) -> None:
    """Registers a model as boosted."""
    _models[model] = boosted
    for listener in _listeners:
        listener(boosted)


def listen(listener: Callable[[BoostedModel], None]) -> None:
    """Has `listener` called with the record of every model boosted from now on."""
    _listeners.append(listener)


def forget(model: nn.Module) -> None:
    """Removes the record of a model that is no longer boosted."""
    del _models[model]


def all_boosted() -> Sequence[BoostedModel]:
    """Returns the records of all boosted models that are alive."""
    return list(_models.values())


def boosted_model_of(model: nn.Module) -> BoostedModel:
    """Returns the record of a boosted model.

    Raises:
        UsageError: The model is not boosted.
    """
    boosted = _models.get(model) or _models.get(compiled_from(model))
    if boosted is None:
        raise UsageError(f"this {type(model).__name__} is not boosted; call booster.boost first")
    return boosted


def model_with(boosted: BoostedModel) -> nn.Module:
    """Returns the model that a record belongs to."""
    return next(model for model, known in list(_models.items()) if known is boosted)


def boosted_models_holding(model: nn.Module) -> list[BoostedModel]:
    """Returns the records of boosted models that hold parameters of `model`."""
    own, params = compiled_from(model), cache(lambda: set(model.parameters()))
    return [
        boosted
        for known, boosted in list(_models.items())
        if known is own or not params().isdisjoint(boosted.params)
    ]


def compiled_from(model: nn.Module) -> nn.Module:
    """Returns the model that torch.compile has wrapped; any other model as it is."""
    inner: nn.Module = getattr(model, _WRAPPED, model)
    return inner


def name_before_compile(name: str) -> str:
    """Returns the name of a module, parameter or buffer without torch.compile's additions."""
    return ".".join(part for part in name.split(".") if part != _WRAPPED)


def check_not_boosted(model: nn.Module) -> None:
    """Raises UsageError if `model`, or a part of it with parameters, belongs to a boosted model.

    A part without parameters may belong to several models: an activation function of OpenAI GPT is
    one object for all models of the process.
    """
    params, own = set(model.parameters()), {model, *modules_with_parameters(model)}
    for boosted, known in list(_models.items()):
        parts = {boosted, *modules_with_parameters(boosted)}
        if not (parts.isdisjoint(own) and params.isdisjoint(known.params)):
            raise UsageError(
                f"this {type(model).__name__} is boosted already, or shares modules or parameters "
                f"with a boosted {type(boosted).__name__}; boost each model once and use what "
                "boost returned"
            )


def modules_with_parameters(model: nn.Module) -> Iterator[nn.Module]:
    """Returns the modules of a model that have parameters, in themselves or in modules within."""
    return (part for part in model.modules() if next(part.parameters(), None) is not None)


def modules_of_other_models(model: nn.Module) -> set[nn.Module]:
    """Returns the modules of all boosted models except `model`."""
    others = [other for other in list(_models) if other is not model]
    return {part for other in others for part in other.modules()}


def check_fit_for_chunks(model: nn.Module) -> None:
    """Raises UsageError if the model is boosted or has TorchScript modules.

    The parameters of TorchScript modules are outside of Python. See check_not_boosted.
    """
    check_not_boosted(model)
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UsageError(
                f"'{name}' is a scripted or traced module, whose parameters castor cannot move "
                "into chunks: boost the module that it was made of, and call torch.compile on its "
                "blocks before that if they are to be compiled"
                if name
                else "this model is a scripted or traced module, whose parameters castor cannot "
                "move into chunks: boost the one that it was made of"
            )
