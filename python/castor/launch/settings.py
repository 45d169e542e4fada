"""Reads the settings with which `castor run` boosts what a script trains."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from castor.config.files import read_settings_file
from castor.config.settings import SIZES
from castor.errors import UsageError

_BUDGETS = [name for name in SIZES if name.endswith("_memory")]
_LEAST_BUDGET = 2**20
"""Least bytes of a budget that a file may give without a unit; smaller numbers mean GiB."""
_WORDS = {"True": True, "False": False, "None": None}
"""Values in Python's notation; all others are in JSON's."""
_OPTIONS = {"nvme_path": "--nvme"}


def read_settings(
    config: Path | None, options: Mapping[str, Any], given: Sequence[str]
) -> dict[str, Any] | None:
    """Reads GeminiPlugin's arguments from a file, from options, and from NAME=VALUE.

    Args:
        config: JSON or YAML file; options and values override it.
        options: Arguments with an option of their own; None: the option was not given.
        given: Texts NAME=VALUE. Values are JSON; a value that is no JSON is a text.

    Returns:
        The arguments; None if nothing was given.

    Raises:
        UsageError: A setting cannot be read, is given twice, or is a size without a unit.
        OSError: The file cannot be read.
    """
    settings = {} if config is None else read_settings_file(config)
    for name in _BUDGETS:
        number = settings.get(name)
        if isinstance(number, int | float) and number < _LEAST_BUDGET:
            raise UsageError(
                f"{config}: {name} is {number!r}, which has no unit; write '{number}GiB', or "
                f"'{number}B' if bytes are meant"
            )
    asked = {name: value for name, value in options.items() if value is not None}
    named: dict[str, Any] = {}
    for one in given:
        name, separator, value = one.partition("=")
        if not separator or not name:
            raise UsageError(f"--set {one}: give NAME=VALUE, such as --set max_prefetch=2")
        if name in asked or name in named:
            other = _OPTIONS.get(name, f"--{name.replace('_', '-')}") if name in asked else "--set"
            raise UsageError(f"{name} is given twice, by {other} and by --set; give it once")
        named[name] = _read_value(name, value)
    if config is None and not asked and not named:
        return None
    return settings | asked | named


def _read_value(name: str, text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return text if name in SIZES and not isinstance(value, str) else value


def check_paths(settings: Mapping[str, Any]) -> None:
    """Checks that the files and directories in settings exist, and can be written if needed.

    Raises:
        UsageError: A file or directory does not exist, or cannot be written.
    """
    given = settings.get("nvme_path")
    for path in [given] if isinstance(given, str) else given or []:
        if not Path(path).is_dir():
            raise UsageError(
                f"nvme_path: there is no directory {path}; make it, or give one on an NVMe device"
            )
        if not os.access(path, os.W_OK):
            raise UsageError(
                f"nvme_path: {path} cannot be written; give a directory of your own on the device"
            )
    trace = settings.get("trace_file")
    if isinstance(trace, str) and not Path(trace).is_file():
        raise UsageError(
            f"trace_file: there is no file {trace}; booster.save_trace writes one, or leave it out"
        )
