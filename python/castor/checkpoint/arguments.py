"""Reads Booster's arguments for checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from castor.config import parse_bytes


def absolute(path: str | Path) -> Path:
    """Returns the absolute path, which stays valid when the working directory changes.

    Raises:
        TypeError: It is no path.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"the directory is a {type(path).__name__}; give a path as a string or a Path. save "
            "and load take it first, and other methods after what they save or load"
        )
    return Path(path).resolve()


def shard_bytes(shard: bool, size_per_shard: int | str) -> int | None:
    """Returns the bytes of tensors that one file may hold; None: no limit.

    Raises:
        ValueError: `size_per_shard` is no size, or an integer below 1 MiB, which was probably
            meant in MiB, as in Colossal-AI.
    """
    max_bytes = parse_bytes(size_per_shard, "size_per_shard")
    if isinstance(size_per_shard, int) and size_per_shard < 2**20:
        raise ValueError(
            f"size_per_shard={size_per_shard} is a number of bytes here, and of MiB in "
            f"Colossal-AI: write '{size_per_shard}MiB', or '{size_per_shard}B'"
        )
    return max_bytes if shard else None


def check_only(**arguments: tuple[Any, Any]) -> None:
    """Checks arguments that have one supported value, each given as (value, supported value).

    Raises:
        NotImplementedError: An argument has another value.
    """
    for name, (value, supported) in arguments.items():
        if value != supported:
            raise NotImplementedError(f"{name}={value!r} is not supported; {supported!r} is")
