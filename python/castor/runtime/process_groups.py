"""castor's own process groups, which end with the models that use them."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta

from torch import distributed
from torch.distributed.distributed_c10d import _world

from castor.runtime.heartbeats import begin_heartbeats
from castor.runtime.waits import waiting, watch

ProcessGroups = list[distributed.ProcessGroup]
_lasting: dict[str, distributed.ProcessGroup] = {}
"""Lasting groups of all ranks, by their backends."""
_made: ContextVar[ProcessGroups | None] = ContextVar("_made", default=None)


@contextmanager
def groups_made() -> Iterator[ProcessGroups]:
    """Makes a context that collects the process groups made in it; ends them if it raises."""
    groups: ProcessGroups = []
    token = _made.set(groups)
    try:
        yield groups
    except BaseException:
        end_groups(groups)
        raise
    finally:
        _made.reset(token)


def end_groups_with(owner: object, groups: ProcessGroups) -> None:
    """Has `groups` end when nothing holds `owner` any more.

    A group has three threads, one of which wakes a hundred times a second. If a process boosts one
    model after the other, the groups of earlier models would take whole cores in the end.
    """
    process = os.getpid()

    def end() -> None:
        # A forked process does not have the threads of the groups.
        if os.getpid() == process:
            end_groups(groups)

    if groups:
        weakref.finalize(owner, end).atexit = False  # at exit leave() ends all groups


def end_groups(groups: ProcessGroups) -> None:
    """Ends groups, except those that the user's destroy_process_group() has ended."""
    while groups:
        group = groups.pop()
        if group in _world.pg_map:
            distributed.destroy_process_group(group)


def own_groups(parts: Sequence[Sequence[int]], count: int) -> list[str]:
    """Makes `count` process groups of this process's subset of all ranks; returns their names.

    They are castor's own, so that messages of the user between ranks do not interfere. Collective:
    every rank calls it, with the same `parts`. See groups_made for the end of the groups.
    """
    return [own_group(parts).group_name for _ in range(count)]


def own_group(parts: Sequence[Sequence[int]]) -> distributed.ProcessGroup:
    """Makes a process group of this process's subset of all ranks; see own_groups."""
    mine = make_group(parts)
    made = _made.get()
    if made is not None:
        made.append(mine)
    return mine


def make_group(
    parts: Sequence[Sequence[int]], *, backend: str = "gloo"
) -> distributed.ProcessGroup:
    """Makes a process group of this process's subset of all ranks, which the caller ends.

    Collective: every rank calls it, with the same `parts`.
    """
    watch()
    begin_heartbeats()
    rank, size = distributed.get_rank(), distributed.get_world_size()
    with waiting(rank, size, place="makes process groups", awaited="another rank"):
        groups = [
            distributed.new_group(list(part), backend=backend, timeout=timeout_of_all())
            for part in parts
        ]
    return next(group for group in groups if isinstance(group, distributed.ProcessGroup))


def lasting_group(backend: str = "gloo") -> distributed.ProcessGroup:
    """Returns a process group of all ranks that does not end with a model; one for each backend.

    DTensors need it: torch caches facts about a mesh, with the group's name, and uses them for
    every later mesh of the same ranks. Collective: every rank calls it.

    Args:
        backend: Backend for host memory, or one for each type of device: "cpu:gloo,cuda:nccl".
    """
    group = _lasting.get(backend)
    if group is None or group not in _world.pg_map:
        made = distributed.new_group(backend=backend, timeout=timeout_of_all())
        assert isinstance(made, distributed.ProcessGroup)  # all ranks are members
        group = _lasting[backend] = made
    return group


def timeout_of_all() -> timedelta | None:
    """Returns the timeout of torch.distributed's default group.

    None: its backend has no such option, and torch's own default counts.
    """
    group = distributed.group.WORLD
    assert group is not None
    devices = sorted(group._device_types, key=lambda device: device.type != "cpu")
    options = getattr(group._get_backend(devices[0]), "options", None) if devices else None
    found: timedelta | None = getattr(options, "_timeout", None)
    return found
