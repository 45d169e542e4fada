"""Pauses Python's garbage collector while modules are imported."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collections_paused() -> Iterator[None]:
    """Has the garbage collector free nothing within the context.

    Imports make many lasting objects and hardly any garbage. The collector would visit all of them
    again and again: a fifth of the time of importing torch, and two fifths of transformers. After
    the context they count as old objects, which the collector visits seldom.
    """
    if not gc.isenabled():  # an outer context ends the pause, or the caller wants none at all
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() == 0:  # else the caller's frozen objects would be unfrozen
            gc.freeze()
            gc.unfreeze()  # to the oldest generation
        gc.enable()
