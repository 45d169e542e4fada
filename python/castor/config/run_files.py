"""Tells the processes of `castor run` where they leave what the launcher reads at the end."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

DIRECTORY = "CASTOR_RUN_DIRECTORY"
"""Environment variable: a directory of the run, which the launcher removes."""
REPORT = "CASTOR_RUN_REPORT"
"""Environment variable: the file of `castor run --report`."""
BOOSTED = "boosted"
"""Name of a file that is there once a model has been boosted."""
PLAN_USED = "plan-used"
"""Name of a file that is there once a plugin has taken the layout of the plan."""
RECORD = "rank{rank}-{process}.json"
"""Name of the file of a process: what its models did."""


def run_directory() -> Path | None:
    """Returns the directory of the run; None: `castor run` has not started this process."""
    given = os.environ.get(DIRECTORY)
    return None if given is None else Path(given)


def report_file() -> Path | None:
    """Returns the file that `castor run --report` was given, if it was."""
    given = os.environ.get(REPORT)
    return None if given is None else Path(given)


def leave_mark(name: str) -> None:
    """Creates an empty file in the directory of the run, if there is one."""
    directory = run_directory()
    if directory is not None:
        with contextlib.suppress(OSError):  # the launcher is gone, and its directory
            (directory / name).touch()
