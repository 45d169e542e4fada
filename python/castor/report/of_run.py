"""Leaves what a process of `castor run` did, for the summary with which the launcher ends."""

from __future__ import annotations

import atexit
import json
import os
import weakref
from pathlib import Path
from typing import Any

from castor.checkpoint.files import write_file
from castor.config.files import BOOSTED, RECORD, leave_mark, report_file, run_directory
from castor.errors import Error
from castor.report.html import write_page
from castor.report.source import RECENT_STEPS, Source, duration, source_of_engine
from castor.runtime.boosted_model import BoostedModel, listen
from castor.runtime.engine import Engine
from castor.runtime.report import size


def follow_run() -> None:
    """Follows every model that this process boosts, if `castor run` has started it."""
    directory = run_directory()
    if directory is not None:
        _Follower(directory).watch()


class _Follower:
    """Keeps the last figures of each boosted model, and writes them when the process ends."""

    def __init__(self, directory: Path) -> None:
        self._process = os.getpid()
        self._rank = os.environ.get("RANK", "0")
        self._file = directory / RECORD.format(rank=self._rank, process=self._process)
        page = report_file()
        self._page = page if page and page.suffix in PAGES and self._rank == "0" else None
        self._most_steps = 0
        self._boosted: weakref.WeakSet[BoostedModel] = weakref.WeakSet()
        self._models: list[dict[str, Any]] = []
        self._over = False

    def watch(self) -> None:
        listen(self._see)
        atexit.register(self._finish)

    def _see(self, boosted: BoostedModel) -> None:
        leave_mark(BOOSTED)
        self._boosted.add(boosted)
        if isinstance(boosted, Engine):
            boosted.at_end = self._take

    def _take(self, engine: Engine) -> None:
        """Notes the figures of a model of which a step has finished."""
        if self._over or os.getpid() != self._process:  # in a forked child the model is its own
            return
        engine.at_end = None
        try:
            source = source_of_engine(engine)
        except Error:  # it has not finished a step, or is broken, which has been said
            return
        self._models.append(figures(source))
        if self._page and source.totals.steps > self._most_steps:
            self._most_steps = source.totals.steps
            write_page(self._page, source)

    def _finish(self) -> None:
        if os.getpid() != self._process:
            return
        for boosted in list(self._boosted):
            if isinstance(boosted, Engine):
                self._take(boosted)
            else:  # torch's own classes train it
                self._models.append({"summary": [_of_torch(boosted)], "steps": boosted.num_steps})
        self._over = True
        if self._models and self._file.parent.is_dir():
            write_file(self._file, [json.dumps(self._models, default=str).encode()])


PAGES = (".html", ".htm")
"""Suffixes of files of `castor run --report` that become a page; .json gives the figures."""


def figures(source: Source) -> dict[str, Any]:
    """Returns what the summary of a run and its report hold of a model.

    Args:
        source: What the model did.
    """
    rate = source.rate()
    return {
        "model": source.model,
        "steps": source.memory.steps,
        "step_seconds": source.step_seconds(),
        "rate": rate and rate[0],
        "rate_unit": rate and rate[1],
        "waited_seconds": source.waited_ns() / 1e9,
        "last_step_seconds": source.step.end_ns / 1e9,
        "loss": source.last_loss(),
        "memory": source.memory.as_dict(),
        "summary": _lines(source),
    }


def _lines(source: Source) -> list[str]:
    memory, seconds, rate = source.memory, source.step_seconds(), source.rate()
    speed = "of unknown time" if seconds is None else f"of {duration(int(seconds * 1e9))}"
    if rate is not None:
        ranks = " of all ranks" if memory.ranks > 1 else ""
        speed += f" (median of the last {RECENT_STEPS}), {rate[0]:,.0f} {rate[1]}{ranks}"
    waited, step = source.waited_ns(), max(1, source.step.end_ns)
    lines = [
        f"{source.model}: {_steps(memory.steps)} {speed}",
        f"  device: at most {size(memory.peak_device_bytes)} of a budget of "
        f"{size(memory.device_budget_bytes)}",
        f"  host:   {size(memory.host_bytes)} of {size(memory.host_budget_bytes)}"
        + (f", NVMe: {size(memory.nvme_bytes)}" if memory.nvme_bytes else ""),
        f"  waits:  {duration(waited)} of the last step ({waited / step:.1%}) for chunks that no "
        "computing hid",
    ]
    if memory.skipped_steps:
        lines.append(f"  {_steps(memory.skipped_steps)} skipped: a gradient was not finite")
    return lines


def _of_torch(boosted: BoostedModel) -> str:
    report = boosted.report()
    trained_by = getattr(report, "trained_by", "torch's own classes")
    return f"a model that {trained_by} trains, without a budget: {_steps(report.steps)}"


def _steps(count: int) -> str:
    return f"{count:,} step{'' if count == 1 else 's'}"
