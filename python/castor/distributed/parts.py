"""Which part of a tensor is a rank's."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from castor import _C
from castor.distributed.tensor_ranks import TensorRanks


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How a parameter is divided: evenly along a dimension, the first ranks have one more."""

    dim: int
    shape: tuple[int, ...]
    """Of the whole."""
    pieces: int = 1
    """So many tensors lie one behind the other in that dimension, each of which is divided."""

    def own(self, whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        """A rank's part: a view, or a new tensor where there are several pieces."""
        parts = [
            piece.tensor_split(size, dim=self.dim)[rank]
            for piece in whole.chunk(self.pieces, dim=self.dim)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.dim)

    def joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole of what the ranks have, in rank order."""
        pieces = [part.chunk(self.pieces, dim=self.dim) for part in parts]
        return torch.cat(
            [of_rank[piece] for piece in range(self.pieces) for of_rank in pieces], dim=self.dim
        )

    def shape_of(self, rank: int, size: int) -> tuple[int, ...]:
        """Of a rank's part."""
        return tuple(self.own(torch.empty(self.shape, device="meta"), rank, size).shape)

    def own_of(self, whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        """A rank's part of a tensor of the parameter's shape, or with a row for each block.

        Of the latter it is all where a block of moments lies in two parts.
        """
        if tuple(whole.shape) == self.shape:
            return self.own(whole, rank, size)
        blocks = self.blocks_of(rank, size)
        return whole if blocks is None else whole[blocks]

    def joined_blocks(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole of what the ranks have, in rank order, a row for each block of moments."""
        numbers = [self.blocks_of(rank, len(parts)) for rank in range(len(parts))]
        order = torch.cat([blocks for blocks in numbers if blocks is not None]).argsort()
        return torch.cat([*parts])[order]

    def blocks_of(self, rank: int, size: int) -> torch.Tensor | None:
        """Numbers of the blocks of moments that a rank's part is made of, in its order.

        Blocks lie one behind the other in the whole, as in the part.

        Returns:
            None where a block lies in two parts.
        """
        each, inner = self.shape[self.dim] // self.pieces, math.prod(self.shape[self.dim + 1 :])
        # Where the part of each piece begins, and its length, in elements of the whole.
        first = rank * (each // size) + min(rank, each % size)
        length = (each // size + (rank < each % size)) * inner
        num_pieces = math.prod(self.shape[: self.dim]) * self.pieces
        begin = (torch.arange(num_pieces) * each + first) * inner
        end = begin + length
        split = (end % _C.MOMENT_BLOCK != 0) & (end != math.prod(self.shape))
        if (begin % _C.MOMENT_BLOCK != 0).any() or split.any():
            return None
        return (begin[:, None] // _C.MOMENT_BLOCK + torch.arange(num_blocks((length,)))).flatten()


def num_blocks(shape: Sequence[int]) -> int:
    """Of the moments of a parameter."""
    return -(-math.prod(shape) // _C.MOMENT_BLOCK)


def check_blocks(model: nn.Module, cuts: Mapping[torch.Tensor, Cut], size: int) -> None:
    """Every rank's part has whole blocks of moments, as a format that rounds them there needs.

    Args:
        model: The whole.
        cuts: Of its parameters.
        size: Ranks that have the parts.

    Raises:
        NotImplementedError: A block lies in two parts.
    """
    for name, param in model.named_parameters():
        cut = cuts.get(param)
        if not cut or not param.requires_grad:
            continue
        if any(cut.blocks_of(rank, size) is None for rank in range(size)):
            raise NotImplementedError(
                f"optim_state_format='split_int8' rounds moments in blocks of {_C.MOMENT_BLOCK} "
                f"elements, and the parts of '{name}' on {size} ranks, {cut.shape_of(0, size)} of "
                f"{cut.shape}, are no whole blocks: give 'split' or 'split_bf16', or fewer ranks"
            )


_ranks: weakref.WeakValueDictionary[str, TensorRanks] = weakref.WeakValueDictionary()


def own_part(whole: torch.Tensor, cut: Cut | None, ranks: TensorRanks) -> torch.Tensor:
    """This rank's part of rank 0's values; a contiguous tensor of its own. Collective.

    Args:
        whole: A CPU tensor. A lazy one gives a lazy one.
        cut: None: all of it.
        ranks: Those that have the parts.
    """
    _ranks[ranks.name] = ranks
    dim, pieces = (cut.dim, cut.pieces) if cut else (-1, 1)
    part: torch.Tensor = _own_part(whole, dim, pieces, ranks.name, ranks.rank, ranks.size)
    return part


# An operator, so that a lazy model records it.
@torch.library.custom_op("castor::own_part", mutates_args=(), device_types="cpu")
def _own_part(
    whole: torch.Tensor, dim: int, pieces: int, group: str, rank: int, size: int
) -> torch.Tensor:
    values = whole.contiguous() if rank == 0 else torch.empty_like(whole).contiguous()
    _ranks[group].share(values)
    if dim >= 0:
        values = Cut(dim=dim, shape=(), pieces=pieces).own(values, rank, size)
    return values.clone(memory_format=torch.contiguous_format)


@_own_part.register_fake
def _(whole: torch.Tensor, dim: int, pieces: int, group: str, rank: int, size: int) -> torch.Tensor:
    if dim >= 0:
        whole = Cut(dim=dim, shape=(), pieces=pieces).own(whole, rank, size)
    return whole.new_empty(whole.shape)
