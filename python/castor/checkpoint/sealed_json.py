"""JSON documents that carry their own checksum: one text for each document, any change shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import xxhash

from castor.errors import CheckpointError

_SEAL = "checksum"


def canonical(document: Any) -> bytes:
    """The one text of a document: sorted keys, no spaces, ASCII, no NaN."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii")


def seal(document: dict[str, Any]) -> bytes:
    """The canonical text of `document` with its XXH3-128 in it, under "checksum"."""
    return canonical({**document, _SEAL: xxhash.xxh3_128_hexdigest(canonical(document))})


def unseal(raw: bytes, path: Path, format_name: str) -> dict[str, Any]:
    """Reads what `seal` wrote.

    Args:
        raw: Contents of the file.
        path: For errors.
        format_name: What the document's "format" must be.

    Raises:
        CheckpointError: Any byte differs from what was written, or it is of another format.
    """
    try:
        document = json.loads(raw)
        checksum = document.pop(_SEAL)
        intact = raw == canonical({**document, _SEAL: checksum})
        intact = intact and checksum == xxhash.xxh3_128_hexdigest(canonical(document))
    # Whatever JSON a damaged text comes to, it is not what was written.
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
        CheckpointError: The file is missing, unreadable or damaged.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    return unseal(raw, path, format_name)
