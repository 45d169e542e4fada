"""Weights and states as saves read them: a rank's shards, and the full tensors that they make."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from castor import _C
from castor.checkpoint.container import ComputedTensor, SavedTensor, pieces
from castor.runtime import shards
from castor.runtime.engine import Engine
from castor.runtime.model_shards import ModelShards, Runs, Segments
from castor.runtime.shards import is_dtensor

if TYPE_CHECKING:
    from castor.checkpoint.shares import Share


# --- Weights and states of boosted models, as saves read them -------------------------------------

# A save reads the session's memory directly, past the guards of torch's operators. An operator
# would wait for updates, and these may wait for the save.

Shard = tuple[int, torch.Tensor]
"""A rank's shard of a tensor: (index of its first element in memory order, its elements)."""


@dataclass(frozen=True, kw_only=True)
class SnapshotTensor(ComputedTensor):
    """Weights or states of a boosted model's parameter."""

    engine: Engine
    index: int
    """Index of the parameter."""
    shard: Callable[[], Shard]
    """Function that makes this rank's shard of the tensor, without communication."""
    runs: Runs | Segments | None = None
    """Place of this rank's tensor in the full tensor that is saved; None: they are the same."""
    states: bool = True
    """Whether the tensor is made of optimizer states; if not, of weights alone."""
    in_order_of_memory: bool = False
    """Whether the elements follow the parameter's memory, as scales of its blocks do, instead of
    row-major order."""

    def own(self) -> Iterator[tuple[int, memoryview]]:
        """Yields (offset in bytes, bytes) of what this rank writes, in row-major order.

        Offsets count from the beginning of this rank's tensor. A piece is valid until the next one
        is asked for.
        """
        for first, shard in self._in_row_major(*self.shard()):
            at = first * self.element_size()
            for piece in pieces(shard):
                yield at, piece
                at += len(piece)

    def _in_row_major(self, first: int, shard: torch.Tensor) -> Iterator[Shard]:
        """Yields a shard in memory order as runs of elements in row-major order."""
        param = self.engine.params[self.index]
        if self.engine.ranks is None or param.is_contiguous() or self.in_order_of_memory:
            yield first, shard
            return
        numbers = torch.empty_strided(param.shape, param.stride(), dtype=torch.int64)
        numbers.copy_(torch.arange(param.numel()).view(param.shape))
        own, order = numbers.as_strided((shard.numel(),), (1,), first).sort()
        ends = ((own.diff() != 1).nonzero().flatten() + 1).tolist()
        runs = shard.reshape(-1)[order].tensor_split(ends)
        for begin, run in zip([0, *ends], runs, strict=True):
            if run.numel() > 0:
                yield int(own[begin]), run


def snapshot(
    engine: Engine,
    index: int,
    compute: Callable[[], torch.Tensor],
    shard: Callable[[], Shard],
    *,
    dtype: torch.dtype = torch.float32,
    shape: Sequence[int] | None = None,
    states: bool = True,
) -> SnapshotTensor:
    """Makes a tensor that is computed from one of the engine's parameters or its states.

    Args:
        engine: Engine of the parameter.
        index: Index of the parameter.
        compute: Makes the full tensor, which a process without other ranks writes.
        shard: Makes this rank's shard, where there are several ranks: see SnapshotTensor.
        dtype: Type of the elements.
        shape: Shape of the tensor, whose elements then follow the parameter's memory; None: the
            parameter's shape.
        states: See SnapshotTensor.
    """
    return SnapshotTensor(
        dtype=dtype,
        shape=tuple(engine.params[index].shape if shape is None else shape),
        compute=compute,
        shard=(lambda: (0, compute())) if engine.ranks is None else shard,
        engine=engine,
        index=index,
        states=states,
        in_order_of_memory=shape is not None,
    )


def snapshot_weights(engine: Engine, param: nn.Parameter) -> SnapshotTensor:
    """Returns a parameter's weights in their working dtype, read when they are written."""
    index = engine.index_of[param]
    return snapshot(
        engine,
        index,
        partial(engine.session.saved_weights, index),
        partial(shard_of_weights, engine, index),
        dtype=param.dtype,
        states=False,
    )


def shard_of_weights(engine: Engine, index: int) -> Shard:
    """Returns this rank's shard of the parameter's weights, in memory order."""
    first, _ = engine.session.saved_piece(index)
    return first, engine.session.saved_weights_of_piece(index)


# --- Full tensors of models of which each rank has shards -----------------------------------------

ParamOf = Callable[[str], torch.Tensor | None]
"""Function that returns the parameter of a key; None: the key's tensor belongs to none."""


@dataclass(frozen=True, kw_only=True)
class _Described:
    """A description of the tensors of one pipeline stage, without values."""

    stage: int
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    """(dtype, full shape) of each tensor by key, in order."""
    numbers: Mapping[str, dict[str, Any]]
    """Entries that are no tensors, by parameter."""


def full_model_tensors(
    engine: Engine,
    tensors: Mapping[str, SavedTensor],
    param_of: ParamOf,
    share: Share,
    order: Iterable[str],
) -> dict[str, SavedTensor]:
    """Returns the full tensors that ranks with shards of a model write together. Collective.

    Args:
        engine: Engine of the model.
        tensors: This rank's tensors, by key.
        param_of: See ParamOf.
        share: This rank's share of the work.
        order: All keys of the full model, in order; empty: the keys that the ranks have.

    Returns:
        Tensors by key, in that order. A tied tensor is under each of its keys. Tensors of which
        this rank writes nothing are placeholders on the meta device.
    """
    found, _ = _of_all(engine, tensors, {}, param_of, share)
    return {key: found[key] for key in order or found if key in found}


def full_optimizer_state(
    engine: Engine,
    tensors: Mapping[str, SavedTensor],
    numbers: Mapping[str, dict[str, Any]],
    groups: Sequence[Sequence[str]],
    param_of: ParamOf,
    share: Share,
) -> tuple[dict[str, SavedTensor], dict[str, dict[str, Any]], Sequence[Sequence[str]]]:
    """Returns the full optimizer state that ranks with shards of a model write. Collective.

    Args:
        engine: Engine of the model.
        tensors: This rank's tensors, by "<parameter>.<entry>".
        numbers: This rank's entries that are no tensors, by parameter.
        groups: Names of the parameters in each of this rank's groups.
        param_of: See ParamOf.
        share: This rank's share of the work.

    Returns:
        Tensors as from full_model_tensors, other entries by parameter, and parameter names by
        group.
    """
    found, others = _of_all(engine, tensors, numbers, param_of, share)
    full = engine.model_shards.full_model if engine.model_shards else None
    if full is None:
        return found, others, groups
    names = [name for group in full.groups for name in group]
    place = {name: i for i, name in enumerate(names)}
    keys = sorted(found, key=lambda key: place[key.rpartition(".")[0]])
    return (
        {key: found[key] for key in keys},
        {name: others[name] for name in names if name in others},
        full.groups,
    )


def full_dtensors(
    model: nn.Module | None, tensors: Mapping[str, SavedTensor], kind: str
) -> dict[str, SavedTensor]:
    """Replaces DTensors by tensors that gather their full values when they are written.

    Args:
        model: The model whose parameters torch has sharded.
        tensors: Tensors by key.
        kind: "model" or "optimizer": where the other ranks look up a key, see LocalShards.
    """
    saved = dict(tensors)
    for key, tensor in tensors.items():
        if is_dtensor(tensor):
            compute = partial(shards.full_tensor, model, f"{kind}:{key}", tensor)
            saved[key] = ComputedTensor(
                dtype=tensor.dtype, shape=tuple(tensor.shape), compute=compute
            )
    return saved


def _of_all(
    engine: Engine,
    tensors: Mapping[str, SavedTensor],
    numbers: Mapping[str, dict[str, Any]],
    param_of: ParamOf,
    share: Share,
) -> tuple[dict[str, SavedTensor], dict[str, dict[str, Any]]]:
    """Returns (tensors, other entries) of all stages. Collective.

    A tensor that several stages have is written by the first of them.
    """
    model_shards = engine.model_shards
    assert model_shards is not None
    own = _own(model_shards, tensors, param_of)
    described = _Described(
        stage=model_shards.stage,
        tensors={key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in own.items()},
        numbers=numbers,
    )
    # One rank of each stage speaks for those that have the same keys.
    everyone = share.gather(
        described if share.writes_replicated and model_shards.has_first_shard else None
    )
    found: dict[str, SavedTensor] = {}
    others: dict[str, dict[str, Any]] = {}
    for of_stage in sorted(filter(None, everyone), key=lambda one: one.stage):
        for key, (dtype, shape) in of_stage.tensors.items():
            if key not in found:
                mine = of_stage.stage == model_shards.stage
                found[key] = own[key] if mine else _without_values(dtype, shape)
        others = {**of_stage.numbers, **others}
    return found, others


def _own(
    model_shards: ModelShards, tensors: Mapping[str, SavedTensor], param_of: ParamOf
) -> dict[str, SavedTensor]:
    """Returns this rank's tensors as shards of the full ones that are written."""
    own: dict[str, SavedTensor] = {}
    for key, tensor in tensors.items():
        param = param_of(key)
        runs = None if param is None else model_shards.runs(param)
        if param is not None and runs and isinstance(tensor, SnapshotTensor):
            shape = model_shards.full_shape(param)
            assert shape is not None
            if tensor.in_order_of_memory:
                shape = shape_of_scales(shape)
                runs = runs.in_blocks(_C.MOMENT_BLOCK, width=shape[1])
            own[key] = replace(tensor, shape=shape, runs=runs)
        elif model_shards.has_first_shard:
            own[key] = tensor
        else:  # step counts and tensors without shards are the same on all of these ranks
            own[key] = _without_values(tensor.dtype, tuple(tensor.shape))
    return own


def shape_of_scales(shape: Sequence[int]) -> tuple[int, int]:
    """Returns the shape of the scales of block-rounded moments of a tensor: (blocks, 2)."""
    return -(-math.prod(shape) // _C.MOMENT_BLOCK), 2


def _without_values(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Makes a placeholder for a tensor that other ranks write."""
    return torch.empty(shape, dtype=dtype, device="meta")


def full_shape(engines: list[Engine], tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the full shape of a parameter or a buffer of which this rank has a shard."""
    for engine in engines:
        if engine.model_shards and (shape := engine.model_shards.full_shape(tensor)) is not None:
            return shape
    return tuple(tensor.shape)


def local_shard(engine: Engine, param: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """Returns this rank's shard of a full tensor that belongs to a parameter.

    Args:
        engine: Engine of the parameter.
        param: The parameter.
        full: Tensor of the parameter's full shape, or scales of its blocks. A tensor of any other
            shape, and that of a parameter without shards, is returned as it is.
    """
    model_shards = engine.model_shards
    shape = model_shards.full_shape(param) if model_shards else None
    if model_shards is None or shape is None:
        return full
    sharded = tuple(full.shape) in (shape, shape_of_scales(shape))
    return model_shards.local_shard(param, full) if sharded else full


def full_keys(engine: Engine) -> Iterable[str]:
    """Returns all keys of a model of which this rank has some; empty: this rank has all of them."""
    full = engine.model_shards.full_model if engine.model_shards else None
    return () if full is None else full.tensors


def full_adapters(engines: Iterable[Engine]) -> Mapping[str, Mapping[str, str]] | None:
    """Returns FullModel.adapters of a model with pipeline stages; None: there is none."""
    fulls = (engine.model_shards.full_model for engine in engines if engine.model_shards)
    return next((full.adapters for full in fulls if full), None)


def full_names(engine: Engine) -> list[str]:
    """Returns the names that the engine's parameters have in the full model."""
    full = engine.model_shards.full_model if engine.model_shards else None
    return engine.names if full is None else [full.first_key(name) for name in engine.names]


def local_targets(
    engine: Engine, targets: dict[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, tuple[int, tuple[int, ...]]]]:
    """Separates this rank's tensors of the full model from those that only other ranks have.

    Args:
        engine: Engine of the model.
        targets: This rank's tensors, by its own keys.

    Returns:
        This rank's tensors by all their keys in the full model. Then (number, full shape) of each
        tensor that only other ranks have, by key.
    """
    full = engine.model_shards.full_model if engine.model_shards else None
    if full is None:
        return targets, {}
    own = {key: targets[own_key] for key, own_key in full.keys_like(targets).items()}
    return own, {key: tensor for key, tensor in full.tensors.items() if key not in own}


def remote_names(engine: Engine) -> set[str]:
    """Returns the names of the optimizer's parameters that only other ranks have."""
    full = engine.model_shards.full_model if engine.model_shards else None
    if full is None:
        return set()
    return {name for group in full.groups for name in group}.difference(full_names(engine))
