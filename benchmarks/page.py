# What `make bench` ends with: the records of the other scripts as one page with plots.
"""Renders benchmark results: `python benchmarks/page.py [--quick] [--results DIR]`, see --help."""

from __future__ import annotations

import argparse
import json
import sys
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from _machine import QUICK_RESULTS, RESULTS, ROOT
from _sections import SECTIONS, others

# The stylesheet is that of castor.report's page; the plots here are drawn beforehand.
_STYLE = """
.chart { display: block; width: 100%; max-width: 860px; margin: 10px 0 4px; }
.chart text { fill: var(--muted); font-size: 12px; }
.chart .title { fill: var(--ink); font-weight: 650; font-size: 13px; }
.chart .grid { stroke: var(--grid); } .chart .axis { stroke: var(--line); }
.chart .line { fill: none; stroke-width: 1.8; } .chart .spread { stroke: var(--ink); }
code { font-size: 12.5px; overflow-wrap: anywhere; }
"""
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>castor: benchmarks</title>
<style>
{style}
</style>
</head>
<body>
<main>
<header>
<h1>castor: benchmarks</h1>
<p>Each figure with the command that made it. Bars and ratios are medians, thin lines quartiles.</p>
</header>
{sections}
</main>
</body>
</html>
"""


def question(benchmark: str) -> str:
    """The first comment of a benchmark's script up to its baseline; empty if there is none."""
    script = ROOT / "benchmarks" / f"{benchmark}.py"
    if not script.exists():
        return ""
    words: list[str] = []
    for line in script.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#") or line.startswith("# Baseline"):
            break
        words += line.lstrip("# ").split()
    text = " ".join(words).removeprefix("Question: ")
    return text[:1].upper() + text[1:]


def origin(record: dict[str, Any]) -> str:
    """Command, machine, versions and commit of a record, as HTML."""
    machine = record["machine"]
    versions = ", ".join(f"{name} {v}" for name, v in machine["versions"].items() if v)
    commit = machine["commit"] or "no commit"
    if machine["uncommitted_changes"]:
        commit += " with uncommitted changes"
    about = (
        f"{machine['cpu']}, {machine['num_cpus']} cores, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB, Linux {machine['kernel']}, "
        f"load {machine['load_average_1min']:.1f} before it, huge pages "
        f"{machine.get('transparent_huge_pages')}; Python {machine['python']}, "
        f"{versions}; commit {commit}; {machine['date']}"
    )
    command = "python benchmarks/" + " ".join(record["command"])
    return f'<p class="note"><code>{escape(command)}</code><br>{escape(about)}</p>'


def section(record: dict[str, Any]) -> str:
    name = record["benchmark"]
    title, draw = SECTIONS.get(name, (name, others))
    return "\n".join(
        [
            f'<section class="card" id="{escape(name, quote=True)}">',
            f"<h2>{escape(title)}</h2>",
            f'<p class="note">{escape(question(name))}</p>',
            *draw(record),
            origin(record),
            "</section>",
        ]
    )


def read_records(directory: Path) -> list[dict[str, Any]]:
    """The records of a folder in the page's order.

    Raises:
        RuntimeError: There is none, or a file is no record of write_record.
    """
    records = []
    for path in sorted(directory.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(record, dict) or not {"benchmark", "command", "machine"} <= set(record):
            raise RuntimeError(f"{path} is no record of a benchmark: it lacks command or machine")
        records.append(record)
    if not records:
        raise RuntimeError(f"{directory} holds no results; `make bench` makes them")
    order = list(SECTIONS)

    def rank(record: dict[str, Any]) -> int:
        name = record["benchmark"]
        return order.index(name) if name in order else len(order)

    return sorted(records, key=rank)


def render(records: list[dict[str, Any]]) -> str:
    """The page's text."""
    sheet = resources.files("castor.report") / "page" / "page.css"
    style = sheet.read_text(encoding="utf-8") + _STYLE
    return _PAGE.format(style=style, sections="\n".join(section(record) for record in records))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="what --quick runs have written")
    parser.add_argument("--results", type=Path, help="default: benchmarks/results")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "bench" / "index.html")
    arguments = parser.parse_args()
    records = read_records(arguments.results or (QUICK_RESULTS if arguments.quick else RESULTS))
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(render(records), encoding="utf-8")
    print(f"{len(records)} benchmarks: {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
