"""Sizes, bandwidths and paths as people write them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}
_BINARY_UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_BITS = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT])?b(?:it)?(?:/s|ps)\s*")
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]i?B?|B)\s*", re.IGNORECASE)
_NUMBER = re.compile(r"\s*[0-9]+(?:\.[0-9]+)?\s*")


def parse_bytes(value: int | str, name: str) -> int:
    """Reads a size.

    Args:
        value: Bytes as an int, or a string with a unit such as "300MiB", "24GiB", "2GB", "512B".
        name: The argument's name, for errors.

    Returns:
        Bytes, at least 1.

    Raises:
        TypeError: `value` is neither an int nor a string.
        ValueError: The string is no size, it has no unit, or the size is not positive.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(f"{name} is {value!r}; give bytes as an int, or a string such as '24GiB'")
    if isinstance(value, int):
        size = value
    else:
        match = _SIZE.fullmatch(value)
        if _NUMBER.fullmatch(value):
            number = value.strip()
            raise ValueError(
                f"{name} is {value!r}, which has no unit; write '{number}GiB', or '{number}B' if "
                "bytes are meant"
            )
        if match is None:
            raise ValueError(
                f"{name} is {value!r}; write a size such as '300MiB', '24GiB' or '2GB'"
            )
        unit = match[2].upper().removesuffix("B").replace("I", "i")
        size = int(float(match[1]) * (_UNITS | _BINARY_UNITS)[unit])
    if size <= 0:
        raise ValueError(f"{name} is {value!r}; it must be more than 0 bytes")
    return size


def parse_bandwidth(value: int | str, name: str) -> int:
    """Reads a bandwidth.

    Args:
        value: Bytes per second, or a string such as "25GB/s", or "400Gb/s" for bits.
        name: The argument's name, for errors.

    Returns:
        Bytes per second, at least 1.

    Raises:
        TypeError: `value` is neither an int nor a string.
        ValueError: The string is no bandwidth, or it is not positive.
    """
    if not isinstance(value, str):
        return parse_bytes(value, name)
    if match := _BITS.fullmatch(value):
        return parse_bytes(int(float(match[1]) * _UNITS[match[2] or ""] / 8), name)
    size = value.strip().removesuffix("/s")
    if size == value.strip() or "b" in value or _SIZE.fullmatch(size) is None:
        raise ValueError(
            f"{name} is {value!r}; write a bandwidth such as '25GB/s', or '400Gb/s' for bits"
        )
    return parse_bytes(size, name)


def parse_paths(value: str | Path | Sequence[str | Path] | None, name: str) -> tuple[Path, ...]:
    """Reads one directory or several.

    Args:
        value: A path, a sequence of paths, or None for none.
        name: The argument's name, for errors.

    Returns:
        The paths, absolute.

    Raises:
        TypeError: `value` is neither a path nor a sequence of paths.
        ValueError: The sequence is empty.
    """
    if value is None:
        return ()
    paths = [value] if isinstance(value, str | Path) else value
    if not isinstance(paths, list | tuple) or not all(isinstance(p, str | Path) for p in paths):
        raise TypeError(f"{name} is {value!r}; give a directory, or a list of directories")
    if not paths:
        raise ValueError(f"{name} is empty; give a directory, or leave it out")
    return tuple(Path(path).absolute() for path in paths)
