"""Names of unfinished things on disk, and whether the process that left them still lives."""

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
    """The name under which `name` is being written by this process."""
    return f".tmp-castor-{name}-{_owner()}-{next(_numbers)}"


def displaced_name(name: str) -> str:
    """The name that the old `name` has while the new one takes its place."""
    return f".old-castor-{name}-{_owner()}-{next(_numbers)}"


def _owner() -> str:
    return f"{os.getpid()}-{_start_ticks(os.getpid())}"


def _start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot: numbers of processes are used again."""
    try:
        status = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The second field, the name in parentheses, may hold anything.
    return int(status[status.rindex(b")") + 2 :].split()[19])


def target_of(leftover: Path) -> tuple[str, str] | None:
    """("tmp" or "old", the name it stands for), or None for what castor did not name."""
    match = _PATTERN.fullmatch(leftover.name)
    return (match[1], match[2]) if match else None


def is_own(leftover: Path) -> bool:
    """Whether this process made it."""
    match = _PATTERN.fullmatch(leftover.name)
    return match is not None and f"{match[3]}-{match[4]}" == _owner()


def is_abandoned(leftover: Path) -> bool:
    """Whether nobody works on a temporary or displaced file or directory any more.

    A process of another container is not seen in /proc, but the lock on its directory is.
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
    except OSError:  # a file system without locks: the process number has to do
        return True
    finally:
        os.close(descriptor)
    return True


def lock_directory(path: Path) -> int:
    """Tells other processes that `path` is being written; returns the descriptor to close."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with suppress(OSError):  # a file system without locks: the process number has to do
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor
