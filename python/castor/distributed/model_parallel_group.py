"""Tensor-parallel ranks, and their collectives with gradients.

Sources: Shoeybi et al. 2019 (Megatron-LM, section 3), whose f is `TensorRanks.enter` and whose g is
`TensorRanks.reduce`.
"""

from __future__ import annotations

import math
import pickle
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from castor import _C
from castor.distributed.sequence_collectives import GatheredInput, all_gather
from castor.errors import UsageError
from castor.runtime.device_groups import DeviceLink
from castor.runtime.ranks import Peers, common_memory_mark

BETWEEN_PASSES = "what ranks tell each other between passes (a step, a save)"
"""Place of a gather outside of passes, for messages."""


def _never(_place: str, _other: str) -> bool:
    return False


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorRanks(Peers):
    """The ranks with the shards of each layer. Collective: all make the same calls in order."""

    name: str
    """Name of the process group, which is used here only."""
    tensors: _C.RankTensors
    """Collectives of tensors."""
    _device_links: list[DeviceLink] = field(default_factory=list)
    _entered: _Entered = field(default_factory=lambda: _Entered())

    @classmethod
    def of(cls, name: str, *, rank: int, size: int) -> TensorRanks:
        """Makes the ranks of a process group. Collective."""
        group = _C.RankGroup(name)
        mark = common_memory_mark(Peers(rank=rank, size=size, group=group))
        tensors = _C.RankTensors(name, memory_mark=mark)
        return cls(rank=rank, size=size, group=group, name=name, tensors=tensors)

    @property
    def link(self) -> str:
        """Name of the link that activations go through, for reports."""
        return self.tensors.device_backend or self.tensors.link

    def use_device_link(self, link: DeviceLink) -> None:
        """Sends tensors on devices over a process group, from now on."""
        self._device_links[:] = [link]

    @property
    def device_link(self) -> DeviceLink | None:
        """Link between the ranks' devices; None: tensors go through the host."""
        return self._device_links[0] if self._device_links else None

    def gather(self, value: Any) -> list[Any]:
        """Returns the picklable values of all ranks, in rank order; see Peers.

        Raises:
            UsageError: A rank is within a pass; every rank raises it.
        """
        return self.gather_at(BETWEEN_PASSES, value)

    def gather_at(self, place: str, value: Any) -> list[Any]:
        """Gathers as gather does; UsageError names two ranks that are at different places."""
        heard = self.hear(place, value)
        if link := self.device_link:
            link.check()
        return [given for _, given in heard]

    def hear(
        self, place: str, value: Any, *, unless: Callable[[str, str], bool] = _never
    ) -> list[tuple[str, Any]]:
        """Returns the place and the picklable value of every rank, in rank order.

        It uses the link that names a rank which has ended.

        Args:
            place: Place in the program where this rank is, for a message.
            value: This rank's picklable value.
            unless: Whether ranks may be at two different places together.

        Raises:
            UsageError: Two ranks are at different places; every rank raises it.
        """
        given = self.tensors.gather_bytes(pickle.dumps((place, value)), f"is at {place}")
        everyone: list[tuple[str, Any]] = [pickle.loads(one) for one in given]
        for rank, (other, _) in enumerate(everyone):
            if other != everyone[0][0] and not unless(everyone[0][0], other):
                raise UsageError(
                    f"rank 0 is at {everyone[0][0]}, and rank {rank} at {other}: ranks with shards "
                    "of one model take part in each other's passes and steps; give all as many "
                    "batches and micro-batches"
                )
        return everyone

    def leave(self) -> None:
        """Leaves the group, since this rank cannot go on.

        Ranks that wait for it raise Error, and so do later calls. Ranks that share no memory with
        it learn of it when this process ends.
        """
        self.tensors.leave()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the sum over the ranks, in rank order: the same bits on all. A new tensor."""
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        self.tensors.all_reduce(total)
        return total

    def all_reduce_on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums as all_reduce does, and returns a new tensor on the CPU.

        For gradients: one rank may have its own on the device, and another in host storage.
        """
        total = tensor.detach().to("cpu", memory_format=torch.contiguous_format, copy=True)
        self.tensors.all_reduce(total)
        return total

    def shard_range(self, length: int, rank: int | None = None) -> range:
        """Returns the indices of a rank's shard of `length` elements, as tensor_split divides them.

        Args:
            length: Full number of elements.
            rank: Rank that has the shard; None: this one.
        """
        each, more = divmod(length, self.size)
        rank = self.rank if rank is None else rank
        return range(rank * each + min(rank, more), (rank + 1) * each + min(rank + 1, more))

    def local_columns(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns this rank's shard of the last dimension."""
        return tensor.tensor_split(self.size, dim=-1)[self.rank]

    def all_gather_columns(self, own: torch.Tensor, width: int) -> torch.Tensor:
        """Gathers the last dimension outside autograd; `width` is its full size."""
        widths = [len(self.shard_range(width, rank)) for rank in range(self.size)]
        padded = torch.nn.functional.pad(own.detach(), (0, widths[0] - own.shape[-1])).contiguous()
        parts = padded.new_empty((self.size, *padded.shape))
        self.tensors.all_gather(padded, parts)
        return torch.cat(
            [part[..., :of] for part, of in zip(parts.unbind(), widths, strict=True)], dim=-1
        )

    def all_gather_shards(
        self, own: torch.Tensor, shapes: Sequence[tuple[int, ...]]
    ) -> list[torch.Tensor]:
        """Gathers all ranks' tensors, in rank order.

        Args:
            own: This rank's tensor, on the CPU.
            shapes: Shape of each rank's tensor.
        """
        longest = max(map(math.prod, shapes))
        padded = own.new_zeros(longest)
        padded[: own.numel()] = own.detach().reshape(-1)
        parts = own.new_empty((self.size, longest))
        self.tensors.all_gather(padded, parts)
        return [
            part[: math.prod(shape)].view(shape)
            for part, shape in zip(parts.unbind(), shapes, strict=True)
        ]

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the common input of a layer's shards: its gradient is all-reduced.

        Layers that take the same tensor one after the other (query, key and value) share one
        all-reduce.
        """
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x
        if parts := GatheredInput.of(x):
            return x if parts.entered is None else parts.entered
        known = self._entered.output_for(x)
        if known is None:
            known = _apply(_Enter, x, self)
            self._entered.remember(x, known)
        return known

    def forget_entered(self) -> None:
        """Forgets the tensor that entered last, after a pass."""
        self._entered.forget()

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum of the outputs of a layer's shards."""
        return _apply(_Reduce, x, self)

    def gather_columns(self, x: torch.Tensor, width: int) -> torch.Tensor:
        """Gathers all ranks' columns; `width` is their full number."""
        return _apply(_Gather, x, self, width)

    def scatter_columns(self, x: torch.Tensor) -> torch.Tensor:
        """Returns this rank's columns of a tensor that every rank has."""
        return _apply(_ScatterColumns, x, self)

    def all_to_all(self, x: torch.Tensor, scattered: int, gathered: int) -> torch.Tensor:
        """Scatters a full dimension and gathers a sharded one, in one all-to-all.

        Args:
            x: Tensor of the same shape on every rank.
            scattered: Dimension of which each rank keeps its shard.
            gathered: Dimension whose shards each rank gathers, in rank order.
        """
        return _apply(_AllToAll, x, self, scattered, gathered)

    def all_to_all_values(self, x: torch.Tensor, scattered: int, gathered: int) -> torch.Tensor:
        """Exchanges as all_to_all does, outside autograd."""
        parts = torch.stack(x.detach().chunk(self.size, scattered))
        received = torch.empty_like(parts)
        self.tensors.all_to_all(parts, received)
        return torch.cat(received.unbind(), gathered)

    def all_reduce_mean(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the mean over the ranks; the gradient passes through unchanged on each rank."""
        return _apply(_Mean, x, self)

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Gathers a dimension with which each rank computes something of its own.

        So a shard's gradient is the sum of all ranks' gradients.

        Args:
            x: Tensor of the same shape on every rank.
            dim: Dimension whose shards are gathered in rank order.
        """
        return all_gather(x, self, dim)

    def gather_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Gathers dimension 1, with which all ranks compute the same.

        A shard's gradient is multiplied by the number of ranks, so that it counts once in the
        mean of the ranks' gradients.
        """
        return _apply(_GatherTokens, x, self)


class _Entered:
    """The last input of TensorRanks.enter and its output, until another enters or the pass ends.

    The output is held here, because autograd may keep only a view of it.
    """

    def __init__(self) -> None:
        self._input: weakref.ref[torch.Tensor] | None = None
        self._output: torch.Tensor | None = None
        self._version = 0

    def output_for(self, x: torch.Tensor) -> torch.Tensor | None:
        if self._input is None or self._input() is not x or x._version != self._version:
            return None
        return self._output

    def remember(self, x: torch.Tensor, output: torch.Tensor) -> None:
        self._input, self._output, self._version = weakref.ref(x), output, x._version

    def forget(self) -> None:
        self._input = self._output = None


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> torch.Tensor:
    apply: Any = function.apply
    result: torch.Tensor = apply(*arguments)
    return result


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.ranks.forget_entered()  # those of a block that is recomputed here
        return ctx.ranks.all_reduce(grad), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
        return ranks.all_reduce(x)

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: TensorRanks, width: int) -> torch.Tensor:
        ctx.ranks = ranks
        return ranks.all_gather_columns(x, width)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.ranks.local_columns(grad), None, None


class _ScatterColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
        ctx.ranks, ctx.width = ranks, x.shape[-1]
        return ranks.local_columns(x).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.ranks.all_gather_columns(grad, ctx.width), None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, ranks: TensorRanks, scattered: int, gathered: int
    ) -> torch.Tensor:
        ctx.ranks, ctx.back = ranks, (gathered, scattered)
        return ranks.all_to_all_values(x, scattered, gathered)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.ranks.all_to_all_values(grad, *ctx.back), None, None, None


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
        return ranks.all_reduce(x) / ranks.size

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
        ctx.ranks = ranks
        return torch.cat(ranks.all_gather_shards(x, [tuple(x.shape)] * ranks.size), dim=1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.chunk(ctx.ranks.size, dim=1)[ctx.ranks.rank] * ctx.ranks.size, None
