"""Says where this process has waited long for other ranks: whether they will come is not known."""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from castor import _C

PATIENCE_SECONDS = 10.0
"""After which a rank that waits for others says so."""

_LOOKS = 10
"""In that time, at what waits."""
_NOT_THE_USERS = (f"{Path(__file__).parents[1]}/", f"{Path(torch.__file__).parent}/")
_registry: dict[str | tuple[str, type[Warning], int], int] = {}
_served: set[int] = set()
"""Threads."""


@cache
def watch() -> None:
    """From now on waits for other ranks are looked at, on a thread of its own."""
    threading.Thread(target=_look, name="castor waits", daemon=True).start()


def waiting(rank: int, size: int, *, place: str, awaited: str) -> _C.RankWait:
    """For a wait through what is not castor's: tells of it while its context is entered.

    Args:
        rank: Of this process.
        size: How many ranks there are.
        place: What it does, for a message: "makes process groups".
        awaited: Whom it waits for.
    """
    return _C.RankWait(rank, size, place=place, awaited=awaited)


@contextmanager
def served_by_another() -> Iterator[None]:
    """Within it this thread waits while another rank works for all, however long that takes."""
    thread = threading.get_ident()
    known = thread in _served
    _served.add(thread)
    try:
        yield
    finally:
        if not known:
            _served.discard(thread)


def _look() -> None:
    while True:
        time.sleep(PATIENCE_SECONDS / _LOOKS)
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
    except RuntimeWarning:  # as errors, which cannot end a wait
        print(warnings.formatwarning(message, RuntimeWarning, file, line), file=sys.stderr)


def _line_of(thread: int) -> tuple[str, int]:
    """Names the user's line that a thread is at; for castor's threads, the main thread's."""
    frames = sys._current_frames()
    main = threading.main_thread().ident
    frame = frames.get(thread) or (frames.get(main) if main else None)
    while frame and frame.f_back and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    return (frame.f_code.co_filename, frame.f_lineno) if frame else (__file__, 1)
