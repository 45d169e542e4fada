"""What the ranks that share a boosted model do together outside its passes and steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from castor.runtime.engine import Engine
from castor.runtime.model_parts import OwnParts
from castor.runtime.ranks import Result


def gather(engine: Engine | None, value: Any) -> list[Any]:
    """What every rank gives, in rank order; picklable.

    Args:
        engine: Of the model; None: this process is alone.
        value: This rank's.

    Raises:
        Error: A rank is gone.
        UsageError: A rank does something else; every rank raises it.
    """
    if engine is None or engine.ranks is None:
        return [value]
    if engine.ranks.rank == 0:
        engine.session.end_service()
    else:
        engine.session.serve_states()
    return engine.ranks.gather(value)


def on_first(engine: Engine | None, work: Callable[[], Result], parts_of: OwnParts) -> Result:
    """Runs `work` on rank 0, for all; the others give what it reads of their optimizer states.

    Args:
        engine: Of the model; None: this process is alone.
        work: What is done once.
        parts_of: Where ranks have parts of the model: this one's.

    Returns:
        What `work` returned, on every rank.

    Raises:
        Exception: What `work` raised on rank 0.
        UsageError: A rank does something else; every rank raises it.
    """
    if engine is None:
        return work()
    once, parts = work, engine.parts
    if parts is not None:
        once = partial(parts.on_first, work, parts_of)
    if engine.ranks is None:
        return once()
    session = engine.session
    return engine.ranks.on_first(once, serve=session.serve_states, end_service=session.end_service)
