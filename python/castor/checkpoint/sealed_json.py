"""JSON documents that carry their own checksum, each with one canonical text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import xxhash

from castor.errors import CheckpointError

_SEAL = "checksum"


def canonical(document: Any) -> bytes:
    """Returns the canonical text of a document: sorted keys, no spaces, ASCII, no NaN."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii")


def seal(document: dict[str, Any]) -> bytes:
    """Returns the canonical text of `document` with its XXH3-128 added under "checksum"."""
    return canonical({**document, _SEAL: xxhash.xxh3_128_hexdigest(canonical(document))})


def unseal(raw: bytes, path: Path, format_name: str) -> dict[str, Any]:
    """Returns the document whose text `seal` made, after a check of its checksum.

    Args:
        raw: Contents of the file.
        path: Path of the file, for errors.
        format_name: Value that the document's "format" must have.

    Raises:
        CheckpointError: A byte differs from what was written, or the format is another one.
    """
    try:
        document = json.loads(raw)
        checksum = document.pop(_SEAL)
        intact = raw == canonical({**document, _SEAL: checksum})
        intact = intact and checksum == xxhash.xxh3_128_hexdigest(canonical(document))
    # A damaged text may be any JSON, or none.
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        intact = False
    if not intact:
        raise CheckpointError(
            f"{path} is damaged: its {len(raw)} bytes do not match the checksum in it; take an "
            "older checkpoint or another copy"
        )
    if document.get("format") != format_name:
        raise CheckpointError(
            f"{path} has format {document.get('format')!r}; this version reads {format_name!r}"
        )
    return dict(document)


def read_sealed(path: Path, format_name: str) -> dict[str, Any]:
    """Reads a sealed document from a file.

    Raises:
        CheckpointError: The file is missing, unreadable, damaged or of another format.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    return unseal(raw, path, format_name)
