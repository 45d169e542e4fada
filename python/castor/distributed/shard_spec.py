"""Shard specifications: a parameter and its shards over tensor-parallel ranks."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from castor import _C
from castor.distributed.parallel_groups import ModelParallelGroup
from castor.errors import UsageError
from castor.runtime.model_shards import Runs, Segments


@dataclass(frozen=True, kw_only=True)
class ShardSpec:
    """The sharding of a parameter: evenly along a dimension.

    Where it does not divide evenly, the first ranks have one more element each.
    """

    dim: int
    """Dimension that is sharded."""
    shape: tuple[int, ...]
    """Full shape."""
    pieces: int = 1
    """Number of tensors that lie one behind the other in `dim`; each is sharded."""
    copies: int = 1
    """Number of neighbours that share a group of elements; above 1: `pieces` is 1 and `dim` 0."""
    shared: int = 0
    """Number of elements of `dim` at the end of each group that all its ranks have. The group's
    ranks shard the other elements."""

    def local_shard(self, full: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        """Returns a rank's shard: a view, or a new tensor where it consists of several pieces."""
        if self.copies > 1:
            length = full.shape[self.dim]
            ranges = [own for own in self._of_group(length, rank, size) if own]
            parts = [full.narrow(self.dim, own.start, len(own)) for own in ranges]
            return parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.dim)
        parts = [
            piece.tensor_split(size, dim=self.dim)[rank]
            for piece in full.chunk(self.pieces, dim=self.dim)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.dim)

    def _of_group(self, length: int, rank: int, size: int) -> tuple[range, range]:
        """Returns the ranges of elements that a rank has alone and that its group shares."""
        group, place = divmod(rank, self.copies)
        each = length // (size // self.copies)
        alone, begin = (each - self.shared) // self.copies, group * each
        return (
            range(begin + place * alone, begin + (place + 1) * alone),
            range(begin + each - self.shared, begin + each),
        )

    @property
    def length_of_piece(self) -> int:
        """Number of elements of a piece in the sharded dimension."""
        return self.shape[self.dim] // self.pieces

    def runs_of(self, ranks: ModelParallelGroup) -> Runs | Segments:
        """Returns the places of this rank's shard in the full tensor.

        Elements that several ranks have are written by the first of them.
        """
        if self.copies == 1:
            return self.runs(ranks.shard_range(self.length_of_piece))
        behind = math.prod(self.shape[1:])
        alone, shared = self._of_group(self.shape[0], ranks.rank, ranks.size)
        first = shared.start * behind if ranks.rank % self.copies == 0 else None
        return Segments(
            places=(
                (alone.start * behind, len(alone) * behind),
                (first, len(shared) * behind),
            )
        )

    def squared_once(self, param: torch.Tensor, square: float, ranks: ModelParallelGroup) -> float:
        """Returns the sum of squares of a gradient, without elements that another rank counts.

        Args:
            param: This rank's shard, with its gradient.
            square: Sum of squares of the gradient of the whole shard.
            ranks: Ranks that have the shards.
        """
        if self.copies == 1 or ranks.rank % self.copies == 0:
            return square
        if self.shared * (ranks.size // self.copies) == self.shape[0]:
            return 0.0
        assert param.grad is not None
        alone = len(self._of_group(self.shape[0], ranks.rank, ranks.size)[0])
        return float(param.grad[:alone].detach().double().square().sum())

    def sum_of_copies(self, grad: torch.Tensor, ranks: ModelParallelGroup) -> torch.Tensor:
        """Sums the shared elements of a gradient over the ranks that share them. Collective.

        The sum is in rank order, so these ranks get the same bits. Returns a new tensor.
        """
        shared = grad.detach()[grad.shape[0] - self.shared :].contiguous()
        everyone = ranks.all_gather_shards(shared, [tuple(shared.shape)] * ranks.size)
        first = ranks.rank - ranks.rank % self.copies
        total = everyone[first].clone()
        for one in everyone[first + 1 : first + self.copies]:
            total += one
        return torch.cat([grad.detach()[: grad.shape[0] - self.shared], total])

    def runs(self, own: range) -> Runs:
        """Returns the runs of a rank's shard; `own` is its range of each piece's elements."""
        behind = math.prod(self.shape[self.dim + 1 :])
        return Runs(
            first=own.start * behind,
            length=len(own) * behind,
            stride=self.length_of_piece * behind,
        )

    def shape_of(self, rank: int, size: int) -> tuple[int, ...]:
        """Returns the shape of a rank's shard."""
        return tuple(self.local_shard(torch.empty(self.shape, device="meta"), rank, size).shape)

    def local_shard_of(self, full: torch.Tensor, ranks: ModelParallelGroup) -> torch.Tensor:
        """Returns this rank's shard of a tensor that belongs to the parameter.

        Args:
            full: A tensor of the parameter's full shape, or one with a row for each block of
                moments. The latter is returned unchanged if a block lies in two shards.
            ranks: Ranks that have the shards.
        """
        if tuple(full.shape) == self.shape:
            return self.local_shard(full, ranks.rank, ranks.size)
        blocks = self.blocks_of_rank(ranks, ranks.rank)
        return full if blocks is None else full[blocks]

    def blocks_of_rank(self, ranks: ModelParallelGroup, rank: int) -> torch.Tensor | None:
        """Returns the numbers of the blocks of moments of a rank's shard; see blocks_of."""
        if self.copies == 1:
            return self.blocks_of(ranks.shard_range(self.length_of_piece, rank))
        behind, block = math.prod(self.shape[1:]), _C.MOMENT_BLOCK
        found = []
        for own in self._of_group(self.shape[0], rank, ranks.size):
            begin, end = own.start * behind, own.stop * behind
            if own and (begin % block or (end % block and end != math.prod(self.shape))):
                return None
            found.append(torch.arange(begin // block, -(-end // block)))
        return torch.cat(found)

    def blocks_of(self, own: range) -> torch.Tensor | None:
        """Returns the numbers of the blocks of moments that form a rank's shard, in its order.

        Blocks follow each other in the full tensor, as they do in the shard.

        Args:
            own: Range of the shard; see runs.

        Returns:
            The numbers (int64, one dimension); None if a block lies in two shards.
        """
        runs, block = self.runs(own), _C.MOMENT_BLOCK
        begin = runs.first + runs.stride * torch.arange(
            math.prod(self.shape[: self.dim]) * self.pieces
        )
        end = begin + runs.length
        split = (end % block != 0) & (end != math.prod(self.shape))
        if (begin % block != 0).any() or split.any():
            return None
        return (begin[:, None] // block + torch.arange(-(-runs.length // block))).flatten()


def check_blocks(
    model: nn.Module, shard_specs: Mapping[torch.Tensor, ShardSpec], ranks: ModelParallelGroup
) -> None:
    """Checks that every rank's shards consist of full blocks of moments.

    A state format that rounds moments in blocks needs this.

    Args:
        model: The full model.
        shard_specs: Sharding of its parameters.
        ranks: Ranks that have the shards.

    Raises:
        NotImplementedError: A block lies in two shards.
    """
    for name, param in model.named_parameters():
        cut = shard_specs.get(param)
        if not cut or not param.requires_grad:
            continue
        if any(cut.blocks_of_rank(ranks, rank) is None for rank in range(ranks.size)):
            raise NotImplementedError(
                f"optim_state_format='split_int8' rounds moments in blocks of {_C.MOMENT_BLOCK} "
                f"elements, and the shards of '{name}' on {ranks.size} ranks, "
                f"{cut.shape_of(0, ranks.size)} of {cut.shape}, are no full blocks: give 'split' "
                "or 'split_bf16', or fewer ranks"
            )


_ranks: weakref.WeakValueDictionary[str, ModelParallelGroup] = weakref.WeakValueDictionary()


def local_shard(
    full: torch.Tensor, cut: ShardSpec | None, ranks: ModelParallelGroup
) -> torch.Tensor:
    """Returns this rank's shard of rank 0's values, as a new contiguous tensor. Collective.

    Args:
        full: Full CPU tensor. A lazy tensor gives a lazy shard.
        cut: Sharding of the tensor; None: the full tensor is returned.
        ranks: Ranks that get the shards.
    """
    _ranks[ranks.name] = ranks
    how = [cut.dim, cut.pieces, cut.copies, cut.shared] if cut else []
    part: torch.Tensor = _local_shard(full, how, ranks.name, ranks.rank, ranks.size)
    return part


# An operator, so that a lazy model records it.
@torch.library.custom_op("castor::local_shard", mutates_args=(), device_types="cpu")
def _local_shard(
    full: torch.Tensor, how: list[int], group: str, rank: int, size: int
) -> torch.Tensor:
    values = full.contiguous() if rank == 0 else torch.empty_like(full).contiguous()
    _ranks[group].broadcast(values)
    return _cut(values, how, rank, size).clone(memory_format=torch.contiguous_format)


@_local_shard.register_fake
def _(full: torch.Tensor, how: list[int], group: str, rank: int, size: int) -> torch.Tensor:
    return full.new_empty(_cut(full, how, rank, size).shape)


def _cut(full: torch.Tensor, how: list[int], rank: int, size: int) -> torch.Tensor:
    """Returns a rank's shard, by the numbers of a ShardSpec; no numbers: the full tensor."""
    if not how:
        return full
    dim, pieces, copies, shared = how
    return ShardSpec(dim=dim, shape=(), pieces=pieces, copies=copies, shared=shared).local_shard(
        full, rank, size
    )


def check_reader(
    ranks: ModelParallelGroup, module: nn.Module, _prefix: str, keep_vars: bool
) -> None:
    """Pre-hook of state_dict: refuses to give shards as if they were full values.

    Raises:
        UsageError: keep_vars is False, so the caller wants values. With keep_vars=True the caller
            gets the parameters themselves.
    """
    if not keep_vars:
        raise UsageError(
            f"rank {ranks.rank} of {ranks.size} has shards of this {type(module).__name__}'s "
            "parameters, and its state_dict would hold those: booster.save_model, or booster.save, "
            "on all ranks writes the full model"
        )
