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
from castor.checkpoint.names import temporary_name
from castor.checkpoint.write_behind import WriteBehind
from castor.checkpoint.writer import Writer
from castor.errors import IoError

PIECE_BYTES = 4 * 2**20
"""Bytes that are read, hashed or written at once; no buffer of a save is larger."""

Piece = tuple[bytes | memoryview, Sequence[_C.Checksum]]
"""Bytes that are written, and the checksums they count in beside their file's."""

OVERHEAD_BYTES = 2**20
"""Asked of the disk beyond the tensors: headers, JSON, directories."""


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


def write_behind(*, ahead: bool = False) -> WriteBehind:
    """Makes a writer with buffers of PIECE_BYTES."""
    return WriteBehind(PIECE_BYTES, ahead=ahead)


class NewFile:
    """A file under a temporary name, until it is whole."""

    def __init__(self, path: Path) -> None:
        """An empty one. Who makes it ends with `finish`, or with `discard`.

        Args:
            path: The name that it gets; a file there is replaced.

        Raises:
            OSError: The disk refuses.
        """
        self._path = path
        self._temporary = path.with_name(temporary_name(path.name))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor = os.open(self._temporary, flags, 0o666)
        self._open = True

    def fill(self, pieces: Iterable[Piece], behind: WriteBehind) -> tuple[int, str]:
        """Gives all that the file will hold to `behind`.

        Args:
            pieces: In order; none is kept.
            behind: Writes it.

        Returns:
            Size and checksum.

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
        """All is written: it gets its name. The caller syncs the directory.

        Args:
            durable: Whether to wait for the disk; if not, the caller syncs the file too.

        Raises:
            OSError: The disk refuses.
        """
        if durable:
            os.fsync(self._descriptor)
        self._open = False
        os.close(self._descriptor)
        os.rename(self._temporary, self._path)

    def discard(self) -> None:
        """Deletes it, unless it has its name."""
        if self._open:
            self._open = False
            os.close(self._descriptor)
        with suppress(OSError):
            os.unlink(self._temporary)


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> FileEntry:
    """Writes a file whole or not at all, and waits for the disk. The caller syncs the directory.

    Args:
        path: Where; a file there is replaced.
        pieces: The contents, in order; none is kept.

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
    """A durable file is not read again soon: its pages in the page cache are others' to have."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


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
    hasher = _C.Checksum()
    for piece in read_pieces(path, start, end):
        hasher.update(piece)
    return hasher.hexdigest()


def adopt_file(path: Path) -> FileEntry:
    """Syncs and checksums a file that someone else has written (a config, a tokenizer)."""
    fsync_file(path)
    return FileEntry(size=path.stat().st_size, checksum=checksum_of(path))
