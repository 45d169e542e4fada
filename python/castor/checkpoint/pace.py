"""The pace of a save beside the training, while nobody waits for it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from castor import _C

_PART_OF_CORES = 1 / 40
"""Share of this process's cores that a save takes while nobody waits for it."""

_LOOK_SECONDS = 0.1
"""Longest time, in seconds, until a resting thread notices that the process ends."""


class Pace:
    """The pace of a background thread: idle cores only, and a small share of the cores.

    Time that the work takes from one thread of a parallel operator delays all threads of it. So the
    work runs on an idle-priority thread, with rests in between. Where somebody waits, the
    background thread does the work itself, without rests. Those who may wait are the training, for
    chunks without a copy, the next save, and the end of the process.
    """

    def __init__(self, held: Callable[[], bool]) -> None:
        """Makes the pace of a thread that nobody waits for yet.

        Args:
            held: Returns whether the training may have to wait for a chunk that the save reads.
        """
        self._held = held
        self._awaited = threading.Event()
        self._used = 0.0
        self._idle: _C.IdleThread | None = None

    @property
    def hurried(self) -> bool:
        """Whether somebody waits for the thread, or may have to."""
        return self._awaited.is_set() or not threading.main_thread().is_alive() or self._held()

    def hurry(self) -> None:
        """Announces that somebody waits for the thread from now on."""
        self._awaited.set()

    def begin(self) -> None:
        """Begins the work; called on the thread whose pace this is, as are rest and end."""
        if not self.hurried:
            self._idle = _C.IdleThread()
        self._used = self._seconds()

    def rest(self) -> None:
        """Waits until the work since the last rest is no more than its share of the time."""
        part = _PART_OF_CORES * len(os.sched_getaffinity(0))
        end = time.monotonic() + (self._seconds() - self._used) * (1 / part - 1)
        while not self.hurried and (left := end - time.monotonic()) > 0:
            self._awaited.wait(min(left, _LOOK_SECONDS))
        if self.hurried:
            self.end()
        self._used = self._seconds()

    def end(self) -> None:
        """Makes the thread do all its work itself from now on."""
        if self._idle is not None:
            self._idle.leave()
            self._idle = None

    def _seconds(self) -> float:
        """Returns the processor time that the work has taken so far, in seconds."""
        return time.thread_time() + (self._idle.seconds if self._idle else 0.0)
