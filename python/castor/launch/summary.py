"""Ends `castor run` with a summary of the run, and a file of all figures."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from castor.config.files import BOOSTED, DIRECTORY, PLAN_USED, RECORD, REPORT
from castor.errors import UsageError

_SUFFIXES = (".json", ".html", ".htm")
_MOST_MODELS = 4
"""Largest number of models in the summary, which has those with the most steps."""


def check_report(report: Path) -> None:
    """Checks that the file of a report can be written.

    Raises:
        UsageError: The file cannot be written, or its suffix is not .json, .html or .htm.
    """
    if report.suffix not in _SUFFIXES:
        raise UsageError(
            f"--report {report}: give a file that ends in .json, for the figures, or in .html, for "
            "a page"
        )
    if report.is_dir():
        raise UsageError(f"--report {report} is a directory; give a file in it")
    folder = report.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"--report {report}: there is no directory {folder}; make it")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"--report {report}: {folder} cannot be written; give another file")


class RunRecord:
    """The figures that the processes of a run leave in its directory."""

    def __init__(self, directory: Path, report: Path | None) -> None:
        self._directory = directory
        self._report = report
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        """Prints a line of `castor run`."""
        self._console.print(f"[bold]castor run:[/bold] {escape(text)}")

    def end(self, *, status: int, boosts: bool, plan: Path | None, told: bool) -> None:
        """Prints the summary, writes the report, and warns of arguments that were not used.

        Args:
            status: Exit status of the script.
            boosts: Whether castor run was to boost the script's models.
            plan: File of the plan; None: none was given.
            told: Whether castor run has warned already that nothing would be boosted.
        """
        models = self._models()
        for model in sorted(models, key=lambda one: -int(one["steps"]))[:_MOST_MODELS]:
            self.say("\n".join(model["summary"]))
        boosted = (self._directory / BOOSTED).exists()
        if status == 0 and not boosted and not boosts and not told:
            self.say(
                "no model was boosted: the script ran in plain PyTorch. --device-memory 24GiB, or "
                "another setting, trains it under castor"
            )
        if status == 0 and plan is not None and not (self._directory / PLAN_USED).exists():
            self.say(
                f"the layout of {plan} was not used: no HybridParallelPlugin('auto') was made in "
                "the script"
            )
        if self._report is not None:
            self._write(models, status)

    def _models(self) -> list[dict[str, Any]]:
        """Returns the figures of this machine's first rank, of all its processes."""
        found: list[dict[str, Any]] = []
        rank = min((_rank_of(file) for file in self._directory.glob("rank*.json")), default=0)
        for file in sorted(self._directory.glob(RECORD.format(rank=rank, process="*"))):
            found += json.loads(file.read_text(encoding="utf-8"))
        return found

    def _write(self, models: list[dict[str, Any]], status: int) -> None:
        report = self._report
        assert report is not None
        if not models:
            self.say(f"{report} was not written: no boosted model finished a step")
            return
        if report.suffix == ".json":
            shown = [{k: v for k, v in one.items() if k != "summary"} for one in models]
            document = {"status": status, "models": shown}
            report.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        if report.is_file():  # rank 0 of all ranks writes the page
            self.say(f"report: {report}")


@contextmanager
def recording(report: Path | None, environment: Mapping[str, str]) -> Iterator[RunRecord]:
    """Makes a context in which started processes leave their figures in a directory.

    Args:
        report: File of --report; None: none was given.
        environment: Further environment variables for the processes.
    """
    directory = Path(tempfile.mkdtemp(prefix="castor-record-"))
    names = {DIRECTORY: str(directory), **environment}
    if report is not None:
        names[REPORT] = str(report.absolute())
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield RunRecord(directory, report)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _rank_of(file: Path) -> int:
    return int(file.name.removeprefix("rank").partition("-")[0])
