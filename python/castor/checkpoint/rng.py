"""The random number generators that training draws from: torch, Python's, numpy's."""

from __future__ import annotations

import random
import struct
import sys
from typing import Any

import torch

from castor.errors import CheckpointError

Snapshot = dict[str, Any]
"""State of each generator by its name, in types that castor.checkpoint.documents can encode."""


def snapshot() -> Snapshot:
    """Returns the states of torch's CPU generator and `random`, and of CUDA and numpy if in use."""
    version, numbers, gauss = random.getstate()
    states: Snapshot = {
        "torch": torch.get_rng_state(),
        "python": (version, struct.pack(f"<{len(numbers)}I", *numbers), gauss),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, position, has_gauss, cached = numpy.random.get_state()
        states["numpy"] = (
            str(kind),
            keys.astype("<u4").tobytes(),
            int(position),
            int(has_gauss),
            float(cached),
        )
    return states


def differing(before: Snapshot, after: Snapshot) -> list[str]:
    """Returns the names of generators that both snapshots have, in different states."""
    return [name for name in before if name in after and not _same(before[name], after[name])]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, list):
        return all(map(_same, one, other))
    return bool(one == other)


def check(states: Snapshot) -> None:
    """Checks that this process can restore the states.

    Raises:
        CheckpointError: The states are those of another number of CUDA devices.
    """
    if "cuda" in states and torch.cuda.is_available():
        own, saved = torch.cuda.device_count(), len(states["cuda"])
        if own != saved:
            raise CheckpointError(
                f"the checkpoint has the random states of {saved} CUDA devices, there are {own}; "
                f"make {saved} visible (CUDA_VISIBLE_DEVICES)"
            )


def restore(states: Snapshot) -> None:
    """Restores the states of a snapshot; generators that this process lacks are left out."""
    torch.set_rng_state(states["torch"])
    version, numbers, gauss = states["python"]
    random.setstate((version, struct.unpack(f"<{len(numbers) // 4}I", numbers), gauss))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])
    if "numpy" in states:
        try:
            import numpy as np
        except ImportError:  # without numpy nothing can draw from its generator
            return
        kind, keys, position, has_gauss, cached = states["numpy"]
        np.random.set_state(
            (kind, np.frombuffer(keys, dtype="<u4").astype(np.uint32), position, has_gauss, cached)
        )
