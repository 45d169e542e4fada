"""Resident memory of this process: now, at its peak, while something runs, and on huge pages."""

from __future__ import annotations

import threading
from pathlib import Path


def anonymous_bytes() -> int:
    """Resident memory of this process that no file backs."""
    return _of_this_process("smaps_rollup", "Anonymous")


def proportional_bytes() -> int:
    """What this process has resident; a page that n processes have counts for one n-th."""
    return _of_this_process("smaps_rollup", "Pss")


def peak_resident_bytes() -> int:
    """The most memory this process ever had resident, libraries included."""
    return _of_this_process("status", "VmHWM")


def huge_page_bytes() -> int:
    """Resident memory of this process on huge pages, its own and shared."""
    return sum(
        _of_this_process("smaps_rollup", name) for name in ("AnonHugePages", "ShmemPmdMapped")
    )


def memory_now() -> dict[str, int]:
    """What a contender reports of its process: peak resident, anonymous and huge-page bytes."""
    return {
        "peak_resident_bytes": peak_resident_bytes(),
        "anonymous_bytes": anonymous_bytes(),
        "huge_page_bytes": huge_page_bytes(),
    }


def _of_this_process(file: str, name: str) -> int:
    for line in Path("/proc/self", file).read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/{file} has no {name} line")


class PeakWatch:
    """The highest anonymous_bytes() until stop()."""

    def __init__(self) -> None:
        self.peak = anonymous_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(0.01):
            self.peak = max(self.peak, anonymous_bytes())

    def stop(self) -> int:
        """Ends the watch; the highest value."""
        self._stop.set()
        self._thread.join()
        return max(self.peak, anonymous_bytes())
