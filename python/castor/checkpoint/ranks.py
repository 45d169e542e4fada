"""Ranks that save or load together: checks before they do, and shards for the one that writes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from castor.checkpoint.container import SavedTensor, values_of
from castor.checkpoint.model import state_of
from castor.checkpoint.optimizer import names_of, tensors_and_numbers
from castor.errors import CheckpointError
from castor.runtime.boosted_model import BoostedModel, compiled_from
from castor.runtime.engine import Engine
from castor.runtime.rank_group import RankGroup, check_equal, sendable
from castor.runtime.shards import is_dtensor

# --- Checks before a collective save or load: all ranks take part in the same one ----------------

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class ReadyLoad(Generic[Result]):
    """A load whose checks have passed, and which has changed nothing yet."""

    facts: Mapping[str, Any]
    """Values that must be equal on every rank, by their names in messages."""
    apply: Callable[[], Result]
    """Function that makes all changes and returns the load's result."""


def check_equal_saves(
    shared: BoostedModel, savers: RankGroup | None, facts: Mapping[str, Any]
) -> None:
    """Checks that every rank saves, and was asked for the same files. Collective.

    Args:
        shared: The model that the ranks share.
        savers: Ranks that write together; None: rank 0 writes for all.
        facts: Arguments of the save, by their names in messages.

    Raises:
        UsageError: Two ranks were asked for different files, or a rank does something else. Every
            rank raises it.
    """
    if isinstance(shared, Engine):
        shared.barrier()
    check_equal(shared.gather(facts) if savers is None else savers.all_gather_object(facts))


def ready_on_all(
    shared: BoostedModel | None, prepare: Callable[[], ReadyLoad[Result]]
) -> ReadyLoad[Result]:
    """Runs a load's checks, and returns it when they have passed on every rank. Collective.

    Args:
        shared: The model, where several ranks share it; None: this process is alone.
        prepare: Function that makes the checks and changes nothing.

    Raises:
        CheckpointError: The checks failed on another rank.
        UsageError: Ranks load different things, or a rank does something else. Every rank raises
            it.
        Exception: `prepare` raised it on this rank.
    """
    if shared is None:
        return prepare()
    ready, raised = None, None
    try:
        ready = prepare()
    except Exception as error:
        raised = error
    told = None if raised is None else sendable(raised)
    everyone = shared.gather_to_load((ready and ready.facts, told))
    if ready is None:
        assert raised is not None
        raise raised
    for rank, (_, failed) in enumerate(everyone):
        if failed is not None:
            raise CheckpointError(
                f"rank {rank} cannot load this checkpoint, and no rank has changed anything: "
                f"{type(failed).__name__}: {failed}"
            )
    check_equal([facts for facts, _ in everyone])
    return ready


def contents_of(directory: Path, manifest: str) -> str:
    """Returns a text that identifies a checkpoint by its contents, and is the same on each rank."""
    digest = hashlib.sha256()
    if (directory / manifest).exists():
        digest.update((directory / manifest).read_bytes())
    else:  # castor did not write it: names and sizes stand for the contents
        for path in sorted(directory.glob("*.safetensors")):
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
    return f"{directory.name} of contents {digest.hexdigest()[:12]}"


# --- Serves a rank's shards to the rank that writes the full tensors ------------------------------


class LocalShards:
    """Lookup of this rank's shards by the keys of full_dtensors.

    Implements castor.runtime.model_shards.ShardFinder.
    """

    def __init__(self, model: nn.Module | None, optimizers: Sequence[Optimizer]) -> None:
        """Stores the arguments; tensors are collected at the first lookup.

        Args:
            model: The model that is saved; None: only optimizers are.
            optimizers: The optimizers that are saved.
        """
        self._model = model
        self._optimizers = optimizers

    def find(self, key: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (parameter, this process's shard of the parameter or of a state of it).

        Args:
            key: "model:<state_dict key>" or "optimizer:<parameter>.<entry>".
        """
        kind, _, name = key.partition(":")
        param, tensor = self._of(kind)[name]
        if is_dtensor(tensor):  # the ranks gather it where it is
            return param, tensor
        return param, values_of(tensor)

    def _of(self, kind: str) -> Mapping[str, tuple[torch.Tensor, SavedTensor]]:
        return self._of_model if kind == "model" else self._of_optimizers

    @cached_property
    def _of_model(self) -> dict[str, tuple[torch.Tensor, SavedTensor]]:
        assert self._model is not None
        return {key: (param, param) for key, param in state_of(compiled_from(self._model)).items()}

    @cached_property
    def _of_optimizers(self) -> dict[str, tuple[torch.Tensor, SavedTensor]]:
        found: dict[str, tuple[torch.Tensor, SavedTensor]] = {}
        for optimizer in self._optimizers:
            params = {name: param for param, name in names_of(optimizer, self._model).items()}
            tensors, _ = tensors_and_numbers(optimizer, self._model)
            for key, tensor in tensors.items():
                found[key] = params[key.rpartition(".")[0]], tensor
        return found
