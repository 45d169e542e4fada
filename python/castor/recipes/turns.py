"""Deals the model out to requests: one at a time, clients in turn, with a bound on who waits.

A client may ask for several users, as a gateway does. They take turns within the client's turns, so
that a client gets no more for naming more of them.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict, deque
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
        self._waiting: OrderedDict[str, OrderedDict[str, deque[Turn[Work]]]] = OrderedDict()
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
            waiting = self._count()
            free = self._max_waiting + (self._current is None)  # one that is taken at once
            if self._closed or waiting >= free:
                expected = math.ceil(self._mean_seconds * max(1, waiting))
                raise QueueFullError(waiting, max(1, expected))
            users = self._waiting.setdefault(turn.client, OrderedDict())
            users.setdefault(turn.user, deque()).append(turn)
            self._changed.notify_all()

    def leave(self, turn: Turn[Work]) -> None:
        """Gives a request up: out of the queue, or out of its computing at the next token."""
        turn.gone.set()
        with self._changed:
            users = self._waiting.get(turn.client, OrderedDict())
            own = users.get(turn.user, deque())
            if turn in own:
                own.remove(turn)
                if not own:
                    del users[turn.user]
                if not users:
                    del self._waiting[turn.client]

    def close(self) -> None:
        """Gives all requests up and waits until the thread has ended."""
        with self._changed:
            self._closed = True
            for users in self._waiting.values():
                for own in users.values():
                    for turn in own:
                        turn.gone.set()
            if self._current is not None:
                self._current.gone.set()
            self._changed.notify_all()
        self._thread.join()

    def _count(self) -> int:
        return sum(len(own) for users in self._waiting.values() for own in users.values())

    def _run(self) -> None:
        while True:
            with self._changed:
                self._current = None
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if not self._waiting:
                    return
                client, users = self._waiting.popitem(last=False)
                user, own = users.popitem(last=False)
                turn = self._current = own.popleft()
                if own:
                    users[user] = own  # behind all others
                if users:
                    self._waiting[client] = users
            begin = time.monotonic()
            self._compute(turn)
            self._mean_seconds += (time.monotonic() - begin - self._mean_seconds) / 8
