"""Writes the bytes of a file, full blocks past the page cache."""

from __future__ import annotations

import errno
import fcntl
import os
from functools import partial

from castor import _C
from castor.checkpoint.write_behind import WriteBehind
from castor.errors import IoError
from castor.runtime.model_parts import Runs, Segments

_BLOCK_BYTES = 4096
"""A page, and of a disk a block at most; see Writer."""

_DIRECT_BYTES = 16 * _BLOCK_BYTES
"""Least bytes of a direct write: shorter ones take less time through the page cache, with one write
instead of three and two switches."""


class Writer:
    """Writes a file past the page cache (O_DIRECT) where the file system allows it.

    Pages of a checkpoint would take the memory of others, and filling them takes the kernel longer
    than all else of a save takes a core: time that a step beside it has not. Only whole blocks go
    this way: others may write what is left of a block meanwhile, also past the same descriptor.
    Runs that are shorter than 64 KiB go through it.
    """

    def __init__(self, descriptor: int, behind: WriteBehind) -> None:
        """At the beginning of the file.

        Args:
            descriptor: Of the file; open until `behind` has done all that it was given.
            behind: Writes what has come.
        """
        self._descriptor = descriptor
        self._behind = behind
        self._buffer: memoryview | None = None
        self._runs: list[tuple[int, memoryview]] = []  # of the buffer, each with its place
        self._begin = self._end = 0  # of the run that grows; as far into a block as in the file
        self._at = 0  # where it goes on in the file
        self._direct = False
        self._allowed = True

    def seek(self, offset: int) -> None:
        """Continues at that byte of the file.

        Raises:
            OSError: The disk refuses what came before.
        """
        if offset == self._at:
            return
        self._end_run()
        self._at = offset
        self._begin = self._end = _blocks(self._end) + offset % _BLOCK_BYTES
        if self._buffer is None or self._begin >= len(self._buffer):
            self.flush()

    def append(self, piece: memoryview, *checksums: _C.Checksum) -> None:
        """It is not used afterwards; the checksums are updated with it.

        Raises:
            OSError: The disk refuses.
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
        """Bytes of several places: it is not used afterwards.

        Args:
            piece: Bytes of a part.
            begin: Which of the part's is the first.
            runs: Where the part lies in the file, in bytes.
            through_cache: Another descriptor of the file, for runs that are short.

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
        # Of columns of a matrix there may be millions, and training beside it needs Python's lock.
        where = {"first": runs.first, "length": runs.length, "stride": runs.stride}
        try:
            _C.write_runs(through_cache, piece, begin=begin, **where)
        except IoError as error:
            raise OSError(error.errno, os.strerror(error.errno or 0)) from error

    def flush(self) -> None:
        """Gives away what has come, also what is no whole block.

        Raises:
            OSError: The disk refuses.
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

    # What follows runs behind.

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
                self._allowed = False  # larger blocks, or a part of one is written
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
    """Returns the begin of the next block."""
    return -(-offset // _BLOCK_BYTES) * _BLOCK_BYTES
