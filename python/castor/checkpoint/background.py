"""Saves that are written beside the training, one at a time. `wait` raises their exceptions."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from castor.checkpoint.reading import Reading, Saving, rest
from castor.checkpoint.shares import Share
from castor.errors import Error
from castor.runtime.engine import Engine


class _Write:
    """The second half of a save, on a thread of its own."""

    def __init__(self, path: Path, write: Callable[[], None], hurry: Callable[[], None]) -> None:
        self._path = path
        self._write = write
        self._hurry = hurry
        self._error: Exception | None = None
        # The thread is no daemon: the interpreter waits for it before it ends.
        self._thread = threading.Thread(target=self._run, name="castor save")
        self._thread.start()

    def join(self) -> None:
        """Makes the write hurry, and returns when it is over."""
        self._hurry()
        self._thread.join()

    def rethrow(self) -> None:
        """Raises the exception that stopped the write, if there is one."""
        if isinstance(self._error, Error):
            raise self._error
        if self._error is not None:
            raise Error(
                f"{self._path} was not written: {type(self._error).__name__}: {self._error}"
            ) from self._error

    def _run(self) -> None:
        try:
            self._write()
        except Exception as error:
            self._error = error


_under_way: _Write | None = None


def save_reading(
    engines: Sequence[Engine],
    share: Share | None,
    save: Callable[[Reading], Saving],
    *,
    later: bool,
) -> Path:
    """Takes a snapshot of boosted models and saves it, after the save before has finished.

    Args:
        engines: Engines of the models that are saved.
        share: This rank's share of the work; None: this process does all of it.
        save: Function that takes tensors from the Reading and writes them.
        later: Whether a thread writes while training goes on.

    Returns:
        Path where the checkpoint is, or will be.

    Raises:
        Exception: The save before has failed, or the first half of this one, or, unless `later`,
            its second half. No save is under way then.
    """
    global _under_way
    wait()

    def heard() -> AbstractContextManager[None]:
        return nullcontext() if share is None else share.heard()

    def write() -> None:
        try:
            with heard():
                rest(saving)
            if share is not None:
                share.gather()  # the checkpoint is in place for every rank
        finally:
            reading.end()

    with heard():
        reading = Reading(engines, share, later=later)
    try:
        with heard():
            saving = save(reading)
            path = next(saving)
            reading.let_go_of_the_rest()
        if share is not None:
            path = share.gather(path)[0]
        if later:
            _under_way = _Write(path, write, reading.hurry)
        else:
            write()
    except BaseException:
        reading.end()
        raise
    reading.await_not_held()
    return path


def wait() -> None:
    """Returns when no save is under way.

    Raises:
        Exception: The last save failed; only the first call after it raises.
    """
    global _under_way
    if (write := _under_way) is not None:
        write.join()
        _under_way = None
        write.rethrow()


def _forget() -> None:
    """Forgets the save in a forked child, where the parent's thread does not exist."""
    global _under_way
    _under_way = None


atexit.register(wait)
os.register_at_fork(after_in_child=_forget)
