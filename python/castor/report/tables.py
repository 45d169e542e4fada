"""The tables of the report's text. Imports rich: only what prints imports this."""

from __future__ import annotations

import io
from collections import defaultdict

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from castor.report.source import GUIDANCE, Source, duration
from castor.runtime.report import size

_MAX_WAITS = 5


def render(source: Source, width: int) -> str:
    """The text of `summary`, in so many columns."""
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False)
    console.print(
        f"{source.model}, step {source.memory.steps:,}: {GUIDANCE[source.step.guidance]}",
        markup=False,
    )
    console.print(_headline(source))
    console.print(_phases(source))
    waits = _waits(source)
    if waits is not None:
        console.print(waits)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines())


def _headline(source: Source) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    for row in source.headline():
        table.add_row(*row)
    return table


def _phases(source: Source) -> Table:
    """Time of each phase, what came in and went out in it, and how long it waited."""
    table = Table("phase", box=None, pad_edge=False)
    for heading in (source.time_name, "fetched", "sent to the host", "waited"):
        table.add_column(heading, justify="right")
    step = source.step
    rows: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    phases = step.phases()
    for phase, start, end in phases:
        rows[phase][0] += end - start
    for transfer in step.transfers:
        during = next((p for p, _, end in phases if transfer.start_ns < end), phases[-1][0])
        fetched = transfer.kind == "fetch"
        rows[during][1 if fetched else 2] += transfer.bytes
        rows[during][3] += transfer.stall_ns if fetched else 0
    for name, (time_ns, fetched_bytes, sent_bytes, stall_ns) in rows.items():
        table.add_row(
            name, duration(time_ns), size(fetched_bytes), size(sent_bytes), duration(stall_ns)
        )
    return table


def _waits(source: Source) -> Table | None:
    """The modules that waited longest for their chunks in the last step."""
    waited: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for transfer in source.step.transfers:
        if transfer.kind == "fetch" and transfer.cause == "demand":
            entry = waited[source.module_at(transfer.event)]
            entry[0] += transfer.stall_ns
            entry[1] += 1
            entry[2] += transfer.bytes
    if not waited:
        return None
    table = Table("waited most", box=None, pad_edge=False)
    for heading in ("time", "fetches", "bytes"):
        table.add_column(heading, justify="right")
    longest = sorted(waited.items(), key=lambda item: (-item[1][0], item[0]))[:_MAX_WAITS]
    for module, (stall_ns, fetches, num_bytes) in longest:
        table.add_row(escape(module), duration(stall_ns), str(fetches), size(num_bytes))
    return table
