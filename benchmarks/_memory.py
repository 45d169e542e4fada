"""Resident memory of this process, and its peak while something runs."""

from __future__ import annotations

import threading
from pathlib import Path


def anonymous_bytes() -> int:
    """Resident memory of this process that no file backs."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/smaps_rollup has no Anonymous line")


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
