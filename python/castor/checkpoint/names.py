"""Names of unfinished files and directories, which tell whether their process still lives."""

from __future__ import annotations

import fcntl
import itertools
import os
import re
from contextlib import suppress
from pathlib import Path

_PATTERN = re.compile(r"\.(tmp|old)-castor-(.+)-(\d+)-(\d+)-(\d+)", re.DOTALL)
_numbers = itertools.count()


def temporary_name(name: str) -> str:
    """Returns the name under which this process writes `name`."""
    return f".tmp-castor-{name}-{_owner()}-{next(_numbers)}"


def displaced_name(name: str) -> str:
    """Returns the name that the old `name` has while the new one takes its place."""
    return f".old-castor-{name}-{_owner()}-{next(_numbers)}"


def _owner() -> str:
    return f"{os.getpid()}-{_start_ticks(os.getpid())}"


def _start_ticks(pid: int) -> int | None:
    """Returns when a process started, in clock ticks since boot; None: there is no such process.

    The start time tells processes of the same number apart, because numbers are reused.
    """
    status = process_status(pid)
    return None if status is None else status[1]


def process_status(pid: int) -> tuple[str, int] | None:
    """Returns a process's state, such as "S" or "Z", and its start in clock ticks since boot.

    None: there is no such process.
    """
    try:
        status = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The second field, the name in parentheses, may hold anything.
    fields = status[status.rindex(b")") + 2 :].split()
    return fields[0].decode(), int(fields[19])


def target_of(leftover: Path) -> tuple[str, str] | None:
    """Returns ("tmp" or "old", the name it stands for); None: the name is not one of castor's."""
    match = _PATTERN.fullmatch(leftover.name)
    return (match[1], match[2]) if match else None


def is_own(leftover: Path) -> bool:
    """Whether this process made a temporary or displaced file or directory."""
    match = _PATTERN.fullmatch(leftover.name)
    return match is not None and f"{match[3]}-{match[4]}" == _owner()


def is_abandoned(leftover: Path) -> bool:
    """Whether nobody works on a temporary or displaced file or directory any more.

    A process in another container is not visible in /proc. Its lock on the file or directory is.
    """
    match = _PATTERN.fullmatch(leftover.name)
    if match is None or _start_ticks(int(match[3])) == int(match[4]):
        return False
    try:
        descriptor = os.open(leftover, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: only the process number tells
        return True
    finally:
        os.close(descriptor)
    return True


def lock_directory(path: Path) -> int:
    """Locks a directory, so that other processes see that it is being written.

    Returns:
        The descriptor that holds the lock; closing it ends the lock.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    lock(descriptor)
    return descriptor


def lock(descriptor: int) -> None:
    """Locks an open file or directory, so that is_abandoned sees it from other containers."""
    with suppress(OSError):  # a file system without locks: only the process number tells
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
