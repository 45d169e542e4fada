"""Per-rank RNG state, for modules in which ranks compute different shards of layers or tokens.

All ranks have equal RNG states, since replicated activations have to be equal. A rank
with other heads or tokens than its peers draws from a state made from the common one and its rank
number. The common state goes on afterwards. The per-rank state is a function of the common
one, so blocks that backward recomputes draw the same numbers. Megatron-LM calls this the
model-parallel RNG state.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from castor.distributed.adapters import dropouts_of_adapters
from castor.distributed.tensor_plan import COLUMNS, ROWS, kinds_of, region_of, upwards
from castor.runtime.hooks import ModuleHook
from castor.runtime.rank_group import RankGroup

# --- RNG states of the generators that a model draws from: the host's and its device's ------------

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


# --- Per-rank RNG state --------------------------------------------------------------------------


class RankRng:
    """Gives this rank its own RNG state within a module, and the common state elsewhere."""

    def __init__(
        self, rank: int, generators: Generators, when: Callable[[], bool] = lambda: True
    ) -> None:
        """Changes nothing yet.

        Args:
            rank: Number of this rank.
            generators: Generators that the model draws from.
            when: Whether ranks compute different shards in the forward under way.
        """
        self._rank = rank
        self._generators = generators
        self._when = when
        self._states: tuple[States, States] | None = None
        """The common state, and this rank's state as it began; None: outside the module."""
        self._kept: States | None = None
        """This rank's state, while the common one is in use."""

    def start(self, module: nn.Module) -> None:
        """Uses this rank's state in the module's forwards from now on."""
        module.register_forward_pre_hook(ModuleHook(self._begin))
        module.register_forward_hook(ModuleHook(self._end), always_call=True)

    def end_at(self, module: nn.Module) -> None:
        """Returns to the common state after a module inside the one that was started."""
        module.register_forward_hook(ModuleHook(self._end))

    def leave_common(self, module: nn.Module) -> None:
        """Keeps the common state in a module inside the one that was started."""
        module.register_forward_pre_hook(ModuleHook(self._begin_common))
        module.register_forward_hook(ModuleHook(self._end_common), always_call=True)

    def _begin_common(self, _module: nn.Module, _args: tuple[Any, ...]) -> None:
        if self._states is not None:
            self._kept = self._generators.states()
            self._generators.restore(self._states[0])

    def _end_common(self, _module: nn.Module, _args: tuple[Any, ...], _output: Any) -> None:
        if self._states is not None and self._kept is not None:
            self._states = self._generators.states(), self._states[1]
            self._generators.restore(self._kept)
        self._kept = None

    def _end(self, _module: nn.Module, _args: tuple[Any, ...], _output: Any) -> None:
        if self._states is None:
            return
        (common, own), self._states = self._states, None
        drawn = not self._generators.are_at(own)
        self._generators.restore(common)
        if drawn:
            self._generators.go_on()

    def _begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if module.training and self._when():
            common = self._generators.states()
            self._generators.seed(digest_of(common) + self._rank)
            self._states = common, self._generators.states()


def give_rank_rng(
    model: nn.Module, plan: Mapping[str, Sequence[str]], rank: int, generators: Generators
) -> None:
    """Gives dropout of sharded heads and hidden units its own RNG state on each rank.

    Args:
        model: The tensor-parallel model, of which this process may have some stages only.
        plan: Its tensor-parallel plan; see castor.distributed.tensor_plan.
        rank: Number of this rank.
        generators: Generators that the model draws from.
    """
    for region, sums in _dropping_regions(model, plan).items():
        numbers = RankRng(rank, generators)
        numbers.start(region)
        for layer in sums:
            numbers.end_at(layer)
        for dropout in dropouts_of_adapters(region, sums):
            numbers.leave_common(dropout)


def _dropping_regions(
    model: nn.Module, plan: Mapping[str, Sequence[str]]
) -> dict[nn.Module, list[nn.Module]]:
    """Returns the modules that may drop out sharded activations, with their row-parallel layers.

    Such activations are attention weights and hidden units. After the row-parallel layers
    activations are equal on all ranks again.
    """
    kinds, modules, regions = kinds_of(plan), dict(model.named_modules()), set()
    for name in (name for name, of in kinds.items() if of & COLUMNS and name in modules):
        region = region_of(list(upwards(name))[1:], kinds)
        if region and _may_drop(modules[region]):
            regions.add(region)
    return {
        modules[region]: [
            modules[name]
            for name, of in kinds.items()
            if name.startswith(f"{region}.") and name in modules and of & ROWS
        ]
        for region in regions
        if not any(other.startswith(f"{region}.") for other in regions)  # innermost only
    }


def _may_drop(module: nn.Module) -> bool:
    """Whether a module has dropout, as a submodule or as a probability that it passes on."""
    if any(isinstance(part, nn.Dropout) and part.p > 0 for part in module.modules()):
        return True
    numbers = (value for name, value in vars(module).items() if "drop" in name)
    return any(isinstance(value, float) and value > 0 for value in numbers)
