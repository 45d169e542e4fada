"""Finds the config of a model that somebody has named: a file, a folder, or a name of the hub."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

from castor.config.names import NUMBERS_OF_TOKENS

_CONFIG = "config.json"
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def find_config(given: str | Path) -> Path:
    """Finds a config.json; nothing is downloaded.

    Args:
        given: The file, a folder that has one, or a name of the Hugging Face hub such as
            "meta-llama/Llama-3.1-8B", of which the local cache has a snapshot.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The folder has no config, or the cache knows no model of that name.
    """
    path = Path(given)
    if path.is_file():
        return path
    if path.is_dir():
        if (path / _CONFIG).is_file():
            return path / _CONFIG
        raise ValueError(f"the folder {path} has no {_CONFIG}; give a model's folder, or its file")
    name = str(given)
    if path.suffix == ".json" or not _HUB_NAME.fullmatch(name):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    cache = _hub_cache()
    found = _snapshot(cache / f"models--{name.replace('/', '--')}")
    if found is None:
        raise ValueError(
            f"there is no file or folder {name}, and the Hugging Face cache ({cache}) has no model "
            f"of that name; give a {_CONFIG}, or fetch it: hf download {name} {_CONFIG}"
        )
    return found


def most_tokens(config: Path) -> int | None:
    """Returns the most tokens of a sample that a config.json names; None: it names no number.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not JSON.
    """
    document: Any = json.loads(config.read_text(encoding="utf-8"))
    parts = [document, document.get("text_config")] if isinstance(document, dict) else []
    numbers = [
        part.get(name) for part in parts if isinstance(part, dict) for name in NUMBERS_OF_TOKENS
    ]
    return min((n for n in numbers if isinstance(n, int) and n > 0), default=None)


def _hub_cache() -> Path:
    """Returns where huggingface_hub keeps models: its own rules, without importing it."""
    if given := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(given).expanduser()
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    home = os.environ.get("HF_HOME")
    return (Path(home).expanduser() if home else caches / "huggingface") / "hub"


def _snapshot(folder: Path) -> Path | None:
    """Returns the config of the main revision of a cached model, else of the newest snapshot."""
    main = folder / "refs" / "main"
    if main.is_file():
        config = folder / "snapshots" / main.read_text(encoding="utf-8").strip() / _CONFIG
        if config.is_file():
            return config
    found = sorted(folder.glob(f"snapshots/*/{_CONFIG}"), key=lambda path: path.stat().st_mtime)
    return found[-1] if found else None
