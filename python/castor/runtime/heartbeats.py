"""Heartbeats by which each rank of a run notices another one that is lost."""

from __future__ import annotations

import atexit
import weakref

from torch import distributed

from castor import _C
from castor.runtime.ranks import name_of_node
from castor.runtime.waits import watch_link

INTERVAL_SECONDS = 2.0
"""Seconds between two heartbeats of a rank."""
SECONDS_UNTIL_LOST = 30.0
"""Seconds without a heartbeat after which a rank is lost."""


class _Heartbeats:
    """Heartbeats of this process through the store of one default process group."""

    def __init__(
        self, group: distributed.ProcessGroup, interval_seconds: float, seconds_until_lost: float
    ) -> None:
        self._group = weakref.ref(group)  # it ends with destroy_process_group()
        self._beats = _C.Heartbeats(
            group=group.group_name,
            host=name_of_node(),
            interval_seconds=interval_seconds,
            seconds_until_lost=seconds_until_lost,
        )
        watch_link(self)

    def are_of(self, group: distributed.ProcessGroup) -> bool:
        """Whether these go through the store of this default process group."""
        return self._group() is group

    def look(self) -> None:
        """Ends waits for a rank that is lost."""
        self._beats.look()

    def end(self) -> None:
        """Tells the other ranks that this one has ended well."""
        self._beats.end()


_beating: _Heartbeats | None = None


def begin_heartbeats(
    *, interval_seconds: float = INTERVAL_SECONDS, seconds_until_lost: float = SECONDS_UNTIL_LOST
) -> None:
    """Begins this rank's heartbeats. No effect if it has some, or is alone.

    A rank whose heartbeat stands still is lost: it has ended, it is stopped, or its machine is
    gone. Waits for it within castor end with an error, which names it, its host and the module
    that it was in last (docs/design/0066-heartbeats.md).

    Args:
        interval_seconds: Seconds between two heartbeats.
        seconds_until_lost: Seconds without one after which a rank is lost.

    Raises:
        Error: torch.distributed's store gives no connection for them.
    """
    global _beating
    group = distributed.group.WORLD
    if group is None or group.size() == 1 or (_beating and _beating.are_of(group)):
        return
    if _beating is None:
        atexit.register(_end)
    else:
        _beating.end()  # of a default group that the user has ended
    _beating = _Heartbeats(group, interval_seconds, seconds_until_lost)


def _end() -> None:
    """Ends the heartbeats before Python ends."""
    if _beating is not None:
        _beating.end()
