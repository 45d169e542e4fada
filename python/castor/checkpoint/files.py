"""Durable files: written under a temporary name, checksummed on the way, synced, then renamed."""

from __future__ import annotations

import errno
import fcntl
import io
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from castor import _C
from castor.checkpoint.names import temporary_name
from castor.errors import IoError
from castor.runtime.model_parts import Runs

PIECE_BYTES = 4 * 2**20
"""What is read, hashed or written at once; no buffer of a save or a check is larger."""

_BLOCK_BYTES = 4096
"""A page, and of a disk a block at most; see Writer."""

_DIRECT_BYTES = 16 * _BLOCK_BYTES
"""Of shorter runs the page cache takes less time: one write instead of three, and two switches."""

OVERHEAD_BYTES = 2**20
"""Asked of the disk beyond the tensors: headers, JSON, directories."""


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """What a manifest knows of a file: size in bytes, checksums as 32 hex digits of XXH3-128."""

    size: int
    checksum: str
    tensors: dict[str, str] = field(default_factory=dict)
    """Checksum of each tensor of a safetensors file."""


@contextmanager
def os_errors(path: Path, doing: str, needed: int | None = None) -> Iterator[None]:
    """Turns the OSErrors of a block into IoErrors.

    Args:
        path: What the block works on.
        doing: The verb for the message: "write", "read".
        needed: Bytes that a write comes to, for the message.

    Raises:
        IoError: With errno, path, and for writes the bytes needed and free.
    """
    try:
        yield
    except IoError:
        raise
    except OSError as error:
        figures = ""
        if needed is not None:
            figures = f" ({needed} bytes are needed, {_free_or_unknown(path)} bytes are free)"
        reason = os.strerror(error.errno) if error.errno else str(error)
        text = f"cannot {doing} {path}: {reason}{figures}; {_advice(error.errno)}"
        raise IoError(error.errno, text, str(path)) from error


def _advice(number: int | None) -> str:
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "free some space or save elsewhere; the previous checkpoint is as it was"
    if number in (errno.EROFS, errno.EACCES, errno.EPERM):
        return "choose a directory that this process may write"
    if number in (errno.ENOENT, errno.ENOTDIR):
        return "create the parent directory first"
    return "see the file system"


def _free_or_unknown(path: Path) -> str:
    with suppress(OSError):
        return str(free_bytes(path.parent))
    return "an unknown number of"


def free_bytes(directory: Path) -> int:
    """Bytes that this user may still write on the file system of `directory`."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def check_room(path: Path, needed: int) -> None:
    """Raises IoError (ENOSPC) if the file system of `path`'s parent has less than `needed` bytes.

    Args:
        path: What will be written; its parent must exist.
        needed: Bytes.
    """
    with os_errors(path, "write", needed):
        if free_bytes(path.parent) < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fsync_directory(path: Path) -> None:
    """Makes the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(
    path: Path, pieces: Iterable[bytes | memoryview], *, durable: bool = True
) -> FileEntry:
    """Writes a file whole or not at all. The caller syncs the directory.

    Args:
        path: Where; a file there is replaced.
        pieces: The contents, in order; none is kept.
        durable: Whether to wait for the disk; if not, the caller syncs the file too.

    Raises:
        OSError: The disk refuses; the temporary file is gone then.
    """
    temporary = path.with_name(temporary_name(path.name))
    hasher, size = xxhash.xxh3_128(), 0
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        try:
            writer = Writer(descriptor)
            for piece in pieces:
                writer.append(memoryview(piece))
                hasher.update(piece)
                size += len(piece)
            writer.flush()
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    return FileEntry(size=size, checksum=hasher.hexdigest())


def fsync_file(path: Path) -> None:
    """Makes a file that was written durable."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def let_go_of_pages(path: Path) -> None:
    """A durable file is not read again soon: its pages in the page cache are others' to have."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Writer:
    """Writes a file past the page cache (O_DIRECT) where the file system allows it.

    Pages of a checkpoint would take the memory of others, and filling them takes the kernel longer
    than all else of a save takes a core: time that a step beside it has not. Only whole blocks go
    this way: others may write what is left of a block meanwhile, also past the same descriptor.
    Runs that are shorter than 64 KiB go through it.
    """

    def __init__(self, descriptor: int) -> None:
        """At the beginning of the file."""
        self._descriptor = descriptor
        self._buffer = memoryview(mmap.mmap(-1, PIECE_BYTES))  # begins with a page, as it must
        self._base = 0  # of the buffer, in the file: where a block begins
        self._begin = self._end = 0  # what is to be written, in the buffer
        self._direct = False
        self._allowed = True

    def seek(self, offset: int) -> None:
        """What comes next goes to that byte of the file.

        Raises:
            OSError: The disk refuses what came before.
        """
        if offset != self._base + self._end:
            self.flush()
            self._base = offset - offset % _BLOCK_BYTES
            self._begin = self._end = offset - self._base

    def append(self, piece: memoryview) -> None:
        """It is not used afterwards.

        Raises:
            OSError: The disk refuses.
        """
        while piece:
            count = min(len(piece), PIECE_BYTES - self._end)
            self._buffer[self._end : self._end + count] = piece[:count]
            self._end += count
            piece = piece[count:]
            if self._end == PIECE_BYTES:
                self.flush()

    def append_runs(self, piece: memoryview, begin: int, runs: Runs) -> None:
        """Bytes of several places: it is not used afterwards.

        Args:
            piece: Bytes of a part.
            begin: Which of the part's is the first.
            runs: Where the part lies in the file, in bytes.

        Raises:
            OSError: The disk refuses.
        """
        if runs.length >= min(_DIRECT_BYTES, len(piece)):
            for offset, count in runs.of(begin, begin + len(piece)):
                self.seek(offset)
                self.append(piece[:count])
                piece = piece[count:]
            return
        self.flush()
        if self._direct:
            self._set_direct(False)
        # Of columns of a matrix there may be millions, and training beside it needs Python's lock.
        where = {"first": runs.first, "length": runs.length, "stride": runs.stride}
        try:
            _C.write_runs(self._descriptor, piece, begin=begin, **where)
        except IoError as error:
            raise OSError(error.errno, os.strerror(error.errno or 0)) from error

    def flush(self) -> None:
        """Writes what has come, also what is no whole block.

        Raises:
            OSError: The disk refuses.
        """
        begin, end = self._begin, self._end
        inner = -(-begin // _BLOCK_BYTES) * _BLOCK_BYTES
        behind = end // _BLOCK_BYTES * _BLOCK_BYTES
        if behind - inner >= _DIRECT_BYTES and self._allowed:
            self._write(begin, inner)
            self._write(inner, behind, direct=True)
            self._write(behind, end)
        else:
            self._write(begin, end)
        at = self._base + end
        self._base = at - at % _BLOCK_BYTES
        self._begin = self._end = at - self._base

    def _write(self, begin: int, end: int, *, direct: bool = False) -> None:
        left, offset = self._buffer[begin:end], self._base + begin
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


def read_pieces(
    path: Path, start: int = 0, end: int | None = None, *, direct: bool = False
) -> Iterator[memoryview]:
    """Bytes [start, end) of a file, a piece at a time; each is valid until the next is asked for.

    Args:
        path: Of the file.
        start: A whole number of pages, if `direct`.
        end: None: all of it.
        direct: Whether to go past the page cache, where the file system allows it: see Writer.

    Raises:
        OSError: The file cannot be read.
    """
    with _opened(path, direct) as file:
        file.seek(start)
        left = os.fstat(file.fileno()).st_size - start if end is None else end - start
        buffer = memoryview(mmap.mmap(-1, PIECE_BYTES))
        while left > 0:
            # Past the page cache whole blocks are asked for, also at the end of the file.
            count = min(file.readinto(buffer) or 0, left)
            if not count:
                return
            yield buffer[:count]
            left -= count


def _opened(path: Path, direct: bool) -> io.FileIO:
    if direct:
        with suppress(OSError):  # a file system that has no such thing; else the other open says so
            return io.FileIO(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT))
    return io.FileIO(path)


def checksum_of(path: Path, start: int = 0, end: int | None = None) -> str:
    """XXH3-128 of bytes [start, end) of a file, as 32 hex digits."""
    hasher = xxhash.xxh3_128()
    for piece in read_pieces(path, start, end):
        hasher.update(piece)
    return hasher.hexdigest()


def adopt_file(path: Path) -> FileEntry:
    """Syncs and checksums a file that someone else has written (a config, a tokenizer)."""
    fsync_file(path)
    return FileEntry(size=path.stat().st_size, checksum=checksum_of(path))
