"""Writes on a thread behind the caller, because a disk takes longer for a tensor than memory."""

from __future__ import annotations

import mmap
import queue
import threading
from collections.abc import Callable
from types import TracebackType

_AHEAD = 2
"""Number of buffers: one is filled while the other is on its way to the disk."""
_Task = tuple[Callable[[], object], memoryview | None]


class WriteBehind:
    """A lender of buffers whose tasks run in order on a thread of its own.

    The thread that fills buffers is at most one buffer ahead of the disk. The class is a context
    manager: all tasks have run when the block ends. An exception that stops the thread is raised by
    the next call of `do`, or at the end of the block. No task runs after it. At the end of a
    process, which makes no threads any more, the tasks run on the calling thread.
    """

    def __init__(self, buffer_bytes: int, *, ahead: bool) -> None:
        """Stores the arguments; buffers and the thread are made when they are needed.

        Args:
            buffer_bytes: Size of each buffer, in bytes.
            ahead: Whether to use a thread; if not, the caller runs the tasks, with one buffer.
        """
        self._buffer_bytes = buffer_bytes
        self._made = 0
        self._alone = not ahead
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def buffer(self) -> memoryview:
        """Returns a page-aligned buffer; waits while all are on their way to the disk."""
        if self._made == _AHEAD or not self._free.empty():
            return self._free.get()
        self._made += 1
        return memoryview(mmap.mmap(-1, self._buffer_bytes))

    def do(self, task: Callable[[], object], buffer: memoryview | None = None) -> None:
        """Runs a task after all tasks before it; the buffer is free afterwards.

        Raises:
            BaseException: An earlier task raised it and stopped the thread.
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
        """Returns the object itself."""
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _where: TracebackType | None,
    ) -> None:
        """Waits until the thread is over; after an exception, the tasks that are left do not run.

        Raises:
            BaseException: A task raised it, and no other exception is under way.
        """
        self._error = self._error or error
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join()
        stopped, self._error = self._error, None  # its traceback refers to holders of this object
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
