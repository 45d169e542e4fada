"""The report as one self-contained page: no network, no fonts, no libraries."""

from __future__ import annotations

import html
import json
import math
import time
from importlib import resources
from pathlib import Path
from typing import Any

from torch import nn

from castor import _C
from castor.booster import Booster
from castor.checkpoint.files import os_errors, write_file
from castor.config.event_names import EVENT_KINDS, TRANSFER_CAUSES
from castor.report.source import GUIDANCE, PAYLOAD_NAMES, Source, source_of
from castor.report.verdict import verdict_of
from castor.runtime.report import size

KINDS = ("fetch", "eviction", "gradient")
_SCRIPTS = ("base.js", "step.js", "transfers.js", "training.js", "page.js")


def write_html(path: str | Path, target: Booster | nn.Module) -> Path:
    """Writes a page to look into the last finished step and the run so far.

    It begins with a verdict and advice. Then come device memory over the events of the step
    against the budget, host memory, where each chunk was, what moved and what waited for it, and
    loss, speed, learning rate and gradient norm over the steps. The page is one file, and loads
    nothing.

    Args:
        path: The file; its folder exists.
        target: A Booster (the model it boosted last) or a boosted model.

    Returns:
        The path.

    Raises:
        UsageError: Nothing is boosted, or no step has finished.
        IoError: The file cannot be written; an older one is left as it was.
    """
    path = Path(path)
    write_page(path, source_of(target))
    return path


def write_page(path: Path, source: Source) -> None:
    """Writes what write_html does.

    Raises:
        IoError: The file cannot be written; an older one is left as it was.
    """
    with os_errors(path, "write"):
        write_file(path, [page(source).encode()])


def page(source: Source) -> str:
    """The page's text."""
    files = resources.files("castor.report") / "page"
    memory = source.memory
    parts = {
        "title": html.escape(
            f"castor: {source.model}, {source.parameters()}, step {memory.steps:,} within "
            f"{size(memory.device_budget_bytes)}"
        ),
        "style": (files / "page.css").read_text(encoding="utf-8"),
        "script": "\n".join((files / name).read_text(encoding="utf-8") for name in _SCRIPTS),
        "data": embedded_json(page_data(source)),
    }
    text = (files / "page.html").read_text(encoding="utf-8")
    for name, part in parts.items():
        text = text.replace(f"<!--{name}-->", part, 1)
    return text


def embedded_json(data: object) -> str:
    """JSON that may stand inside a script element: no name in it can end the element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def page_data(source: Source) -> dict[str, Any]:
    """Returns the data that the page's script draws: ns, bytes, and tables as columns."""
    step, memory = source.step, source.memory
    samples, on_device = step.memory(), step.on_device()
    verdict = verdict_of(source)
    return {
        "model": source.model,
        "parameters": source.parameters(),
        "setting": source.setting(),
        "written": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "verdict": {"good": verdict.good, "text": verdict.text, "advice": verdict.advice},
        "version": _C.__version__,
        "step": memory.steps,
        "guidance": GUIDANCE[step.guidance],
        "complete": step.complete,
        "headline": source.headline(),
        "budget": {"device": memory.device_budget_bytes, "host": memory.host_budget_bytes},
        "peak": step.peak_device_bytes,
        "endNs": step.end_ns,
        "timeName": source.time_name,
        "payloadNames": PAYLOAD_NAMES,
        "payloads": {tier: step.payload_bytes(tier) for tier in ("device", "host", "nvme")},
        "phases": step.phases(),
        "modules": source.modules,
        "params": source.params,
        "chunks": [
            {
                "bytes": chunk.capacity_bytes,
                "used": chunk.used_bytes,
                "dtype": chunk.dtype,
                "trainable": chunk.trainable,
                "onDevice": i in on_device,
                "params": chunk.params,
            }
            for i, chunk in enumerate(step.chunks)
        ],
        "eventKinds": [kind.replace("_", " ") for kind in EVENT_KINDS],
        "events": {
            "kind": [event.kind for event in step.events],
            "id": [event.id for event in step.events],
            "time": [event.time_ns for event in step.events],
        },
        "samples": {
            "time": [sample.time_ns for sample in samples],
            "event": [sample.event for sample in samples],
            "slots": [sample.slot_bytes for sample in samples],
            "nonmodel": [sample.nonmodel_bytes for sample in samples],
            "host": [sample.host_bytes for sample in samples],
        },
        "residency": [[time for interval in row for time in interval] for row in step.residency()],
        "kinds": KINDS,
        "causes": TRANSFER_CAUSES,
        "transfers": {
            "kind": [KINDS.index(transfer.kind) for transfer in step.transfers],
            "cause": [TRANSFER_CAUSES.index(transfer.cause) for transfer in step.transfers],
            "event": [transfer.event for transfer in step.transfers],
            "chunk": [transfer.chunk for transfer in step.transfers],
            "time": [transfer.start_ns for transfer in step.transfers],
            "submit": [transfer.submit_ns for transfer in step.transfers],
            "wait": [transfer.wait_ns for transfer in step.transfers],
            "bytes": [transfer.bytes for transfer in step.transfers],
        },
        "history": _history(source),
        "totals": {"steps": source.totals.steps, "skipped": source.totals.skipped_steps},
    }


def _history(source: Source) -> dict[str, Any]:
    records = source.records
    tokens = any(record.tokens for record in records)
    shards = source.engine.settings.data_shards
    counts = [shards * (record.tokens if tokens else record.samples) for record in records]
    return {
        "unit": "tokens/s" if tokens else "samples/s",
        "step": [record.step for record in records],
        "loss": [_finite(record.loss) for record in records],
        "rate": [
            _finite(n / record.seconds) if record.seconds and n else None
            for n, record in zip(counts, records, strict=True)
        ],
        "seconds": [_finite(record.seconds) for record in records],
        "learningRate": [_finite(record.learning_rate) for record in records],
        "gradientNorm": [_finite(record.gradient_norm) for record in records],
        "skipped": [record.step for record in records if record.skipped],
        "peak": [record.peak_device_bytes for record in records],
        "h2d": [record.h2d_bytes for record in records],
        "d2h": [record.d2h_bytes for record in records],
    }


def _finite(value: float | None) -> float | None:
    """JSON knows neither NaN nor infinity; the page shows a gap."""
    return value if value is not None and math.isfinite(value) else None
