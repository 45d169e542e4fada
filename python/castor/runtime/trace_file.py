"""Traces as JSON, so that a later run starts with a plan."""

from __future__ import annotations

import json
from pathlib import Path

from castor.errors import UsageError
from castor.runtime.spec import ModelSpec

_FORMAT = "castor-trace-1"
_KINDS = ("forward_enter", "forward_exit", "backward_enter", "grad_ready")

Events = list[tuple[int, int, int, int]]


def write_trace(path: Path, events: Events, spec: ModelSpec) -> None:
    """Writes a trace with the names of the modules it refers to."""
    document = {
        "format": _FORMAT,
        "modules": [module.name for module in spec.modules],
        "kinds": _KINDS,
        "columns": ["kind", "id", "nonmodel_bytes", "time_ns"],
        "events": events,
    }
    path.write_text(json.dumps(document))


def read_trace(path: Path, spec: ModelSpec) -> Events:
    """Reads a trace recorded for this very model.

    Raises:
        UsageError: The file is no trace, or one of another model.
    """
    try:
        document = json.loads(path.read_text())
        known = document.get("format") == _FORMAT
        events = [(int(k), int(i), int(b), int(t)) for k, i, b, t in document.get("events", [])]
    except (AttributeError, TypeError, ValueError) as error:
        raise UsageError(f"{path} is not a castor trace: {error}") from error
    if not known:
        raise UsageError(f"{path} is not a trace of format {_FORMAT}; record it again")
    if document["modules"] != [module.name for module in spec.modules]:
        raise UsageError(
            f"{path} was recorded for another model: it names {len(document['modules'])} modules "
            f"with parameters, this model has {len(spec.modules)}; record it again"
        )
    return events
