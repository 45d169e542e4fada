"""A writer of a file's bytes: full blocks past the page cache, on a thread behind the caller."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import queue
import threading
from collections.abc import Callable
from functools import partial
from types import TracebackType

from castor import _C
from castor.errors import IoError
from castor.runtime.model_shards import Runs, Segments

# --- Writes on a thread behind the caller, because a disk takes longer for a tensor than memory ---

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


# --- A writer of a file's bytes that writes full blocks past the page cache -----------------------

_BLOCK_BYTES = 4096
"""Size of a page in bytes; a block of a disk is no larger. See Writer."""

_DIRECT_BYTES = 16 * _BLOCK_BYTES
"""Minimum size of a direct write in bytes. A shorter one takes less time through the page cache:
one write instead of three and two switches of O_DIRECT."""


class Writer:
    """A writer that goes past the page cache (O_DIRECT) where the file system allows it.

    A checkpoint's pages would take memory from others. Filling them takes the kernel more core time
    than all the rest of a save, and a training step beside the save needs that time. Only complete
    blocks are written directly: another writer may write the rest of a block meanwhile, also
    through the same descriptor. Runs shorter than 64 KiB go through the page cache.
    """

    def __init__(self, descriptor: int, behind: WriteBehind) -> None:
        """Begins at the first byte of the file.

        Args:
            descriptor: Descriptor of the file; open until `behind` has run all its tasks.
            behind: Performs the writes.
        """
        self._descriptor = descriptor
        self._behind = behind
        self._buffer: memoryview | None = None
        self._runs: list[tuple[int, memoryview]] = []  # (file offset, bytes) of runs in the buffer
        self._begin = self._end = 0  # of the growing run, in the buffer; aligned as in the file
        self._at = 0  # file offset at which the next byte goes
        self._direct = False
        self._allowed = True

    def seek(self, offset: int) -> None:
        """Continues at byte `offset` of the file.

        Raises:
            OSError: The disk refused an earlier write.
        """
        if offset == self._at:
            return
        self._end_run()
        self._at = offset
        self._begin = self._end = _blocks(self._end) + offset % _BLOCK_BYTES
        if self._buffer is None or self._begin >= len(self._buffer):
            self.flush()

    def append(self, piece: memoryview, *checksums: _C.Checksum) -> None:
        """Copies a piece, to be written at the present offset, and updates the checksums with it.

        Raises:
            OSError: The disk refuses this write or has refused an earlier one.
        """
        while piece:
            if self._buffer is None:
                self._buffer = self._behind.buffer()
            count = min(len(piece), len(self._buffer) - self._end)
            target = self._buffer[self._end : self._end + count]
            _C.copy_bytes(target, piece[:count], checksums)
            self._end += count
            self._at += count
            piece = piece[count:]
            if self._end == len(self._buffer):
                self.flush()

    def append_runs(
        self, piece: memoryview, begin: int, runs: Runs | Segments, through_cache: int
    ) -> None:
        """Writes bytes of a shard to the places that they have in the file.

        Args:
            piece: Bytes of the shard; not used after the call.
            begin: Offset of the piece in the shard, in bytes.
            runs: Places of the shard in the file, in bytes.
            through_cache: Another descriptor of the file, for short runs.

        Raises:
            OSError: The disk refuses.
        """
        if isinstance(runs, Segments) or runs.length >= min(_DIRECT_BYTES, len(piece)):
            for offset, count in runs.of(begin, begin + len(piece)):
                if offset is not None:
                    self.seek(offset)
                    self.append(piece[:count])
                piece = piece[count:]
            return
        # A shard of columns may have millions of runs, and training beside the save needs the GIL.
        where = {"first": runs.first, "length": runs.length, "stride": runs.stride}
        try:
            _C.write_runs(through_cache, piece, begin=begin, **where)
        except IoError as error:
            raise OSError(error.errno, os.strerror(error.errno or 0)) from error

    def flush(self) -> None:
        """Gives all bytes so far to `behind`, incomplete blocks too.

        Raises:
            OSError: The disk refuses this write or has refused an earlier one.
        """
        self._end_run()
        if self._buffer is not None:
            self._behind.do(partial(self._write_out, self._runs), self._buffer)
        self._buffer, self._runs = None, []
        self._begin = self._end = self._at % _BLOCK_BYTES

    def _end_run(self) -> None:
        if self._buffer is not None and self._begin < self._end:
            offset = self._at - (self._end - self._begin)
            self._runs.append((offset, self._buffer[self._begin : self._end]))

    # The methods from here on run as tasks of `behind`.

    def _write_out(self, runs: list[tuple[int, memoryview]]) -> None:
        for offset, run in runs:
            end = offset + len(run)
            inner, outer = _blocks(offset), end - end % _BLOCK_BYTES
            if outer - inner >= _DIRECT_BYTES and self._allowed:
                self._write(run[: inner - offset], offset)
                self._write(run[inner - offset : outer - offset], inner, direct=True)
                self._write(run[outer - offset :], outer)
            else:
                self._write(run, offset)

    def _write(self, left: memoryview, offset: int, *, direct: bool = False) -> None:
        if left and direct != self._direct:
            self._set_direct(direct)
        while left:
            try:
                written = os.pwrite(self._descriptor, left, offset)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._allowed = False  # the blocks are larger, or a short write ended inside one
                self._set_direct(False)
                continue
            if written <= 0:
                raise OSError(errno.EIO, f"pwrite returned {written} for {len(left)} bytes")
            left = left[written:]
            offset += written

    def _set_direct(self, direct: bool) -> None:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        flags = flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT
        self._direct = False
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags)
            self._direct = direct
        except OSError:
            self._allowed = False


def _blocks(offset: int) -> int:
    """Rounds an offset up to the beginning of a block."""
    return -(-offset // _BLOCK_BYTES) * _BLOCK_BYTES
