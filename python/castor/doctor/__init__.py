"""`castor doctor`: what this installation found on the machine, and what to change for speed.

It looks and measures, for a few seconds, and changes nothing; of a directory that it is to measure
too it takes a GiB for 10 seconds. Whether castor works is what
`castor selftest` says.
"""

from __future__ import annotations

import dataclasses
import json

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from castor.doctor.facts import Facts, Gpu, NumaNode, NvmePath, gather, measure_nvme
from castor.doctor.findings import Finding, findings

__all__ = [
    "Facts",
    "Finding",
    "Gpu",
    "NumaNode",
    "NvmePath",
    "as_json",
    "findings",
    "gather",
    "measure_nvme",
    "show",
]


def show(facts: Facts, console: Console) -> None:
    """Prints every finding, and below those that cost speed what to change."""
    found = findings(facts)
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in found:
        mark = "[green]ok[/green]    " if finding.change is None else "[yellow]change[/yellow]"
        table.add_row(f"{mark} [bold]{finding.name}[/bold]", escape(finding.value))
        if finding.change is not None:
            table.add_row("", f"[yellow]{escape(finding.change)}[/yellow]")
    console.print(table)
    count = sum(finding.change is not None for finding in found)
    console.print(f"castor doctor: {count} of {len(found)} findings can be improved")


def as_json(facts: Facts) -> str:
    """The facts and the findings as a JSON object with the keys "facts" and "findings".

    Sizes are bytes, bandwidths bytes per second; a finding has the keys name, value and change,
    which is null where nothing costs speed.
    """
    document = {
        "facts": dataclasses.asdict(facts),
        "findings": [dataclasses.asdict(finding) for finding in findings(facts)],
    }
    return json.dumps(document, indent=2, allow_nan=False)
