"""The figures of a training while it runs: lines or a live view in the terminal, and a file."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from transformers import TrainerCallback

from castor.runtime.boosted_model import all_boosted
from castor.runtime.engine import Engine

_MEMORY = {"device": "device_bytes", "host": "host_bytes", "NVMe": "nvme_bytes"}
"""Tiers, by the figure that has their bytes."""


class Reporter(TrainerCallback):
    """Tells of a training on its first rank.

    Each entry of the Trainer's log becomes a line of JSON in a file, and a line of text. In a
    terminal a view of the last step stays below these instead: a bar, loss, tokens per second,
    memory by tier and the time that is left.

    An entry of the file has the step, the Trainer's figures, and castor's of the last step: tokens
    per second, and bytes on the device (the step's peak), the host and NVMe. A run that goes on
    from a checkpoint repeats the steps behind it: the last entry of a step counts.

    Args:
        file: File of the entries, which are appended.
        console: Place of the lines.
    """

    def __init__(self, file: Path, console: Console) -> None:
        self._file, self._console = file, console
        self._view: Progress | None = None
        self._begin, self._ranks = (0, 0.0), 1
        self._last: dict[str, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Opens the view in a terminal."""
        self._begin = state.global_step, time.monotonic()
        self._ranks = args.world_size
        # Rich takes FORCE_COLOR for a terminal too, and a view needs one that moves its cursor.
        moves = self._console.file.isatty() and not self._console.is_dumb_terminal
        if state.is_world_process_zero and moves:
            self._view = Progress(
                MofNCompleteColumn(), BarColumn(24), TextColumn("{task.fields[said]}"),
                console=self._console, auto_refresh=False,
            )  # fmt: skip
            self._view.add_task(
                "", total=state.max_steps, completed=state.global_step, said="the first step"
            )
            self._view.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Shows the step in the view."""
        if self._view is not None:
            said = described(self._last | _of_castor(self._ranks)) | {"left": self._left(state)}
            text = "  ".join(f"{name} {value}".strip() for name, value in said.items())
            # Entries of a Trainer are figures: nothing in them is markup.
            self._view.update(self._view.task_ids[0], completed=state.global_step, said=text)
            self._view.refresh()

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Writes an entry."""
        if not state.is_world_process_zero:
            return
        logs: dict[str, Any] = given["logs"]
        entry = {"step": state.global_step, "of_steps": state.max_steps, "time": time.time()}
        entry |= _of_castor(self._ranks)
        with self._file.open("a", encoding="utf-8") as out:
            out.write(json.dumps({**entry, **logs}) + "\n")
        if "loss" in logs:
            self._last = {name: logs[name] for name in ("loss", "grad_norm") if name in logs}
            if self._view is not None:
                return
            said = described(logs | entry) | {"left": self._left(state)}
        elif "train_runtime" in logs:
            said = {
                "trained in": _clock(logs["train_runtime"]),
                "mean loss": f"{logs['train_loss']:.4g}",
            }
        else:
            said = {name: f"{value:.4g}" for name, value in logs.items() if _of_held_out_rows(name)}
        text = "  ".join(f"{name} {value}".strip() for name, value in said.items())
        self._console.print(escape(f"step {state.global_step:,}/{state.max_steps:,}  {text}"))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Closes the view."""
        self.close()

    def close(self) -> None:
        """Closes the view, also of a training that failed."""
        if self._view is not None:
            self._view.stop()
            self._view = None

    def _left(self, state: Any) -> str:
        """Returns the time that the remaining steps take at the pace so far."""
        step, began = self._begin
        taken = state.global_step - step
        if taken <= 0:
            return "unknown"
        pace = (time.monotonic() - began) / taken
        return _clock(pace * (state.max_steps - state.global_step))


def described(entry: Mapping[str, Any]) -> dict[str, str]:
    """Returns the figures of an entry in words, by their names."""
    said = {}
    for name, key in {"loss": "loss", "grad_norm": "grad_norm", "lr": "learning_rate"}.items():
        if key in entry:
            said[name] = f"{float(entry[key]):.4g}"
    if "tokens_per_second" in entry:
        said["tokens/s"] = f"{entry['tokens_per_second']:,.0f}"
    for tier, key in _MEMORY.items():
        if entry.get(key):
            said[tier] = f"{entry[key] / 2**20:,.1f} MiB"
    if "device_bytes" in entry:
        said["device"] += f" of {entry['device_budget_bytes'] / 2**20:,.1f}"
    return said


def _of_castor(ranks: int) -> dict[str, Any]:
    """Returns castor's figures of the last step; none before the first.

    The memory is this rank's. The speed is that of all ranks, which have batches of one size.
    """
    trained = (one for one in all_boosted() if isinstance(one, Engine) and one.num_steps)
    engine = next(trained, None)
    if engine is None or not engine.history.records:
        return {}
    record, report = engine.history.records[-1], engine.report()
    found: dict[str, Any] = {
        "device_bytes": record.peak_device_bytes,
        "device_budget_bytes": report.device_budget_bytes,
        "host_bytes": report.host_bytes,
        "nvme_bytes": report.nvme_bytes,
    }
    if record.tokens and record.seconds:
        found["tokens_per_second"] = ranks * record.tokens / record.seconds
    return found


def _of_held_out_rows(name: str) -> bool:
    """Whether a figure is of the held-out rows, and not of their number or their time."""
    return name.startswith("eval_") and not name.endswith(("_runtime", "_second", "_num_tokens"))


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
