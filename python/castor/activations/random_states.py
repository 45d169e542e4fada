"""Saves and restores the states of the generators that a module may draw from."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import get_device_states, set_device_states


class RandomStates:
    """Random states of the CPU's generator and of the generators of some tensors' devices."""

    def __init__(self, *values: Any) -> None:
        """Reads the states for the tensors among the values, also those in plain containers."""
        self._cpu = torch.get_rng_state()
        self._devices, self._states = get_device_states(*values)
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        kinds = {tensor.device.type for tensor in tensors} - {"cpu", "meta"}
        self._kind = None if "cuda" in kinds else next(iter(kinds), None)  # None: torch's default

    def restore(self) -> None:
        """Sets the generators back to the states."""
        torch.set_rng_state(self._cpu)
        set_device_states(self._devices, self._states, device_type=self._kind)

    def are_now(self, *values: Any) -> bool:
        """Whether the generators still have these states."""
        now = RandomStates(*values)
        pairs = zip((self._cpu, *self._states), (now._cpu, *now._states), strict=True)
        return all(torch.equal(*pair) for pair in pairs)
