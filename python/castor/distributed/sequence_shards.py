"""Sequence parallelism: shards what lies between tensor-parallel layers by tokens.

Norms, dropouts and residuals of each block see the tokens of one rank. Hidden states are gathered
where attention or an MLP begins, and the outputs of these are reduce-scattered.
Source: Korthikanti et al. 2022 (see castor.distributed.collectives).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from castor.distributed.collectives import (
    all_gather_replicated,
    all_reduce,
    gather_layer_input,
    reduce_scatter,
    scatter,
)
from castor.distributed.inputs import asked_of, by_name
from castor.distributed.parallel_groups import ModelParallelGroup
from castor.distributed.pipeline_plan import find_blocks
from castor.distributed.rank_rng import Generators, RankRng, States
from castor.distributed.tensor_plan import (
    COLUMNS,
    GATHERED_COLUMNS,
    OF_HEADS,
    ROWS,
    kinds_of,
    region_of,
    upwards,
)
from castor.errors import UsageError
from castor.runtime.hooks import ModuleHook

_SUMMED = frozenset({"moe_tp_experts", "whole_experts", "all_reduce"})
"""Styles of modules whose outputs are already summed over the ranks, for all tokens."""
_ASKED = "sequence_parallelism_mode='split_gather'"


class SequenceShards:
    """Sequence parallelism in the row of blocks of a tensor-parallel model.

    This holds for forwards with gradients. Without gradients (generate, evaluation) every rank has
    all tokens.
    """

    def __init__(
        self, model: nn.Module, plan: Mapping[str, Sequence[str]], ranks: ModelParallelGroup
    ) -> None:
        """Finds out where tokens are gathered and scattered; changes nothing.

        Args:
            model: The model whose layers are sharded.
            plan: Its tensor-parallel plan; see castor.distributed.tensor_plan.
            ranks: Tensor-parallel ranks.

        Raises:
            NotImplementedError: Castor knows no row of blocks of this model.
        """
        blocks = find_blocks(model)
        if blocks is None:
            raise NotImplementedError(
                f"{_ASKED} shards tokens between the blocks of a model, and castor knows no row "
                f"of blocks of a {type(model).__name__}; leave it out"
            )
        self._model = weakref.ref(model)
        self._ranks = ranks
        self._blocks = blocks
        self._forward_divides = False
        self._num_own = 0
        self._ends: list[RemovableHandle] = []  # hooks where a stage begins, and where it ends
        self._kinds = {
            name: of for name, of in kinds_of(plan).items() if name.startswith(f"{blocks}.")
        }
        self._regions = self._find_regions()
        """Names of modules that need all tokens, and whether their outputs are summed already."""
        self.rows = frozenset(
            name
            for name, of in self._kinds.items()
            if of & ROWS and not self._regions.get(_around(name, self._regions) or "")
        )
        """Names of the row-parallel layers whose outputs are reduce-scattered."""

    def start(self, stages: Sequence[range] | None, generators: Generators) -> None:
        """Installs the hooks that shard tokens in forwards with gradients, after boost.

        Args:
            stages: Numbers of the blocks of each of this process's pipeline stages; None: the
                process has all blocks.
            generators: Generators that the model draws from.
        """
        model = self._model()
        assert model is not None
        self.shard_in(stages)  # first, since its hook sets `divides`, which RankRng's hooks read
        blocks = list(model.get_submodule(self._blocks).named_children())
        started = set()
        for stage in stages or [range(len(blocks))]:
            for number, block in blocks[stage.start : stage.stop]:
                RankRng(self._ranks.rank, generators, lambda: self.divides).start(block)
                started.add(f"{self._blocks}.{number}")
        for name, sums in self._regions.items():
            if _around(name, started):
                self._start_region(model.get_submodule(name), name, generators if sums else None)
        model.register_forward_pre_hook(ModuleHook(_check_outputs), with_kwargs=True)

    def shard_in(self, stages: Sequence[range] | None) -> None:
        """Scatters tokens before the first block of each stage, and gathers them after its last.

        Replaces the stages of an earlier call.

        Args:
            stages: Numbers of the blocks of each stage; None: all blocks are in one.
        """
        model = self._model()
        assert model is not None
        for handle in self._ends:
            handle.remove()
        self._ends.clear()
        blocks = list(model.get_submodule(self._blocks).children())
        for stage in stages or [range(len(blocks))]:
            first, last = blocks[stage.start], blocks[stage.stop - 1]
            self._ends += (
                first.register_forward_pre_hook(ModuleHook(self._divide), with_kwargs=True),
                last.register_forward_hook(ModuleHook(self._join)),
            )

    def _start_region(self, module: nn.Module, name: str, of_sums: Generators | None) -> None:
        """Installs the hooks of a region.

        Args:
            module: The region's module.
            name: Its name.
            of_sums: The model's generators, if the region's outputs are summed already; else None.
        """
        module.register_forward_pre_hook(ModuleHook(self._gather), with_kwargs=True)
        if of_sums:
            NoNumbers(self, name, of_sums).start(module)
            module.register_forward_hook(ModuleHook(self._keep_own))

    @property
    def divides(self) -> bool:
        """Whether hidden states are sharded by tokens in the forward under way."""
        # A forward within a backward recomputes a block, which only forwards with gradients have.
        return self._forward_divides or _in_backward()

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Reduce-scatters the output of a layer with sharded inputs, by tokens."""
        if not self.divides:
            return all_reduce(x, self._ranks)
        return reduce_scatter(x, self._ranks, _tokens_of(x))

    def _find_regions(self) -> dict[str, bool]:
        found: dict[str, bool] = {}
        for name, of in self._kinds.items():
            if of & (COLUMNS | GATHERED_COLUMNS | _SUMMED):
                region = self._region_for(name)
                found[region] = found.get(region, False) or bool(of & _SUMMED)
        merged: dict[str, bool] = {}
        for name, sums in found.items():
            *_, outermost = (one for one in upwards(name) if one in found)
            merged[outermost] = merged.get(outermost, False) or sums
        return merged

    def _region_for(self, name: str) -> str:
        """Returns the region of a layer within its block; the layer's own name if there is none.

        See region_of.
        """
        beneath_blocks = name.count(".") - self._blocks.count(".") - 2
        return region_of(list(upwards(name))[1 : 1 + beneath_blocks], self._kinds) or name

    def partial(self) -> list[nn.Parameter]:
        """Returns the full parameters whose gradient on each rank covers that rank's tokens only.

        Raises:
            NotImplementedError: For one parameter castor does not know whether it is so.
        """
        model = self._model()
        assert model is not None
        found = []
        # Parameters that the plan names are handled by their style.
        planned = {name: of - OF_HEADS for name, of in self._kinds.items()}
        for name, param in model.get_submodule(self._blocks).named_parameters():
            name = f"{self._blocks}.{name}"
            layer, _, kind = name.rpartition(".")
            region = _around(name, self._regions)
            if layer in self.rows:
                if kind == "bias":  # added to this rank's tokens
                    found.append(param)
                continue
            if any(planned.get(one) for one in upwards(name)):
                continue
            if region is None and "Norm" in type(model.get_submodule(layer)).__name__:
                found.append(param)
            elif region is None or not self._regions[region]:
                raise NotImplementedError(
                    f"{_ASKED} does not know whether '{name}' of this {type(model).__name__}, "
                    f"which the ranks do not shard, needs all tokens: its module is a "
                    f"{type(model.get_submodule(layer)).__name__}; leave it out"
                )
        return found

    def _divide(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Pre-hook of a stage's first block: scatters the tokens.

        Raises:
            UsageError: The tokens cannot be divided evenly.
        """
        self._forward_divides = torch.is_grad_enabled()
        return self._of_hidden(args, kwargs, self._own)

    def _own(self, x: torch.Tensor) -> torch.Tensor:
        length, size = x.shape[1], self._ranks.size
        if length % size:
            raise UsageError(
                f"{_ASKED}: tp_size={size} ranks cannot shard sequences of {length} tokens; pad "
                f"them to {-(-length // size) * size}"
            )
        self._num_own = length // size
        return scatter(x, self._ranks, 1)

    def _join(self, block: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Hook of a stage's last block: gathers all tokens."""
        return self._of_output(output, self._all)

    def _all(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] != self._num_own and not _in_backward():
            raise NotImplementedError(
                f"{_ASKED} gave the blocks {self._num_own} tokens of hidden states, and they made "
                f"{x.shape[1]} of them: something of all tokens is added there; leave it out"
            )
        return all_gather_replicated(x, self._ranks, 1)

    def _gather(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Pre-hook of a region: gathers all tokens."""
        return self._of_hidden(
            args, kwargs, lambda x: gather_layer_input(x, self._ranks, _tokens_of(x))
        )

    def _keep_own(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Hook of a region whose outputs are summed already: keeps this rank's tokens."""
        return self._of_output(output, lambda x: scatter(x, self._ranks, _tokens_of(x)))

    def _of_hidden(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        change: Callable[[torch.Tensor], torch.Tensor],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns a module's arguments with other hidden states, where these are sharded."""
        if not self.divides:
            return args, kwargs
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": change(kwargs["hidden_states"])}

    def _of_output(self, output: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        if not self.divides:
            return output
        return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)


class NoNumbers:
    """Check that a module which every rank computes for all tokens draws no random numbers."""

    def __init__(self, parts: SequenceShards, name: str, generators: Generators) -> None:
        """Prepares the check; changes nothing.

        Args:
            parts: Sequence parallelism of the model.
            name: Name of the module, for a message.
            generators: Generators that the model draws from.
        """
        self._parts = parts
        self._name = name
        self._generators = generators
        self._states: States | None = None

    def start(self, module: nn.Module) -> None:
        """Checks the module's forwards from now on."""
        module.register_forward_pre_hook(ModuleHook(self._begin))
        module.register_forward_hook(ModuleHook(self._end))

    def _begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        divides = module.training and self._parts.divides
        self._states = self._generators.states() if divides else None

    def _end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._states is not None and not self._generators.are_at(self._states):
            raise NotImplementedError(
                f"'{self._name}' draws random numbers (noise of a router, or dropout of experts), "
                f"and with {_ASKED} each rank draws its own, where all need the same: turn them "
                "off, or leave it out"
            )


def _check_outputs(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Pre-hook of the model: refuses to give hidden states of all layers."""
    asked = asked_of(model, by_name(model.forward, args, kwargs), "output_hidden_states")
    if asked and torch.is_grad_enabled():
        raise NotImplementedError(
            f"output_hidden_states=True does not go with {_ASKED}, which leaves each rank some "
            "tokens of them; leave one of the two out"
        )


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _tokens_of(x: torch.Tensor) -> int:
    """Returns the dimension of tokens, 1; 0 where rows and tokens are flattened into one."""
    return max(x.dim() - 2, 0)


def _around(name: str, modules: Container[str]) -> str | None:
    """Returns the innermost of `modules` that contains a name, or is it; None: there is none."""
    return next((one for one in upwards(name) if one in modules), None)
