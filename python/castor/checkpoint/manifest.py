"""Manifests, which list each file of a directory with size and checksum and are written last."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from castor.checkpoint.container import read_header
from castor.checkpoint.documents import read_sealed, seal
from castor.checkpoint.files import FileEntry, checksum_of, write_file
from castor.errors import CheckpointError

RUN_MANIFEST = "manifest.json"
"""Name of the manifest in a directory of booster.save; it lists the subdirectories' manifests."""

PART_MANIFEST = "castor-manifest.json"
"""Name of the manifest in a model's or an optimizer's directory, where other programs keep files
too."""

_FORMAT = "castor-manifest-1"

Entries = Mapping[str, FileEntry]


def write_manifest(
    directory: Path, name: str, entries: Entries, about: Mapping[str, Any] | None = None
) -> FileEntry:
    """Writes the manifest of `directory`.

    Args:
        directory: Directory of the files.
        name: File name of the manifest.
        entries: Entry of each file, by path relative to the directory.
        about: Other facts for the manifest, by name: see read_tied and read_hub.

    Returns:
        The entry of the manifest itself.

    Raises:
        OSError: The disk refuses.
    """
    document: dict[str, Any] = {
        "format": _FORMAT,
        "files": {key: vars(entry) for key, entry in entries.items()},
    }
    document.update({key: value for key, value in (about or {}).items() if value})
    return write_file(directory / name, [seal(document)])


def read_manifest(directory: Path, name: str) -> dict[str, FileEntry]:
    """Returns the entries of a manifest, by path relative to the directory.

    Raises:
        CheckpointError: The manifest is missing or damaged.
    """
    document = read_sealed(directory / name, _FORMAT)
    return {key: FileEntry(**entry) for key, entry in document["files"].items()}


def read_tied(directory: Path, name: str) -> dict[str, str]:
    """Maps each state_dict key that is not in a model's files to the key that has its tensor.

    Raises:
        CheckpointError: The manifest is missing or damaged.
    """
    return dict(read_sealed(directory / name, _FORMAT).get("tied", {}))


def read_hub(directory: Path, name: str) -> dict[str, Any] | None:
    """Reads the layout of save_pretrained, as castor.checkpoint.hub_names.record_of wrote it.

    Returns:
        The record. None for a model that is not transformers', or that a castor without such
        records wrote.

    Raises:
        CheckpointError: The manifest is missing or damaged.
    """
    found: dict[str, Any] | None = read_sealed(directory / name, _FORMAT).get("hub")
    return found


def check_sizes(directory: Path, name: str) -> None:
    """Checks that every file is there with its size, also in subdirectories that have a manifest.

    Reads no file but the manifests.

    Raises:
        CheckpointError: A file is missing or cut short, or a manifest is damaged.
    """
    for key, entry in read_manifest(directory, name).items():
        path = directory / key
        _check_size(path, entry)
        if path.name == PART_MANIFEST:
            check_sizes(path.parent, PART_MANIFEST)


def verify(directory: Path, name: str) -> None:
    """Reads all files that a manifest lists, and compares their checksums.

    Does the same in subdirectories that have a manifest.

    Raises:
        CheckpointError: A file differs. The message names it, and in safetensors the tensor.
    """
    entries = read_manifest(directory, name)
    for key, entry in entries.items():
        try:
            verify_file(directory / key, entry)
        except CheckpointError as error:
            if name != PART_MANIFEST:
                raise
            raise CheckpointError(
                f"{error}. If another program rewrote the directory on purpose, delete "
                f"{directory / name}"
            ) from error
    for key in entries:
        path = directory / key
        if path.name == PART_MANIFEST:
            verify(path.parent, PART_MANIFEST)


def verify_file(path: Path, entry: FileEntry) -> None:
    """Compares one file with its entry.

    Raises:
        CheckpointError: The file differs, or cannot be read.
    """
    _check_size(path, entry)
    try:
        if checksum_of(path) == entry.checksum:
            return
        where = _damaged_part(path, entry)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    raise CheckpointError(
        f"{path} is damaged{where}: its checksum is not the one it was written with; take an older "
        "checkpoint or another copy"
    )


def _check_size(path: Path, entry: FileEntry) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise CheckpointError(
            f"{path} belongs to the checkpoint and cannot be read: {error.strerror}"
        ) from error
    if size != entry.size:
        raise CheckpointError(
            f"{path} was cut short or changed: it has {size} bytes and was written with "
            f"{entry.size}"
        )


def _damaged_part(path: Path, entry: FileEntry) -> str:
    """Returns words for messages that name the damaged tensor of a file; empty: unknown."""
    if not entry.tensors:
        return ""
    try:
        stored = read_header(path)
    except CheckpointError:
        return " in its header"
    for name, checksum in entry.tensors.items():
        if name not in stored:
            return f" in its header (tensor '{name}' is gone)"
        if checksum_of(path, stored[name].start, stored[name].end) != checksum:
            return f" in tensor '{name}'"
    return " in its header"
