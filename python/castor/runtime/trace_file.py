"""Traces as JSON, so that a later run starts with a plan."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from castor.config.event_names import EVENT_KINDS
from castor.errors import UsageError
from castor.runtime.spec import ModelSpec

_FORMAT = "castor-trace-1"

Events = list[tuple[int, int, int, int]]


def write_trace(path: Path, events: Events, modules: Sequence[str]) -> None:
    """Writes a trace with the names of the modules it refers to."""
    document = {
        "format": _FORMAT,
        "modules": [*modules],
        "kinds": EVENT_KINDS,
        "columns": ["kind", "id", "nonmodel_bytes", "time_ns"],
        "events": events,
    }
    path.write_text(json.dumps(document))


def read_trace(path: Path, spec: ModelSpec) -> Events:
    """Reads a trace recorded for this very model.

    Raises:
        UsageError: The file is no trace, is damaged, or is a trace of another model.
    """
    try:
        document = json.loads(path.read_text())
        known = document.get("format") == _FORMAT
        modules = document.get("modules", [])
        events = [(int(k), int(i), int(b), int(t)) for k, i, b, t in document.get("events", [])]
    except (AttributeError, TypeError, ValueError) as error:
        raise UsageError(f"{path} is not a castor trace: {error}") from error
    if not known:
        raise UsageError(f"{path} is not a trace of format {_FORMAT}; record it again")
    if modules != [module.name for module in spec.modules]:
        raise UsageError(
            f"{path} was recorded for another model: it names {len(modules)} modules "
            f"with parameters, this model has {len(spec.modules)}; record it again"
        )
    for event in events:
        if not _is_event(event, len(modules)):
            raise UsageError(f"{path} holds a damaged trace, with event {event}; record it again")
    return events


def _is_event(event: tuple[int, int, int, int], num_modules: int) -> bool:
    kind, position, nonmodel_bytes, time_ns = event
    if not 0 <= kind < len(EVENT_KINDS) or min(position, nonmodel_bytes, time_ns) < 0:
        return False
    if max(nonmodel_bytes, time_ns) >= 2**63:
        return False
    # A grad_ready event names a chunk, the others a module.
    return position < (2**32 if EVENT_KINDS[kind] == "grad_ready" else num_modules)
