"""A thread that warns of long waits for other ranks, and notices ranks that are lost."""

from __future__ import annotations

import atexit
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Protocol

import torch

from castor import _C

PATIENCE_SECONDS = 10.0
"""Seconds after which a rank that waits for others warns."""


class Link(Protocol):
    """A link to other ranks that is looked at about once a second."""

    def look(self) -> None:
        """Ends what waits for a rank which is lost."""


_LOOKS = 10
"""Number of checks of the waits, and of the other ranks, in that time."""
_NOT_THE_USERS = (f"{Path(__file__).parents[1]}/", f"{Path(torch.__file__).parent}/")
_registry: dict[str | tuple[str, type[Warning], int], int] = {}
_links: weakref.WeakSet[Link] = weakref.WeakSet()
_links_lock = threading.Lock()
_over = threading.Event()
_SECONDS_TO_END = 5.0
_served: set[int] = set()
"""Identifiers of threads that wait while another rank works for all."""


@cache
def watch() -> None:
    """Starts a thread that watches waits for other ranks; once per process."""
    thread = threading.Thread(target=_look, name="castor waits", daemon=True)
    thread.start()
    atexit.register(_end, thread)


def _end(thread: threading.Thread) -> None:
    """Ends the thread before Python ends.

    A daemon that takes Python's lock then is ended within destructors of C++, which aborts.
    """
    _over.set()
    thread.join(_SECONDS_TO_END)


def watch_link(link: Link) -> None:
    """Ends work of devices that waits for a rank which is lost, as long as `link` lives."""
    with _links_lock:
        _links.add(link)
    watch()


def waiting(rank: int, size: int, *, place: str, awaited: str) -> _C.RankWait:
    """Makes a context that reports a wait in code that is not castor's.

    Args:
        rank: Rank of this process.
        size: Number of ranks.
        place: Present action of this rank, for a message: "makes process groups".
        awaited: Name of the awaited rank or ranks, for the message.
    """
    return _C.RankWait(rank, size, place=place, awaited=awaited)


@contextmanager
def served_by_another() -> Iterator[None]:
    """Makes a context in which this thread waits without a warning: another rank works for all."""
    thread = threading.get_ident()
    known = thread in _served
    _served.add(thread)
    try:
        yield
    finally:
        if not known:
            _served.discard(thread)


def _look_at_links() -> None:
    """Looks at each link; a function of its own, so that no variable keeps one alive."""
    with _links_lock:
        links = list(_links)
    for link in links:
        link.look()


def _look() -> None:
    while not _over.wait(PATIENCE_SECONDS / _LOOKS):
        _look_at_links()
        if told := _C.long_wait(_LOOKS, served=list(_served)):
            _tell(*told)


def _tell(rank: int, size: int, place: str, awaited: str, last: str, thread: int) -> None:
    met = f"Last, all of them met where a rank {last}. " if last else ""
    message = (
        f"rank {rank} of {size} {place}, and has waited {PATIENCE_SECONDS:g} s there for {awaited};"
        f" it goes on waiting. {met}Passes, steps, saves and reads of optimizer states are calls "
        "of every rank: look whether those that are missing make it as well (not under "
        "'if rank == 0', and with as many batches), stand in a collective of the script's own "
        "(torch.distributed.barrier), or are busy with something else"
    )
    file, line = _line_of(thread)
    try:
        warnings.warn_explicit(message, RuntimeWarning, file, line, registry=_registry)
    except RuntimeWarning:  # warnings are errors, which cannot end a wait
        print(warnings.formatwarning(message, RuntimeWarning, file, line), file=sys.stderr)


def _line_of(thread: int) -> tuple[str, int]:
    """Returns (file, line) of user code that a thread is at; castor's threads: the main thread."""
    frames = sys._current_frames()
    main = threading.main_thread().ident
    frame = frames.get(thread) or (frames.get(main) if main else None)
    while frame and frame.f_back and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    return (frame.f_code.co_filename, frame.f_lineno) if frame else (__file__, 1)
