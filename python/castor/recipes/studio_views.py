"""Shows files of `castor studio`: logs as HTML, figures of a run as tables and sentences."""

from __future__ import annotations

import html
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.text import Text

from castor.recipes.studio_jobs import Job

_KINDS = {"color(1)": "red", "color(2)": "counted", "color(3)": "yellow"}
"""Classes of the terminal's colours."""
CSS = """
.castor-log, .castor-log .html-container { padding: 0 !important; }
.castor-log .frame { max-height: 26rem; overflow: auto; border-radius: 8px;
  background: var(--background-fill-secondary); border: 1px solid var(--border-color-primary); }
.castor-log .end { display: flex; flex-direction: column-reverse; }
.castor-log pre { white-space: pre-wrap; overflow-wrap: anywhere; font: 12px/1.5 var(--font-mono);
  margin: 0; padding: 12px; color: var(--body-text-color); }
.castor-log .command, .castor-log .dim { opacity: 0.65; }
.castor-log .counted { color: #15803d; font-weight: 600; }
.castor-log .red { color: #dc2626; }
.castor-log .yellow { color: #b45309; }
.dark .castor-log .counted { color: #4ade80; }
.dark .castor-log .yellow { color: #fbbf24; }
.dark .castor-log .red { color: #f87171; }
"""
CURVES: tuple[tuple[str, dict[str, str], int], ...] = (
    ("Loss", {"loss": "training", "eval_loss": "held-out rows"}, 1),
    ("Learning rate", {"learning_rate": "learning rate"}, 1),
    ("Gradient norm", {"grad_norm": "gradient norm"}, 1),
    ("Tokens per second", {"tokens_per_second": "tokens/s"}, 1),
    (
        "Memory by tier (MiB)",
        {"device_bytes": "device (peak)", "host_bytes": "host", "nvme_bytes": "NVMe"},
        2**20,
    ),
)
"""Curves: title, series by the log's figure, and the unit that figures are divided by."""


def as_html(text: str, command: str = "", *, at_end: bool = False) -> str:
    """Returns what a command printed as HTML, with its colours.

    Args:
        text: The output.
        command: The command line above it; empty: none.
        at_end: Whether a long output is shown from its end, not from its beginning.
    """
    parts = [f'<span class="command">$ {html.escape(command)}</span>\n'] if command else []
    for piece, style, _ in Text.from_ansi(text).render(Console()):
        kind = _KINDS.get(style.color.name, "") if style and style.color else ""
        kind = kind or ("dim" if style and style.dim else "")
        escaped = html.escape(piece)
        parts.append(f'<span class="{kind}">{escaped}</span>' if kind else escaped)
    kind = "frame end" if at_end else "frame"
    return f'<div class="{kind}" tabindex="0"><pre>{"".join(parts)}</pre></div>'


def evaluations(folder: Path) -> pd.DataFrame:
    """Returns a row for each figure of the JSON files in a folder, and a column for each file."""
    columns = {}
    for file in sorted(folder.glob("*.json")):
        document = json.loads(file.read_text(encoding="utf-8"))
        figures = pd.json_normalize(document.get("results", document)).select_dtypes("number")
        columns[file.stem] = dict(zip(figures.columns, *figures.to_numpy(object), strict=True))
    return pd.DataFrame(columns).rename_axis("figure").reset_index()


def frame(found: Sequence[dict[str, Any]], series: dict[str, str], unit: float) -> pd.DataFrame:
    """Returns the columns step, value and series of a curve."""
    rows = [
        {"step": entry["step"], "value": entry[name] / unit, "series": title}
        for name, title in series.items()
        for entry in found
        if name in entry and (name != "nvme_bytes" or entry[name])
    ]
    return pd.DataFrame(rows, columns=["step", "value", "series"])


def progress(job: Job | None, found: Sequence[dict[str, Any]]) -> str:
    """Returns the state of a training in a sentence."""
    if job is None:
        return "Not started."
    state = f"**{job.state().capitalize()}**"
    steps = [entry for entry in found if "loss" in entry]
    if not steps:
        return f"{state}."
    last, first = steps[-1], next((one for one in steps if one["time"] >= job.started), steps[-1])
    said = f"{state}: step {last['step']} of {last['of_steps']}, loss {last['loss']:.3f}"
    held_out = [entry["eval_loss"] for entry in found if "eval_loss" in entry]
    if held_out:
        said += f", {held_out[-1]:.3f} on held-out rows"
    taken = last["step"] - first["step"]
    if job.running and taken > 0:
        pace = (last["time"] - first["time"]) / taken
        minutes = pace * (last["of_steps"] - last["step"]) / 60
        said += (
            f", {minutes:.0f} minutes left" if minutes < 90 else f", {minutes / 60:.1f} hours left"
        )
    return said + "."


def described(job: Job) -> tuple[str, str]:
    """Returns a job as a choice: its words, and the name of its folder."""
    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(job.started))
    return f"{started} {job.command}: {job.state()}", job.folder.name
