"""Settings in a file, by name: what `castor run --config` and castor.Config read and write."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from castor.errors import UsageError


def read_settings_file(path: Path) -> dict[str, Any]:
    """Names and values from a JSON file, or from a YAML one where its name does not end in .json.

    Raises:
        UsageError: It holds something else, or YAML and there is no pyyaml.
        OSError: It cannot be read.
    """
    text = path.read_text(encoding="utf-8")
    try:
        settings = json.loads(text) if path.suffix == ".json" else _from_yaml(text, path)
    except ValueError as error:
        raise UsageError(f"{path} is no JSON: {error}") from error
    if not isinstance(settings, dict):
        raise UsageError(f"{path} holds a {type(settings).__name__}: give names and values")
    return settings


def write_settings_file(path: Path, settings: Mapping[str, Any]) -> None:
    """Writes what read_settings_file reads.

    Args:
        path: Ends in .json for JSON; YAML otherwise.
        settings: Of numbers, strings, lists and dicts with strings as keys.

    Raises:
        UsageError: One is something else, or YAML is asked for and there is no pyyaml.
        OSError: It cannot be written.
    """
    for name, value in settings.items():
        try:
            kept = json.loads(json.dumps(value))
        except (TypeError, ValueError):
            kept = None
        if kept != value:
            raise UsageError(f"{path} cannot hold {name}={value!r}: files take what JSON does")
    if path.suffix == ".json":
        text = json.dumps(dict(settings), indent=2) + "\n"
    else:
        text = _yaml(path).safe_dump(dict(settings), sort_keys=False)
    path.write_text(text, encoding="utf-8")


def _from_yaml(text: str, path: Path) -> Any:
    yaml = _yaml(path)
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is no YAML: {error}") from error


def _yaml(path: Path) -> Any:
    try:
        import yaml  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        raise UsageError(
            f"{path}: YAML needs pyyaml; install it, or give a file that ends in .json"
        ) from None
    return yaml
