"""Checks before a collective save or load: all ranks take part, and all save or load the same."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from castor.errors import CheckpointError
from castor.runtime.boosted_model import BoostedModel
from castor.runtime.engine import Engine
from castor.runtime.rank_group import RankGroup, check_equal, sendable

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
