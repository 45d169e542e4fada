"""RNG state of the generators that a model draws from: the host's, and that of its device."""

from __future__ import annotations

import zlib
from typing import Any

import torch

from castor.runtime.ranks import Peers

States = tuple[torch.Tensor, ...]
"""States of the host's generator, and of the device's if it has one; uint8, on the host."""


class Generators:
    """The generators that computing on a device may draw from."""

    def __init__(self, device: torch.device) -> None:
        """Takes the device that a model computes on."""
        self.device = device
        self._of_device: Any = None
        if device.type != "cpu":
            self._of_device = torch.get_device_module(device)

    def states(self) -> States:
        """The states now."""
        host = torch.get_rng_state()
        return (host, self._of_device.get_rng_state(self.device)) if self._of_device else (host,)

    def restore(self, states: States) -> None:
        """Sets them back."""
        torch.set_rng_state(states[0])
        if self._of_device:
            self._of_device.set_rng_state(states[1], self.device)

    def are_at(self, states: States) -> bool:
        """Whether nothing has been drawn since."""
        return all(map(torch.equal, self.states(), states))

    def seed(self, seed: int) -> None:
        """Has them begin anew."""
        torch.default_generator.manual_seed(seed)
        if self._of_device:
            with self._of_device.device(self.device):
                self._of_device.manual_seed(seed)

    def go_on(self) -> None:
        """Moves the generators on, so that the next draws are others."""
        torch.rand(())
        if self._of_device:
            torch.rand((), device=self.device)

    def share(self, ranks: Peers) -> None:
        """Rank 0's states become every rank's. Collective."""
        states = self.states()
        for state in states:
            ranks.share(state)
        self.restore(states)


def digest_of(states: States) -> int:
    """Returns a number that tells states from others."""
    found = 0
    for state in states:
        found = zlib.crc32(state.numpy().data, found)
    return found
