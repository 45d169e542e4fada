"""Durable files: written under a temporary name, checksummed on the way, synced, then renamed."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from castor.checkpoint.names import temporary_name
from castor.errors import IoError

PIECE_BYTES = 4 * 2**20
"""What is read, hashed or written at once; no buffer of a save or a check is larger."""

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
            writer = _Writer(descriptor)
            for piece in pieces:
                writer.append(memoryview(piece))
                hasher.update(piece)
                size += len(piece)
            writer.end()
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


def write_at(descriptor: int, offset: int, pieces: Iterable[bytes | memoryview]) -> None:
    """Writes pieces one behind the other, from byte `offset` of a file on.

    Raises:
        OSError: The disk refuses.
    """
    for piece in pieces:
        left = memoryview(piece)
        while left:
            written = os.pwrite(descriptor, left, offset)
            if written <= 0:
                raise OSError(errno.EIO, f"pwrite returned {written} for {len(left)} bytes")
            left = left[written:]
            offset += written


class _Writer:
    """Appends to a new file, past the page cache (O_DIRECT) where the file system allows it.

    Pages of a checkpoint would take the memory of others, and filling them takes the kernel longer
    than all else of a save takes a core: time that a step beside it has not.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._buffer = memoryview(mmap.mmap(-1, PIECE_BYTES))  # begins with a page, as it must
        self._filled = 0
        self._direct = self._set_direct(True)

    def append(self, piece: memoryview) -> None:
        """It is not used afterwards."""
        while piece:
            count = min(len(piece), PIECE_BYTES - self._filled)
            self._buffer[self._filled : self._filled + count] = piece[:count]
            self._filled += count
            piece = piece[count:]
            if self._filled == PIECE_BYTES:
                self._write()

    def end(self) -> None:
        """What is left, which need not be whole blocks."""
        if self._direct:
            self._direct = self._set_direct(False)
        self._write()

    def _write(self) -> None:
        left, self._filled = self._buffer[: self._filled], 0
        while left:
            try:
                written = os.write(self._descriptor, left)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._direct = self._set_direct(False)  # larger blocks, or a part of one is written
                continue
            if written <= 0:
                raise OSError(errno.EIO, f"write returned {written} for {len(left)} bytes")
            left = left[written:]

    def _set_direct(self, direct: bool) -> bool:
        """Whether it is from now on."""
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        flags = flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT
        with suppress(OSError):
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags)
            return direct
        return False


def read_pieces(path: Path, start: int = 0, end: int | None = None) -> Iterator[memoryview]:
    """Bytes [start, end) of a file, a piece at a time; each is valid until the next is asked for.

    Raises:
        OSError: The file cannot be read.
    """
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        left = os.fstat(file.fileno()).st_size - start if end is None else end - start
        buffer = memoryview(bytearray(min(left, PIECE_BYTES)))
        while left > 0:
            count = file.readinto(buffer[:left])
            if not count:
                return
            yield buffer[:count]
            left -= count


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
