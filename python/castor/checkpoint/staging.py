"""Directories that appear as a whole: staged beside their target, swapped in by one system call."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from castor.checkpoint.files import check_room, fsync_directory, os_errors
from castor.checkpoint.names import (
    displaced_name,
    is_abandoned,
    is_own,
    lock_directory,
    target_of,
    temporary_name,
)
from castor.errors import CheckpointError

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2  # linux/fs.h


@contextmanager
def staged(target: Path, needed: int) -> Iterator[Path]:
    """Yields a new directory that replaces `target` when the block ends without an exception.

    Whatever happens, power cuts included, `target` is either the old directory or the new one. If
    the block fails, the staged files are deleted. Leftovers of dead processes are removed first.

    Args:
        target: Absolute path; may exist, as a directory. Its parent must exist.
        needed: Number of bytes that the block writes at most.

    Raises:
        CheckpointError: `target` is a file or a mount point.
        IoError: There is not enough room, the parent is read-only or missing, or the disk fails
            in another way.
    """
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is a file; name a directory for the checkpoint")
    if target.is_dir() and os.path.ismount(target):
        raise CheckpointError(
            f"{target} is a mount point, which cannot be swapped; save into a directory below it"
        )
    with os_errors(target, "write", needed):
        recover(target)
        remove_leftovers(target.parent)
        check_room(target, needed)
        staging = target.with_name(temporary_name(target.name))
        staging.mkdir()
        lock = lock_directory(staging)
        try:
            yield staging
            _sync_directories(staging)
            _put_in_place(staging, target)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        finally:
            os.close(lock)


def _sync_directories(top: Path) -> None:
    for directory, _, _ in os.walk(top, topdown=False):
        fsync_directory(Path(directory))


def _put_in_place(staging: Path, target: Path) -> None:
    """Renames `staging` to `target`, durably; if that fails, `target` is what it was."""
    old = staging
    if not target.exists():
        _rename(staging, target)
        return
    if exchange(staging, target):
        try:
            fsync_directory(target.parent)
        except OSError:
            exchange(staging, target)
            raise
    else:
        # Between these two renames there is no `target`: `recover` brings the old one back.
        old = target.with_name(displaced_name(target.name))
        os.rename(target, old)
        try:
            _rename(staging, target)
        except BaseException:
            os.rename(old, target)
            raise
    shutil.rmtree(old, ignore_errors=True)  # the next save tries again


def _rename(source: Path, destination: Path) -> None:
    os.rename(source, destination)
    try:
        fsync_directory(destination.parent)
    except OSError:
        os.rename(destination, source)
        raise


def exchange(a: Path, b: Path) -> bool:
    """Swaps two directories atomically; returns False where kernel or file system cannot.

    Raises:
        OSError: The swap fails for another reason.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    if libc.renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(b))


def recover(target: Path) -> None:
    """Brings back `target` where a process displaced it and then died or failed.

    Only where directories cannot be exchanged (see `exchange`) can a kill leave no `target`.

    Raises:
        IoError: The displaced directory is there and cannot be renamed.
    """
    if target.exists() or not target.parent.is_dir():
        return
    with os_errors(target, "read"):
        for leftover in sorted(target.parent.iterdir()):
            ours = is_own(leftover) or is_abandoned(leftover)
            if target_of(leftover) == ("old", target.name) and ours:
                os.rename(leftover, target)
                fsync_directory(target.parent)
                return


def recover_all(root: Path) -> None:
    """Recovers every directory that was displaced in `root`; see `recover`."""
    if not root.is_dir():
        return
    for leftover in sorted(root.iterdir()):
        kind_and_name = target_of(leftover)
        if kind_and_name and kind_and_name[0] == "old":
            recover(root / kind_and_name[1])


def remove_leftovers(parent: Path) -> None:
    """Deletes files and directories with castor's temporary names that dead processes left."""
    for leftover in parent.iterdir():
        kind_and_name = target_of(leftover)
        if kind_and_name is None or not is_abandoned(leftover):
            continue
        if kind_and_name[0] == "old" and not (parent / kind_and_name[1]).exists():
            continue  # the only copy: `recover` takes it back
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            with suppress(OSError):
                leftover.unlink()


def delete(target: Path) -> None:
    """Deletes a directory so that a kill leaves it complete or gone, never in between.

    Raises:
        OSError: The directory cannot be renamed.
    """
    doomed = target.with_name(temporary_name(target.name))
    os.rename(target, doomed)
    fsync_directory(target.parent)
    shutil.rmtree(doomed, ignore_errors=True)


def carry_over(previous: Path, staging: Path, is_ours: Callable[[str], bool]) -> list[str]:
    """Links the files that users keep in `previous` into the directory that will replace it.

    Files that cannot be linked are copied.

    Args:
        previous: Directory that will be replaced; may be missing.
        staging: The replacement.
        is_ours: Returns whether castor writes files of a name; such files are not carried over.

    Returns:
        Names of the files that were carried over, without those in subdirectories.

    Raises:
        OSError: The disk refuses.
    """
    carried: list[str] = []
    if not previous.is_dir():
        return carried
    for entry in sorted(previous.iterdir()):
        if is_ours(entry.name) or target_of(entry) or (staging / entry.name).exists():
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.copytree(entry, staging / entry.name, symlinks=True, copy_function=_link_or_copy)
        else:
            _link_or_copy(str(entry), str(staging / entry.name))
            carried.append(entry.name)
    return carried


def _link_or_copy(source: str, destination: str) -> str:
    try:
        os.link(source, destination, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV):
            raise
        shutil.copy2(source, destination, follow_symlinks=False)
        if not os.path.islink(destination):
            with open(destination, "rb") as file:
                os.fsync(file.fileno())
    return destination
