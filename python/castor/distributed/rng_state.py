"""RNG states of the generators that a model draws from: the host's and its device's."""

from __future__ import annotations

import zlib
from typing import Any

import torch

from castor.runtime.rank_group import RankGroup

States = tuple[torch.Tensor, ...]
"""States of the host's generator and, if there is one, of the device's; uint8, in host memory."""


class Generators:
    """The generators that a model on a device may draw from."""

    def __init__(self, device: torch.device) -> None:
        """Takes the device that a model computes on."""
        self.device = device
        self._of_device: Any = None
        if device.type != "cpu":
            self._of_device = torch.get_device_module(device)

    def states(self) -> States:
        """Returns copies of the current states."""
        host = torch.get_rng_state()
        return (host, self._of_device.get_rng_state(self.device)) if self._of_device else (host,)

    def restore(self, states: States) -> None:
        """Sets the generators to these states."""
        torch.set_rng_state(states[0])
        if self._of_device:
            self._of_device.set_rng_state(states[1], self.device)

    def are_at(self, states: States) -> bool:
        """Whether the current states are these, so nothing has been drawn since."""
        return all(map(torch.equal, self.states(), states))

    def seed(self, seed: int) -> None:
        """Seeds the generators."""
        torch.default_generator.manual_seed(seed)
        if self._of_device:
            with self._of_device.device(self.device):
                self._of_device.manual_seed(seed)

    def go_on(self) -> None:
        """Advances the generators by one number, so that later draws differ."""
        torch.rand(())
        if self._of_device:
            torch.rand((), device=self.device)

    def broadcast(self, ranks: RankGroup) -> None:
        """Sets the generators of every rank to rank 0's states. Collective."""
        states = self.states()
        for state in states:
            ranks.broadcast(state)
        self.restore(states)


def digest_of(states: States) -> int:
    """Returns a checksum (CRC-32) of states."""
    found = 0
    for state in states:
        found = zlib.crc32(state.numpy().data, found)
    return found
