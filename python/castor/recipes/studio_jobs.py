"""The workspace of `castor studio`: its data, recipes and runs, and the commands it has started.

Everything is a file: a page that starts anew, or a second one, sees the same. Commands run in
sessions of their own, and go on when the studio ends.
"""

from __future__ import annotations

import contextlib
import html
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.text import Text

from castor.checkpoint.names import process_status
from castor.errors import UsageError
from castor.recipes.runs import LOG

_NAME = re.compile(r"\w[\w.-]{0,79}", re.ASCII)
_LAST_BYTES = 64 * 1024
"""Bytes of a log that are read: its end."""
_SHELL = """cd "$1" && job=$2 && shift 2
trap : TERM INT HUP
"$@" >"$job/log.txt" 2>&1
echo $? >"$job/status.new" && mv "$job/status.new" "$job/status\""""
"""Runs a command in a workspace, and notes its status.

A signal to the group ends the command alone: the shell waits for it."""


@dataclass(frozen=True)
class Job:
    """One command that the studio has started, in a folder of its own.

    The folder has `job.json` (the command and its process), `input.txt`, `log.txt`, and at the end
    `status`, which the command's shell writes.
    """

    folder: Path
    kind: str
    """Sub-command of castor: "train", "serve" and so on."""
    subject: str
    """Recipe, model or run that the command is about, as the page names it."""
    arguments: list[str]
    """Arguments of castor."""
    started: float
    """Time of the start, in seconds since 1970."""
    process: int
    """Process of the command's shell, which leads a session."""
    process_started: int | None
    """Start of that process, in ticks since the boot; None: it had ended at once."""

    @classmethod
    def read(cls, folder: Path) -> Job:
        """Returns the command of a folder."""
        return cls(folder, **json.loads((folder / "job.json").read_text(encoding="utf-8")))

    @property
    def command(self) -> str:
        """The command line, as a user would type it in the workspace."""
        return shlex.join(["castor", *self.arguments])

    @property
    def status(self) -> int | None:
        """Exit status of the command; None: it runs, or nobody noted how it ended."""
        try:
            return int((self.folder / "status").read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None

    @property
    def running(self) -> bool:
        """Whether the command runs; a process that got the same id later is not taken for it."""
        if self.status is not None:
            return False
        started = _started_at(self.process)
        return started is not None and started == self.process_started

    def state(self) -> str:
        """Returns the state in words."""
        running, status = self.running, self.status  # the status may appear in between
        if status == 0:
            return "finished"
        if status is not None:
            ended = status in (128 + signal.SIGTERM, 128 + signal.SIGINT)
            return "stopped" if ended else f"failed (exit status {status})"
        return "running" if running else "killed: nobody noted how it ended"

    def log(self) -> str:
        """Returns the end of what the command printed; of overwritten lines what stayed."""
        try:
            with (self.folder / "log.txt").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_BYTES))
                text = file.read().decode("utf-8", "replace")
        except FileNotFoundError:
            return ""
        return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))

    def stop(self) -> None:
        """Sends SIGTERM to the command: training saves a checkpoint first."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.killpg(self.process, signal.SIGTERM)


@dataclass(frozen=True)
class Workspace:
    """The folder of a studio. All its commands run in it, so that paths in recipes start there."""

    root: Path

    @classmethod
    def at(cls, root: Path) -> Workspace:
        """Returns the workspace in a folder, which is made where it is not there.

        Raises:
            OSError: The folder cannot be made or written.
        """
        root = root.expanduser().absolute()
        for name in ("data", "recipes", "runs", "jobs", "uploads", "chats", "evaluations"):
            (root / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        root.chmod(0o700)
        return cls(root)

    def listed(self, folder: str) -> list[str]:
        """Returns the paths of what a folder of the workspace holds, the newest first."""
        found = sorted((self.root / folder).iterdir(), key=lambda one: -one.stat().st_mtime)
        return [str(one.relative_to(self.root)) for one in found if not one.name.startswith(".")]

    def path(self, folder: str, name: str, suffix: str = "") -> Path:
        """Returns the path of a thing by its name.

        Raises:
            UsageError: The name is no plain name of a file.
        """
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"{name!r} cannot name a file; give letters, digits, '.', '_' and '-', a letter or "
                "a digit first"
            )
        return self.root / folder / f"{name}{suffix}"

    def add_data(self, uploaded: Path) -> Path:
        """Moves an uploaded file to the data, beside one of the same name, and returns its path.

        Raises:
            UsageError: The file is none that the page has uploaded.
        """
        if not uploaded.resolve().is_relative_to((self.root / "uploads").resolve()):
            raise UsageError(f"{uploaded} was not uploaded; choose the file in the page")
        stem = re.sub(r"[^\w.-]", "_", uploaded.stem, flags=re.ASCII).lstrip(".-")[:60] or "data"
        target, number = self.path("data", stem, uploaded.suffix), 2
        while target.exists():
            target = self.path("data", f"{stem}-{number}", uploaded.suffix)
            number += 1
        shutil.move(uploaded, target)
        return target

    def run_of(self, recipe: str) -> Path:
        """Returns the folder of a recipe's run: its output.dir, without checking the recipe.

        Raises:
            UsageError: The file names none.
        """
        import yaml  # type: ignore[import-untyped]

        try:
            document = yaml.safe_load((self.root / recipe).read_text(encoding="utf-8"))
            return self.root / Path(document["output"]["dir"]).expanduser()
        except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
            raise UsageError(f"{recipe} names no output.dir: {error}") from None

    def jobs(self, kind: str | None = None, subject: str | None = None) -> list[Job]:
        """Returns the commands that were started, the newest first."""
        found = [Job.read(one.parent) for one in (self.root / "jobs").glob("*/job.json")]
        return [
            one
            for one in sorted(found, key=lambda one: one.folder.name, reverse=True)
            if kind in (None, one.kind) and subject in (None, one.subject)
        ]

    def start(
        self,
        kind: str,
        subject: str,
        arguments: Sequence[str],
        *,
        text: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> Job:
        """Starts a command of castor.

        Args:
            kind: Sub-command, for the list of commands.
            subject: The recipe, model or run that it is about.
            arguments: Arguments of castor, the sub-command first.
            text: Input of the command.
            environment: Variables for it alone, which are written nowhere.
        """
        folder = self._new_folder()
        (folder / "input.txt").write_text(text, encoding="utf-8")
        started = time.time()
        with (folder / "input.txt").open("rb") as given:
            process = subprocess.Popen(
                ["sh", "-c", _SHELL, "sh", str(self.root), str(folder), sys.executable,
                 "-m", "castor", *arguments],
                stdin=given,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
                start_new_session=True,
            )  # fmt: skip
        job = Job(
            folder, kind, subject, list(arguments), started, process.pid, _started_at(process.pid)
        )
        facts = {name: value for name, value in vars(job).items() if name != "folder"}
        written = folder / "job.json.new"
        written.write_text(json.dumps(facts), encoding="utf-8")
        written.rename(folder / "job.json")
        threading.Thread(target=process.wait, daemon=True).start()
        return job

    def _new_folder(self) -> Path:
        jobs = self.root / "jobs"
        number = 1 + max((int(one.name) for one in jobs.iterdir()), default=0)
        while True:
            try:
                (jobs / f"{number:05d}").mkdir()
            except FileExistsError:  # another click was faster
                number += 1
            else:
                return jobs / f"{number:05d}"


def _started_at(process: int) -> int | None:
    """Returns when a process started, in ticks since the boot; None: it has ended."""
    state, started = process_status(process) or ("X", 0)
    return None if state in "ZX" else started


def entries(run: Path) -> list[dict[str, Any]]:
    """Returns the log of a run by its steps; of a step that was repeated, the last entry counts.

    Steps behind the checkpoint that a run went on from, and did not reach again yet, stay.
    """
    try:
        lines = (run / LOG).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    found: dict[tuple[int, bool, bool], dict[str, Any]] = {}
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:  # it is being written
            continue
        found[entry["step"], "loss" not in entry, "eval_loss" not in entry] = entry
    return [found[key] for key in sorted(found)]


# --- Shows files of `castor studio`: logs as HTML, figures of a run as tables and sentences -------

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
