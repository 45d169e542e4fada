"""Per-rank RNG state, for modules in which ranks compute different shards of layers or tokens.

All ranks hold equal RNG states, since what they compute in full has to be equal. Where a rank has
other heads or other tokens than its peers, it draws from a state that is made of the common state
and the rank's number. The common state goes on afterwards. The per-rank state is a function of the
common one, so blocks that backward computes again draw the same numbers. Megatron-LM calls this the
model-parallel RNG state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from castor.distributed.adapters import dropouts_of_adapters
from castor.distributed.layer_regions import COLUMNS, ROWS, kinds_of, region_of, upwards
from castor.distributed.rng_state import Generators, States, digest_of
from castor.runtime.hooks import ModuleHook


class RankRng:
    """Gives this rank its own RNG state within a module, and the common state elsewhere."""

    def __init__(
        self, rank: int, generators: Generators, when: Callable[[], bool] = lambda: True
    ) -> None:
        """Nothing is changed.

        Args:
            rank: This one's.
            generators: Of the model.
            when: Whether ranks compute different things in the forward under way.
        """
        self._rank = rank
        self._generators = generators
        self._when = when
        self._states: tuple[States, States] | None = None
        """The common one, and this rank's as it began."""
        self._kept: States | None = None
        """This rank's, while the common ones are drawn."""

    def start(self, module: nn.Module) -> None:
        """From now on."""
        module.register_forward_pre_hook(ModuleHook(self._begin))
        module.register_forward_hook(ModuleHook(self._end), always_call=True)

    def end_at(self, module: nn.Module) -> None:
        """From now on, behind a module within the other."""
        module.register_forward_hook(ModuleHook(self._end))

    def leave_common(self, module: nn.Module) -> None:
        """From now on, in a module within the other, ranks draw the common numbers all the same."""
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
    """Has each rank drop out its own heads and hidden units, from now on.

    Args:
        model: Whose layers are divided; of which this process may have some.
        plan: How; see castor.distributed.tensor_plan.
        rank: This one's.
        generators: Of the model.
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
    """Modules that may drop out what ranks have parts of: attention weights, hidden units.

    With the layers within whose outputs are sums: behind those ranks are alike again.
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
        if not any(other.startswith(f"{region}.") for other in regions)  # a block, of its parts
    }


def _may_drop(module: nn.Module) -> bool:
    """Whether it has dropout, as a module or as a number that it hands on."""
    if any(isinstance(part, nn.Dropout) and part.p > 0 for part in module.modules()):
        return True
    numbers = (value for name, value in vars(module).items() if "drop" in name)
    return any(isinstance(value, float) and value > 0 for value in numbers)
