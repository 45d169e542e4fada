"""Process groups of castor's own, which end with the models that they are for."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from torch import distributed
from torch.distributed.distributed_c10d import GroupMember, _world

ProcessGroups = list[distributed.ProcessGroup]
_lasting: distributed.ProcessGroup | None = None
_made: ContextVar[ProcessGroups | None] = ContextVar("_made", default=None)


@contextmanager
def groups_made() -> Iterator[ProcessGroups]:
    """The process groups that own_groups makes within; where this raises, they end."""
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
    """They end when nothing holds `owner` any more.

    A group has three threads, one of which wakes a hundred times a second: where a process boosts
    one model after the other, groups that stay would take whole cores in the end.
    """
    process = os.getpid()

    def end() -> None:
        # In a process that was forked since, their threads are not there.
        if os.getpid() == process:
            end_groups(groups)

    if groups:
        weakref.finalize(owner, end).atexit = False  # where all ends, leave() does it


def end_groups(groups: ProcessGroups) -> None:
    """Ends groups; those that the user's destroy_process_group() has ended are passed over."""
    while groups:
        group = groups.pop()
        if group in _world.pg_map:
            distributed.destroy_process_group(group)


def own_groups(parts: Sequence[Sequence[int]], count: int) -> list[str]:
    """Names of `count` new process groups of this process's part of all ranks.

    Of its own: what the user sends between ranks meanwhile does not come between. Collective: every
    rank calls it, with the same parts. See groups_made for their end.
    """
    return [own_group(parts).group_name for _ in range(count)]


def own_group(parts: Sequence[Sequence[int]]) -> distributed.ProcessGroup:
    """A new process group of this process's part; see own_groups."""
    groups = [distributed.new_group(list(part), backend="gloo") for part in parts]
    mine: distributed.ProcessGroup = next(
        group for group in groups if group is not GroupMember.NON_GROUP_MEMBER
    )
    made = _made.get()
    if made is not None:
        made.append(mine)
    return mine


def lasting_group() -> distributed.ProcessGroup:
    """A process group of all ranks that does not end with a model; the same one at each call.

    For DTensors: torch keeps what it has found out about a mesh, with the group's name in it, for
    every later mesh of the same ranks. Collective: every rank calls it.
    """
    global _lasting
    if _lasting is None or _lasting not in _world.pg_map:
        _lasting = distributed.new_group(backend="gloo")
    return _lasting
