"""Writing behind the one who fills buffers: a disk takes longer for a tensor than memory does."""

from __future__ import annotations

import mmap
import queue
import threading
from collections.abc import Callable
from types import TracebackType

_AHEAD = 2
"""Buffers: one is filled while the other is on its way."""
_Task = tuple[Callable[[], object], memoryview | None]


class WriteBehind:
    """Lends buffers, and does what is to be done with them on a thread, in order.

    Who fills buffers, on one thread, is one ahead of the disk. A context: at its end all is done.
    What stops the thread is raised by the next call, or at the end; nothing is done after it. At
    the end of a process, which makes no threads any more, the caller does it all.
    """

    def __init__(self, buffer_bytes: int, *, ahead: bool) -> None:
        """Nothing is taken yet.

        Args:
            buffer_bytes: Of each buffer.
            ahead: Whether there is a thread; if not, the caller does it all, with one buffer.
        """
        self._buffer_bytes = buffer_bytes
        self._made = 0
        self._alone = not ahead
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def buffer(self) -> memoryview:
        """A buffer that begins with a page. Waits where all are on their way to the disk."""
        if self._made == _AHEAD or not self._free.empty():
            return self._free.get()
        self._made += 1
        return memoryview(mmap.mmap(-1, self._buffer_bytes))

    def do(self, task: Callable[[], object], buffer: memoryview | None = None) -> None:
        """Does something behind all that was given before; the buffer is free then.

        Raises:
            BaseException: What stopped the thread.
        """
        if self._error is not None:
            raise self._error
        if self._thread is None and not self._alone:
            self._start()
        if self._alone:
            task()
            if buffer is not None:
                self._free.put(buffer)
        else:
            self._tasks.put((task, buffer))

    def __enter__(self) -> WriteBehind:
        """Itself."""
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _where: TracebackType | None,
    ) -> None:
        """Returns when the thread is over; after an exception what has not begun is left out.

        Raises:
            BaseException: What stopped the thread, where no other exception is under way.
        """
        self._error = self._error or error
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join()
        stopped, self._error = self._error, None  # its traceback holds those who hold this
        try:
            if error is None and stopped is not None:
                raise stopped
        finally:
            del stopped

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="castor save, to the disk")
        try:
            thread.start()
        except RuntimeError:
            self._alone = True
        else:
            self._thread = thread

    def _run(self) -> None:
        while (given := self._tasks.get()) is not None:
            task, buffer = given
            try:
                if self._error is None:
                    task()
            except BaseException as error:
                self._error = error
            if buffer is not None:
                self._free.put(buffer)
