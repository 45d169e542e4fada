"""Reads ahead on a thread."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from castor.checkpoint import rng
from castor.errors import UsageError

_GENERATORS = {
    "torch": "torch's global generator",
    "python": "Python's random",
    "numpy": "numpy's global generator",
    "cuda": "CUDA's generators",
}


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The outcome of one read."""

    batch: Any = None
    arrived: Any = None
    """Handle by which a CopyLane receives the batch."""
    error: BaseException | None = None
    """Exception that the loader raised instead of giving a batch."""
    ended: bool = False
    """Whether the loader has no further batch."""
    position: Any = None
    """The loader's position after the batch; None: the loader does not know it."""


class ReadAhead:
    """A reader that calls `read` on a thread, at most `depth` readings ahead of `take`.

    One thread calls `take`. It makes the first two readings itself, before the reading thread
    starts. Random numbers at the beginning of an iteration, such as a sampler's seed, are so drawn
    where plain PyTorch draws them. A loader that draws from the global generators in the second
    reading is refused: on a thread it would race with the training, which draws from them too.

    Args:
        read: Makes one reading, and catches the loader's errors.
        depth: Most readings ahead; 0: every reading is made in `take`, and there is no thread.
        what: Name of the loader, for messages.
    """

    def __init__(self, read: Callable[[], Reading], depth: int, what: str) -> None:
        self._read = read
        self._depth = depth
        self._what = what
        self.process = os.getpid()
        """Identifier of the process that made the reader, and has its thread."""
        self._changed = threading.Condition()
        # Guarded by _changed while the thread runs.
        self._ready: deque[Reading] = deque()
        self._stopping = False
        self._end: Reading | None = None
        self._begun = False
        self._thread: threading.Thread | None = None

    def take(self) -> Reading:
        """Returns the next reading; after the loader's end, that end again.

        Raises:
            UsageError: The loader draws from global generators.
        """
        if self._end is not None:
            return self._end
        reading = self._next()
        if reading.ended:
            self._end = reading
        return reading

    def _next(self) -> Reading:
        if self._depth == 0:
            return self._read()
        if not self._begun:
            first = self._read()
            if not first.ended:
                self._ready.append(self._read_without_drawing())
            self._begun = True
            if not self._over():
                self._start()
            return first
        with self._changed:
            if self._thread is None and not self._over():
                self._start()
            while not self._ready:
                self._changed.wait()
            reading = self._ready.popleft()
            self._changed.notify_all()
            return reading

    def _over(self) -> bool:
        return bool(self._ready) and self._ready[-1].ended

    def _read_without_drawing(self) -> Reading:
        before = rng.snapshot()
        reading = self._read()
        if reading.error is not None and not isinstance(reading.error, Exception):
            raise reading.error  # such as KeyboardInterrupt: at once
        drawn = [_GENERATORS[name] for name in rng.differing(before, rng.snapshot())]
        if drawn:
            raise UsageError(
                f"reading batches of the {self._what} draws from {' and '.join(drawn)} (in its "
                "dataset, collate_fn or sampler), and a thread that reads ahead would draw at "
                "other moments in every run: give a DataLoader num_workers=1 or more, which draw "
                "from generators of their own, or the AsyncLoader depth=0"
            )
        return reading

    def _start(self) -> None:
        self._stopping = False
        # The owner calls stop(); a daemon, so that Python does not wait for the thread before that.
        self._thread = threading.Thread(target=self._run, name="castor-async-loader", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                while len(self._ready) >= self._depth and not self._stopping:
                    self._changed.wait()
                if self._stopping:
                    return
            reading = self._read()
            with self._changed:
                self._ready.append(reading)
                self._changed.notify_all()
            if reading.ended:
                return
            del reading  # the taker has the only reference

    def stop(self) -> None:
        """Ends the thread after its present reading; a later `take` may start another.

        No effect in a forked child, which does not have the thread.
        """
        if os.getpid() != self.process:
            return
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()
