"""What Booster's arguments for checkpoints mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from castor.config import parse_bytes


def absolute(path: str | Path) -> Path:
    """The path, wherever the process goes meanwhile."""
    return Path(path).resolve()


def shard_bytes(shard: bool, size_per_shard: int | str) -> int | None:
    """Bytes of tensors that one file may hold; None: all of them."""
    max_bytes = parse_bytes(size_per_shard, "size_per_shard")
    return max_bytes if shard else None


def check_only(**arguments: tuple[Any, Any]) -> None:
    """Takes arguments, given as (value, the one that is supported).

    Raises:
        NotImplementedError: One has another value.
    """
    for name, (value, supported) in arguments.items():
        if value != supported:
            raise NotImplementedError(f"{name}={value!r} is not supported; {supported!r} is")
