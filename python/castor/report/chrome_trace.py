"""The last step as Chrome trace events, which https://ui.perfetto.dev and chrome://tracing open.

Format: "Trace Event Format", Google, sections "Duration Events", "Counter Events" and "Metadata
Events": times are microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from castor.booster import Booster
from castor.checkpoint.files import os_errors, write_file
from castor.report.source import Source, source_of

PID = 1
MODULES, FETCHES, EVICTIONS, GRADIENTS, DEVICE = 1, 2, 3, 4, 5
_THREADS = {
    MODULES: "modules",
    FETCHES: "host to device: fetches",
    EVICTIONS: "device to host: evictions",
    GRADIENTS: "device to host: gradients",
    DEVICE: "modules on the device",
}
_TRACK = {"fetch": FETCHES, "eviction": EVICTIONS, "gradient": GRADIENTS}


def write_trace(path: str | Path, target: Booster | nn.Module) -> Path:
    """Writes the last finished step as a Chrome trace (JSON).

    Modules are slices named after them, fetches, evictions and gradient copies have tracks of their
    own, and device and host bytes are counters. A step that was timed by the clock of a GPU, as the
    first one is, has the modules a second time by that clock; its 0 is when the GPU came to the
    first module, behind the host's. For the trace that plans are made from, see
    Booster.save_trace.

    Args:
        path: The file; its folder exists.
        target: A Booster (the model it boosted last) or a boosted model.

    Returns:
        The path.

    Raises:
        UsageError: Nothing is boosted, or no step has finished.
        IoError: The file cannot be written; an older one is left as it was.
    """
    source = source_of(target)
    document = {
        "traceEvents": list(trace_events(source)),
        "displayTimeUnit": "ms",
        "otherData": {
            "model": source.model,
            "step": source.memory.steps,
            "device_budget_bytes": source.memory.device_budget_bytes,
        },
    }
    path = Path(path)
    with os_errors(path, "write"):
        write_file(path, [json.dumps(document).encode()])
    return path


def trace_events(source: Source) -> Iterator[dict[str, Any]]:
    """Metadata, then duration events, then counters."""
    yield _metadata("process_name", f"castor: {source.model}", MODULES)
    for thread, name in _THREADS.items():
        if thread == DEVICE and not source.step.device_times:
            continue
        yield _metadata("thread_name", name, thread)
        yield {**_metadata("thread_sort_index", "", thread), "args": {"sort_index": thread}}
    step = source.step
    for span in step.spans():
        yield _slice(
            source.modules[span.module], span.phase, MODULES, span.start_ns, span.end_ns, {}
        )
    for span in step.device_spans():
        name = source.modules[span.module]
        yield _slice(name, span.phase, DEVICE, span.start_ns, span.end_ns, {})
    if step.end_ns > step.update_begin_ns:
        yield _slice("optimizer.step", "optimizer", MODULES, step.update_begin_ns, step.end_ns, {})
    for transfer in step.transfers:
        chunk = step.chunks[transfer.chunk]
        arguments = {
            "chunk": transfer.chunk,
            "cause": transfer.cause,
            "bytes": transfer.bytes,
            "wait_us": transfer.wait_ns / 1000,
            "parameters": [source.params[i] for i in chunk.params[:16]],
        }
        yield _slice(
            f"chunk {transfer.chunk}",
            transfer.kind,
            _TRACK[transfer.kind],
            transfer.start_ns,
            transfer.start_ns + transfer.submit_ns,
            arguments,
        )
    fixed = sum(step.payload_bytes("device").values())
    for sample in step.memory():
        device = {"chunks": fixed + sample.slot_bytes, "non-model": sample.nonmodel_bytes}
        yield _counter("device bytes", sample.time_ns, device)
        yield _counter("host bytes", sample.time_ns, {"chunks": sample.host_bytes})


def _metadata(name: str, value: str, thread: int) -> dict[str, Any]:
    return {"ph": "M", "pid": PID, "tid": thread, "name": name, "args": {"name": value}}


def _slice(
    name: str, category: str, thread: int, start_ns: int, end_ns: int, arguments: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": PID,
        "tid": thread,
        "name": name,
        "cat": category,
        "ts": start_ns / 1000,
        "dur": (end_ns - start_ns) / 1000,
        "args": arguments,
    }


def _counter(name: str, time_ns: int, values: dict[str, int]) -> dict[str, Any]:
    return {"ph": "C", "pid": PID, "name": name, "ts": time_ns / 1000, "args": values}
