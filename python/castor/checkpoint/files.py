"""Durable files: written under a temporary name, checksummed on the way, synced, then renamed."""

from __future__ import annotations

import errno
import io
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from castor import _C
from castor.checkpoint.names import lock, temporary_name
from castor.checkpoint.writer import WriteBehind, Writer
from castor.errors import IoError

PIECE_BYTES = 4 * 2**20
"""Number of bytes that are read, hashed or written at once; no buffer of a save is larger."""

Piece = tuple[bytes | memoryview, Sequence[_C.Checksum]]
"""(bytes to write, checksums that they update besides the checksum of the file)."""

OVERHEAD_BYTES = 2**20
"""Bytes reserved on the disk beyond the tensors, for headers, JSON and directories."""


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """A manifest's entry of a file: size in bytes, checksums as 32 hex digits of XXH3-128."""

    size: int
    checksum: str
    tensors: dict[str, str] = field(default_factory=dict)
    """Checksum of each tensor of a safetensors file."""


@contextmanager
def os_errors(path: Path, doing: str, needed: int | None = None) -> Iterator[None]:
    """Turns the OSErrors of a block into IoErrors.

    Args:
        path: File or directory that the block works on.
        doing: Verb for the message: "write" or "read".
        needed: Number of bytes that the block writes, for the message; None: not a write.

    Raises:
        IoError: The block raised an OSError. The error has its errno and the path. With `needed`,
            the message has the bytes needed and free.
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
    """Returns the bytes that this user may still write on the file system of `directory`."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def check_room(path: Path, needed: int) -> None:
    """Checks that the file system of `path`'s parent has room.

    Args:
        path: File or directory that will be written; its parent must exist.
        needed: Number of bytes that it takes.

    Raises:
        IoError: Fewer than `needed` bytes are free (ENOSPC).
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


def write_behind(*, ahead: bool = False) -> WriteBehind:
    """Makes a WriteBehind with buffers of PIECE_BYTES."""
    return WriteBehind(PIECE_BYTES, ahead=ahead)


class NewFile:
    """A file that has a temporary name until it is complete."""

    def __init__(self, path: Path) -> None:
        """Makes an empty file, which the caller must `finish` or `discard`.

        Args:
            path: Final path of the file; a file there is replaced.

        Raises:
            OSError: The disk refuses.
        """
        self._path = path
        self._temporary = path.with_name(temporary_name(path.name))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor = os.open(self._temporary, flags, 0o666)
        lock(self._descriptor)
        self._open = True

    def fill(self, pieces: Iterable[Piece], behind: WriteBehind) -> tuple[int, str]:
        """Gives the whole contents of the file to `behind`.

        Args:
            pieces: Contents in order; no piece is used after the next one is asked for.
            behind: Performs the writes.

        Returns:
            Size in bytes, and checksum.

        Raises:
            OSError: The disk refuses.
        """
        whole, size = _C.Checksum(), 0
        writer = Writer(self._descriptor, behind)
        for piece, checksums in pieces:
            writer.append(memoryview(piece), whole, *checksums)
            size += len(piece)
        writer.flush()
        return size, whole.hexdigest()

    def finish(self, *, durable: bool = False) -> None:
        """Gives the written file its final name. The caller syncs the directory.

        Args:
            durable: Whether to sync the file first; if not, the caller does that too.

        Raises:
            OSError: The disk refuses.
        """
        if durable:
            os.fsync(self._descriptor)
        locked = os.dup(self._descriptor)  # until the file has its name
        try:
            self._open = False
            os.close(self._descriptor)
            os.rename(self._temporary, self._path)
        finally:
            os.close(locked)

    def discard(self) -> None:
        """Deletes the file, unless it has its final name."""
        if self._open:
            self._open = False
            os.close(self._descriptor)
        with suppress(OSError):
            os.unlink(self._temporary)


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> FileEntry:
    """Writes a file as a whole or not at all, and syncs it. The caller syncs the directory.

    Args:
        path: Path of the file; a file there is replaced.
        pieces: Contents in order; no piece is used after the next one is asked for.

    Raises:
        OSError: The disk refuses; the temporary file is gone then.
    """
    file = NewFile(path)
    try:
        with write_behind() as behind:
            size, checksum = file.fill(((piece, ()) for piece in pieces), behind)
        file.finish(durable=True)
    except BaseException:
        file.discard()
        raise
    return FileEntry(size=size, checksum=checksum)


def fsync_file(path: Path) -> None:
    """Makes a file that was written durable."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def let_go_of_pages(path: Path) -> None:
    """Drops a durable file from the page cache, because it is not read again soon."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_pieces(
    path: Path, start: int = 0, end: int | None = None, *, direct: bool = False
) -> Iterator[memoryview]:
    """Yields bytes [start, end) of a file in pieces; each is valid until the next is asked for.

    Args:
        path: Path of the file.
        start: First byte; a multiple of the page size, if `direct`.
        end: Byte behind the last one; None: the end of the file.
        direct: Whether to read past the page cache, where the file system allows it: see Writer.

    Raises:
        OSError: The file cannot be read.
    """
    with _opened(path, direct) as file:
        file.seek(start)
        left = os.fstat(file.fileno()).st_size - start if end is None else end - start
        buffer = memoryview(mmap.mmap(-1, PIECE_BYTES))
        while left > 0:
            # A direct read asks for whole blocks, also at the end of the file.
            count = min(file.readinto(buffer) or 0, left)
            if not count:
                return
            yield buffer[:count]
            left -= count


def _opened(path: Path, direct: bool) -> io.FileIO:
    if direct:
        with suppress(OSError):  # no O_DIRECT here; any other error comes again from FileIO
            return io.FileIO(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT))
    return io.FileIO(path)


def checksum_of(path: Path, start: int = 0, end: int | None = None) -> str:
    """Returns the XXH3-128 of bytes [start, end) of a file, as 32 hex digits."""
    hasher = _C.Checksum()
    for piece in read_pieces(path, start, end):
        hasher.update(piece)
    return hasher.hexdigest()


def adopt_file(path: Path) -> FileEntry:
    """Syncs and checksums a file that someone else has written (a config, a tokenizer)."""
    fsync_file(path)
    return FileEntry(size=path.stat().st_size, checksum=checksum_of(path))
