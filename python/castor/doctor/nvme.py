"""Measures a directory that is to be the NVMe tier."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass

from castor import io_bench

FILE_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class NvmePath:
    """A directory and its device."""

    path: str
    direct: bool
    """Transfers go past the page cache (O_DIRECT)."""
    file: str
    """The file that was measured on, and how it is opened: O_DIRECT, or buffered and why."""
    engine: str
    """Name and settings of the I/O engine."""
    free_bytes: int
    """Free bytes for this user, before the file was made."""
    block_bytes: int
    """With `depth`, the setting with the least memory in flight within 5% of the best mixed
    bandwidth: what `castor io-bench` suggests."""
    depth: int
    read_bytes_per_second: float
    """At that setting, as the next two."""
    write_bytes_per_second: float
    mixed_bytes_per_second: float
    """Half reads and half writes, both counted."""
    full_duplex: bool
    """Reading and writing at once is clearly faster than one after the other."""


def measure_nvme(
    path: str | os.PathLike[str], *, file_bytes: int = FILE_BYTES, seconds: float = 0.3
) -> NvmePath:
    """Measures a directory with a file of its own, for about 10 seconds.

    Args:
        path: A directory on the device.
        file_bytes: Size of the file, 4 MiB or more. It is removed afterwards.
        seconds: Of each of the 27 measurements.

    Raises:
        castor.IoError: The directory cannot be used, has no room, or the device failed.
        OSError: The directory does not exist.
    """
    free = shutil.disk_usage(path).free
    report = io_bench.measure(path, file_bytes=file_bytes, seconds=seconds)
    setting = report.suggested()
    rates = {mix: report.at(mix, setting.block_bytes, setting.depth) for mix in io_bench.MIXES}
    return NvmePath(
        path=os.fspath(path),
        direct=report.direct,
        file=report.file,
        engine=setting.engine,
        free_bytes=free,
        block_bytes=setting.block_bytes,
        depth=setting.depth,
        read_bytes_per_second=rates["read"].bytes_per_second,
        write_bytes_per_second=rates["write"].bytes_per_second,
        mixed_bytes_per_second=rates["mixed"].bytes_per_second,
        full_duplex=report.full_duplex,
    )
