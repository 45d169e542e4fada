"""Learning-rate schedulers as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from castor.checkpoint.documents import decode, encode, read_sealed, seal
from castor.checkpoint.files import OVERHEAD_BYTES, check_room, fsync_directory, os_errors
from castor.checkpoint.files import write_file as _write_file
from castor.checkpoint.staging import remove_leftovers
from castor.errors import CheckpointError

_FORMAT = "castor-lr-scheduler-1"


def scheduler_document(scheduler: Any) -> dict[str, Any]:
    """Returns a scheduler's class and state, as JSON.

    Raises:
        CheckpointError: The scheduler has no state_dict, or its state holds a value that JSON
            cannot; the message names the key.
    """
    if not hasattr(scheduler, "state_dict"):
        raise CheckpointError(f"the lr_scheduler is a {type(scheduler).__name__}: no state_dict")
    state = scheduler.state_dict()
    return {"class": type(scheduler).__name__, "state": encode(state, "lr_scheduler state")}


def scheduler_state(document: dict[str, Any], scheduler: Any, path: Path) -> Any:
    """Returns the state in a document, for the scheduler's load_state_dict.

    Raises:
        CheckpointError: The state is that of another class.
    """
    if document["class"] != type(scheduler).__name__:
        raise CheckpointError(
            f"{path} holds the state of a {document['class']}, the lr_scheduler is a "
            f"{type(scheduler).__name__}"
        )
    return decode(document["state"])


def save_lr_scheduler(scheduler: Any, path: Path) -> None:
    """Writes a scheduler to one JSON file; see Booster.save_lr_scheduler.

    Raises:
        CheckpointError: See scheduler_document.
        IoError: The disk refuses; the file that was there is untouched.
    """
    raw = seal({"format": _FORMAT, **scheduler_document(scheduler)})
    with os_errors(path, "write", len(raw)):
        remove_leftovers(path.parent)
        check_room(path, len(raw) + OVERHEAD_BYTES)
        _write_file(path, [raw])
        fsync_directory(path.parent)


def load_lr_scheduler(scheduler: Any, path: Path) -> None:
    """Loads the file that save_lr_scheduler wrote into a scheduler.

    Raises:
        CheckpointError: The file is missing, damaged or that of another class of scheduler.
    """
    scheduler.load_state_dict(scheduler_state(read_sealed(path, _FORMAT), scheduler, path))
