"""Keeps what `castor estimate` has printed: the same question is answered without torch."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "transformers", "peft")
"""Packages of which an answer depends, beside castor."""
_MOST_ANSWERS = 256


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The output of a command, and its exit status."""

    text: str
    status: int


class AnswerCache:
    """The answer to one question, in a directory of the user's.

    The question is the configs' text, all options, the versions of what answers, and castor's own
    files: where one of them changes there is no answer yet.
    """

    def __init__(self, configs: Sequence[Path], options: Mapping[str, Any]) -> None:
        """Describes the question.

        Raises:
            OSError: A config cannot be read.
        """
        question = {
            "configs": [config.read_text(encoding="utf-8") for config in configs],
            "options": dict(options),
            "python": sys.version,
            "packages": [_version(name) for name in _PACKAGES],
            "castor": _castor_files(),
        }
        text = json.dumps(question, sort_keys=True, default=str)
        name = hashlib.sha256(text.encode()).hexdigest()
        caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        self._file = caches / "castor" / "estimates" / f"{name}.json"

    def find(self) -> Answer | None:
        """Returns the answer, if it is known."""
        try:
            kept = json.loads(self._file.read_text(encoding="utf-8"))
            return Answer(text=str(kept["text"]), status=int(kept["status"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def keep(self, answer: Answer) -> None:
        """Keeps the answer; nothing happens where the directory cannot be written."""
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            part = self._file.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps({"text": answer.text, "status": answer.status}))
            part.replace(self._file)
            files = sorted(self._file.parent.glob("*.json"), key=lambda path: path.stat().st_mtime)
            for old in files[:-_MOST_ANSWERS]:
                old.unlink(missing_ok=True)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _castor_files() -> list[tuple[str, int, int]]:
    """Returns the name, size and time of change of each file of castor."""
    root = Path(__file__).parent
    files = [path for path in root.rglob("*") if path.suffix in (".py", ".json", ".so")]
    return sorted(
        (str(path.relative_to(root)), (found := path.stat()).st_size, found.st_mtime_ns)
        for path in files
    )
