"""Reads and writes sharded parameters (torch's DTensor) for checkpoints."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from castor.errors import CheckpointError, Error
from castor.runtime.boosted_model import compiled_from
from castor.runtime.model_shards import ShardFinder
from castor.runtime.rank_group import RankGroup, Result

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


# --- Recognises torch's DTensor without importing it, which takes longer than all of castor -------


def is_dtensor(value: Any) -> TypeIs[DTensor]:
    """Whether a value is a DTensor; False if nothing has imported DTensor's module."""
    module = sys.modules.get("torch.distributed.tensor")
    kind = getattr(module, "DTensor", None)  # not there yet while the module is imported
    return kind is not None and isinstance(value, kind)


# --- Reads and writes sharded parameters (torch's DTensor) for checkpoints ------------------------

_shards: weakref.WeakKeyDictionary[nn.Module, Shards] = weakref.WeakKeyDictionary()


class Shards:
    """The ranks that shard a model's parameters. All ranks make the same calls."""

    def __init__(self, model: nn.Module, ranks: RankGroup | None) -> None:
        """Registers the model, so that `full_tensor` finds these ranks.

        Args:
            model: Model that is sharded.
            ranks: Ranks that shard it; None: this process has all shards.
        """
        self._ranks = ranks
        _shards[model] = self

    def on_first(self, work: Callable[[], Result], shard_finder: ShardFinder) -> Result:
        """Runs `work` on rank 0 for all; it may call `full_tensor` meanwhile. Collective."""
        if self._ranks is None:
            return work()
        return self._ranks.on_first(
            work, serve=lambda: self._serve(shard_finder), end_service=lambda: self._end()
        )

    def full_tensor(self, key: str, own: DTensor) -> torch.Tensor:
        """Returns the full tensor, on the rank that runs `work`; every rank gathers it meanwhile.

        Args:
            key: Key by which the other ranks find their shards.
            own: This rank's shard.

        Raises:
            Error: Another rank cannot read its shard.
        """
        if self._ranks is None:
            return _together(own)
        self._ranks.all_gather_object(key)
        return self._join(self._ranks, key, own, None)

    def _end(self) -> None:
        if self._ranks:
            self._ranks.all_gather_object(None)

    def _serve(self, shard_finder: ShardFinder) -> None:
        ranks = self._ranks
        while ranks and (key := ranks.all_gather_object(None)[0]) is not None:
            own, failed = None, None
            try:
                _, own = shard_finder.find(key)
            except Exception as error:
                failed = f"rank {ranks.rank}: {type(error).__name__}: {error}"
            with suppress(Error):  # rank 0 raises it
                self._join(ranks, key, own, failed)

    def _join(
        self, ranks: RankGroup, key: str, own: torch.Tensor | None, failed: str | None
    ) -> torch.Tensor:
        failures = [one for one in ranks.all_gather_object(failed) if one]
        if failures or not is_dtensor(own):
            raise Error(f"'{key}' cannot be put together: {failures[0]}")
        return _together(own)


def full_tensor(model: nn.Module | None, key: str, own: DTensor) -> torch.Tensor:
    """Returns a full tensor of a model in host memory. Called while a save runs on rank 0.

    Raises:
        CheckpointError: The model was not sharded by castor.
    """
    shards = None if model is None else _shards.get(compiled_from(model))
    if shards is None:
        name = key.partition(":")[2]
        raise CheckpointError(
            f"tensor '{name}' is a DTensor of a model that castor did not shard; boost it with "
            "TorchFSDPPlugin, or save it with torch.distributed.checkpoint"
        )
    return shards.full_tensor(key, own)


def own_shard(like: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Returns this rank's shard of full values, in memory of its own.

    Args:
        like: A parameter or a buffer, sharded or not.
        values: Values of its full shape. A tensor of another shape, such as a count of steps, is
            returned as it is.

    Returns:
        A DTensor sharded as `like` is; `values` if `like` is not sharded.
    """
    if not is_dtensor(like) or values.shape != like.shape:
        return values
    from torch.distributed.tensor import distribute_tensor

    shards = distribute_tensor(
        values.detach().to(like.device), like.device_mesh, like.placements, src_data_rank=None
    )
    if shards.device != like.device:  # CPUOffloadPolicy keeps shards of a GPU's mesh on the host
        return shards.to(like.device)
    return shards.clone()


@torch.no_grad()
def fill(target: torch.Tensor, values: torch.Tensor) -> None:
    """Copies full values into a tensor, or this rank's shard of them into its shard."""
    if is_dtensor(target):
        shard = own_shard(target, values)
        assert is_dtensor(shard)
        target.to_local().copy_(shard.to_local())
        torch.autograd.graph.increment_version(target)
    else:
        target.copy_(values)


def own_class(model: nn.Module) -> type:
    """Returns the class that a model had before fully_shard changed it."""
    from torch.distributed.fsdp import FSDPModule

    return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))


@torch.no_grad()
def _together(own: DTensor) -> torch.Tensor:
    together: torch.Tensor = own.full_tensor()
    return together.detach().cpu()
