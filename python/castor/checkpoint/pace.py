"""The pace of a save beside the training, while nobody waits for it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from castor import _C

_PART_OF_CORES = 1 / 40
"""Share of this process's cores."""

_LOOK_SECONDS = 0.1
"""Longest time until it is seen that the process ends."""


class Pace:
    """Has a thread's work done on cores that have nothing else to do, and on a part of them.

    What it takes from a thread of an operator all others of it wait for. Where somebody waits for
    the thread it does its work itself, and does not rest: the training, for chunks that are not
    copied; the next save, or the end of the process.
    """

    def __init__(self, held: Callable[[], bool]) -> None:
        """Nobody waits for the thread.

        Args:
            held: Whether the training may have to wait for what it reads.
        """
        self._held = held
        self._awaited = threading.Event()
        self._used = 0.0
        self._idle: _C.IdleThread | None = None

    @property
    def hurried(self) -> bool:
        """Whether somebody waits, or may have to."""
        return self._awaited.is_set() or not threading.main_thread().is_alive() or self._held()

    def hurry(self) -> None:
        """Somebody waits from now on."""
        self._awaited.set()

    def begin(self) -> None:
        """The thread begins: it calls this, rest and end."""
        if not self.hurried:
            self._idle = _C.IdleThread()
        self._used = self._seconds()

    def rest(self) -> None:
        """Waits until the thread has had its part of the time since it last rested."""
        part = _PART_OF_CORES * len(os.sched_getaffinity(0))
        end = time.monotonic() + (self._seconds() - self._used) * (1 / part - 1)
        while not self.hurried and (left := end - time.monotonic()) > 0:
            self._awaited.wait(min(left, _LOOK_SECONDS))
        if self.hurried:
            self.end()
        self._used = self._seconds()

    def end(self) -> None:
        """From now on the thread does all its work itself."""
        if self._idle is not None:
            self._idle.leave()
            self._idle = None

    def _seconds(self) -> float:
        """Processor time that the work has taken so far."""
        return time.thread_time() + (self._idle.seconds if self._idle else 0.0)
