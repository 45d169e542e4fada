"""The folder of a run of a Trainer: its recipe, its checkpoints and its evaluations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

RECIPE = "recipe.yaml"
"""File of a run's folder: the resolved recipe, with the versions of the libraries."""
LOG = "log.jsonl"
"""File of a run's folder: an entry of JSON for each step that was logged."""
EVALUATIONS = "evaluations"
"""Folder in a run's folder: results of lm-eval's tasks."""


def versions(libraries: Iterable[str]) -> dict[str, str]:
    """Returns the versions of those libraries that are installed."""
    found = {}
    for name in libraries:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def checkpoints(run: Path) -> list[Path]:
    """Returns the folders checkpoint-N of a run by their steps, complete or not."""
    found = [
        (int(steps), path)
        for path in run.glob("checkpoint-*")
        if (steps := path.name.removeprefix("checkpoint-")).isdecimal()
    ]
    return [path for _, path in sorted(found)]
