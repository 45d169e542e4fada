"""Checks, before ranks save or load together, that all do, and the same."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from castor.errors import CheckpointError
from castor.runtime.boosted_model import BoostedModel
from castor.runtime.engine import Engine
from castor.runtime.ranks import Peers, check_alike, sendable

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class ReadyLoad(Generic[Result]):
    """A load whose checks have passed; nothing has been changed."""

    facts: Mapping[str, Any]
    """The facts that every rank loads, by their names in messages."""
    apply: Callable[[], Result]
    """Makes all changes."""


def check_saved_alike(shared: BoostedModel, savers: Peers | None, facts: Mapping[str, Any]) -> None:
    """Every rank saves, and was asked for the same files. Collective.

    Args:
        shared: The model.
        savers: Those that write together; None: rank 0 writes for all.
        facts: What a save was given, by its name in a message.

    Raises:
        UsageError: Two ranks were asked for other files, or one does something else; every rank
            raises it.
    """
    if isinstance(shared, Engine):
        shared.meet()
    check_alike((shared if savers is None else savers).gather(facts))


def ready_on_all(
    shared: BoostedModel | None, prepare: Callable[[], ReadyLoad[Result]]
) -> ReadyLoad[Result]:
    """A load that has passed its checks on every rank. Collective.

    Args:
        shared: The model, where several ranks have it.
        prepare: Checks, and changes nothing.

    Raises:
        CheckpointError: It has failed on another rank.
        UsageError: Ranks load different things, or one does something else; every rank raises it.
        Exception: What `prepare` raised here.
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
    check_alike([facts for facts, _ in everyone])
    return ready


def contents_of(directory: Path, manifest: str) -> str:
    """Returns a text that tells a checkpoint from every other one, on each rank."""
    digest = hashlib.sha256()
    if (directory / manifest).exists():
        digest.update((directory / manifest).read_bytes())
    else:  # not castor's: names and sizes
        for path in sorted(directory.glob("*.safetensors")):
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
    return f"{directory.name} of contents {digest.hexdigest()[:12]}"
