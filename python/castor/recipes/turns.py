"""Deals the model out to requests: one at a time, clients in turn, with a bound on who waits.

A client may ask for several users, as a gateway does. They take turns within the client's turns, so
that a client gets no more for naming more of them.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Work = TypeVar("Work")


class QueueFullError(Exception):
    """The queue is full: no further request may wait.

    Attributes:
        waiting: Number of requests that wait.
        retry_seconds: Seconds after which a place is probably free; at least 1.
    """

    def __init__(self, waiting: int, retry_seconds: int) -> None:
        super().__init__(f"{waiting} requests are waiting, which is the most that may")
        self.waiting, self.retry_seconds = waiting, retry_seconds


@dataclass(kw_only=True, eq=False)
class Turn(Generic[Work]):
    """A request's place in the queue."""

    client: str
    """Name that tells clients apart, which take turns."""
    user: str = ""
    """Name of the client's user; these take turns too, and requests of one come in their order."""
    work: Work
    """The request."""
    gone: threading.Event = field(default_factory=threading.Event)
    """Set once nobody waits for the answer any more."""


class Turns(Generic[Work]):
    """Computes requests in a thread of its own, round robin over clients and their users.

    Any thread may call the methods. The thread ends with `close`.

    Args:
        compute: Computes one request, in the thread. It raises nothing.
        max_waiting: Most requests that wait while another one is computed.
    """

    def __init__(self, compute: Callable[[Turn[Work]], None], *, max_waiting: int) -> None:
        self._compute, self._max_waiting = compute, max_waiting
        self._changed = threading.Condition()
        self._waiting = list[Turn[Work]]()  # in the order in which they came
        self._places: dict[tuple[str, ...], int] = {}
        self._numbers = itertools.count()
        self._current: Turn[Work] | None = None
        self._closed = False
        self._mean_seconds = 1.0
        self._thread = threading.Thread(target=self._run, name="castor serve", daemon=True)
        self._thread.start()

    def enter(self, turn: Turn[Work]) -> None:
        """Puts a request behind those of its client's user.

        Raises:
            QueueFullError: There is no place.
        """
        with self._changed:
            waiting = len(self._waiting)
            free = self._max_waiting + (self._current is None)  # one that is taken at once
            if self._closed or waiting >= free:
                expected = math.ceil(self._mean_seconds * max(1, waiting))
                raise QueueFullError(waiting, max(1, expected))
            for name in self._names(turn):
                self._places.setdefault(name, next(self._numbers))
            self._waiting.append(turn)
            self._changed.notify_all()

    def leave(self, turn: Turn[Work]) -> None:
        """Gives a request up: out of the queue, or out of its computing at the next token."""
        turn.gone.set()
        with self._changed:
            if turn in self._waiting:
                self._waiting.remove(turn)
                self._forget()

    def close(self) -> None:
        """Gives all requests up and waits until the thread has ended."""
        with self._changed:
            self._closed = True
            for turn in (*self._waiting, *filter(None, [self._current])):
                turn.gone.set()
            self._changed.notify_all()
        self._thread.join()

    @staticmethod
    def _names(turn: Turn[Work]) -> tuple[tuple[str, ...], ...]:
        """Returns those whose turn a request waits for: its client, and the client's user."""
        return (turn.client,), (turn.client, turn.user)

    def _forget(self) -> None:
        """Drops the places of those who have no request left."""
        waiting = {name for turn in self._waiting for name in self._names(turn)}
        self._places = {name: at for name, at in self._places.items() if name in waiting}

    def _run(self) -> None:
        while True:
            with self._changed:
                self._current = None
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if not self._waiting:
                    return
                turn = min(
                    self._waiting, key=lambda one: [self._places[n] for n in self._names(one)]
                )
                self._current = turn
                self._waiting.remove(turn)
                for name in self._names(turn):  # behind all others
                    self._places[name] = next(self._numbers)
                self._forget()
            begin = time.monotonic()
            self._compute(turn)
            self._mean_seconds += (time.monotonic() - begin - self._mean_seconds) / 8
