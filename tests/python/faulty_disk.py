"""A disk that fails as a test tells it (tests/simulated_device/faulty_disk.h)."""

from typing import Any

import pytest

from castor.runtime import device, engine
from simulated import load_module


class FaultyDisk:
    """The disk of all models that are boosted while it is in place, on the CPU device or a GPU.

    Each model has an engine of its own, whose operations are counted from 1.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._disk: Any = load_module().FaultyDisk()
        patch.setattr(
            engine,
            "make_backend",
            lambda *which: self._disk.with_device(device.make_backend(*which)),
        )

    def set(self, faults: str) -> None:
        """Gives models that are boosted from now on these faults.

        Args:
            faults: "count" for none, or "OPERATION:N:FAULT" with commas between them. OPERATION
                is read, write or any; N counts from 1, with a "+" behind it also all later ones;
                FAULT is an errno's name, "short" or "flip".
        """
        self._disk.set(faults)

    def counts(self) -> dict[str, int]:
        """Reads, writes and faults of all models so far."""
        counts: dict[str, int] = self._disk.counts()
        return counts
