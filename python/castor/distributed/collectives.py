"""Collectives of sequence parallelism, with their gradients.

Source: Korthikanti et al. 2022 (Reducing Activation Recomputation in Large Transformer Models,
section 4.2.2). Its g is `gather_layer_input`, its g-bar is `reduce_scatter`. All shards of a tensor
have the same size, and shards come in rank order.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch.autograd.graph import saved_tensors_hooks

if TYPE_CHECKING:
    from castor.distributed.tensor_ranks import TensorRanks

    _CollectiveCall = Callable[[torch.Tensor, TensorRanks, int], torch.Tensor]


def scatter(x: torch.Tensor, ranks: TensorRanks, dim: int) -> torch.Tensor:
    """Returns this rank's slice of a dimension; its gradient is all-gathered."""
    return _collective(x, ranks, dim, there=_slice, back=_all_gather)


def all_gather_replicated(x: torch.Tensor, ranks: TensorRanks, dim: int) -> torch.Tensor:
    """All-gathers a dimension for replicated compute: the gradient of a shard is its slice."""
    return _collective(x, ranks, dim, there=_all_gather, back=_slice)


def all_gather(x: torch.Tensor, ranks: TensorRanks, dim: int) -> torch.Tensor:
    """All-gathers a dimension; the gradients of the ranks are reduce-scattered."""
    return _collective(x, ranks, dim, there=_all_gather, back=_reduce_scatter)


def reduce_scatter(x: torch.Tensor, ranks: TensorRanks, dim: int) -> torch.Tensor:
    """Reduce-scatters a dimension; the gradients of the ranks are all-gathered."""
    return _collective(x, ranks, dim, there=_reduce_scatter, back=_all_gather)


def gather_layer_input(x: torch.Tensor, ranks: TensorRanks, dim: int) -> torch.Tensor:
    """All-gathers the input of a tensor-parallel layer; its gradient is reduce-scattered.

    The layer (TensorRanks.enter) saves only this rank's shard for backward, which gathers it again
    (`keeping`). Every other use of the result has to be the same on all ranks.
    """
    kept = _KeptShard(x, ranks, dim)
    whole, entered = cast("Any", _GatherLayerInput).apply(x, kept)
    entered._castor_gathered_input = GatheredInput(None, entered._version, kept)
    whole._castor_gathered_input = GatheredInput(entered, whole._version, kept)
    return cast("torch.Tensor", whole)


class GatheredInput(NamedTuple):
    """Record of a tensor from gather_layer_input, kept as an attribute of that tensor."""

    entered: torch.Tensor | None
    """Tensor that tensor-parallel layers take instead; None: this tensor is that one."""
    version: int
    """Version counter of the tensor when it was gathered."""
    kept: _KeptShard
    """This rank's shard of the tensor."""

    @staticmethod
    def of(x: torch.Tensor) -> GatheredInput | None:
        """Returns the record of a tensor; None: it has none, or the tensor was written since."""
        found: GatheredInput | None = getattr(x, "_castor_gathered_input", None)
        return found if found and found.version == x._version else None


def keeping(entered: torch.Tensor) -> AbstractContextManager[Any]:
    """Has autograd save only this rank's shard of a gathered input, while a layer takes it.

    It has no effect under other hooks for saved tensors: a recomputed block saves nothing of the
    input, and an offloaded one has it elsewhere.

    Args:
        entered: The layer's input, from TensorRanks.enter.
    """
    parts = GatheredInput.of(entered)
    return nullcontext() if not parts or _others_save() else parts.kept.keeping(entered)


def _others_save() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


class _KeptShard:
    """This rank's shard of a gathered tensor, saved for backward."""

    def __init__(self, part: torch.Tensor, ranks: TensorRanks, dim: int) -> None:
        self.ranks = ranks
        self.dim = dim
        self._part = part.detach()
        self._version = part._version
        self._again: torch.Tensor | None = None

    def gathered(self) -> torch.Tensor:
        whole = _all_gather(self._part, self.ranks, self.dim)
        if _others_save():  # backward will not read the shard
            self._part = self._part.new_empty(0)
        return whole

    def keeping(self, whole: torch.Tensor) -> saved_tensors_hooks:
        storage = whole.untyped_storage()._cdata

        def pack(tensor: torch.Tensor) -> Any:
            if tensor.untyped_storage()._cdata != storage:
                return tensor
            return tensor.size(), tensor.stride(), tensor.storage_offset()

        return saved_tensors_hooks(pack, self._unpack)

    def let_go(self) -> None:
        """Lets go of the tensor that backward has gathered again."""
        self._again = None

    def _unpack(self, kept: Any) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        if self._part._version != self._version:
            raise RuntimeError(
                f"hidden states of shape {tuple(self._part.shape)} have been written in place "
                "after a sharded layer had taken them, and its backward needs them as they were: "
                "write to a copy"
            )
        if self._again is None:
            self._again = self.gathered()
        return self._again.as_strided(*kept)


def _all_gather(part: torch.Tensor, ranks: TensorRanks, dim: int) -> torch.Tensor:
    part = part.detach().contiguous()
    parts = part.new_empty((ranks.size, *part.shape))
    ranks.tensors.all_gather(part, parts)
    return torch.cat(parts.unbind(), dim)


def _reduce_scatter(x: torch.Tensor, ranks: TensorRanks, dim: int) -> torch.Tensor:
    parts = torch.stack(x.detach().chunk(ranks.size, dim))
    received = torch.empty_like(parts)
    ranks.tensors.all_to_all(parts, received)
    return sum_in_rank_order(received)


def sum_in_rank_order(parts: torch.Tensor) -> torch.Tensor:
    """Returns the sum of the ranks' tensors (ranks, ...), in fp32 and rounded once.

    A reduction of torch may add in another order on another device.
    """
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:].unbind():
        total += part
    return total.to(parts.dtype)


def _slice(x: torch.Tensor, ranks: TensorRanks, dim: int) -> torch.Tensor:
    """Returns this rank's slice, as a new contiguous tensor."""
    return x.chunk(ranks.size, dim)[ranks.rank].clone(memory_format=torch.contiguous_format)


def _collective(
    x: torch.Tensor, ranks: TensorRanks, dim: int, *, there: _CollectiveCall, back: _CollectiveCall
) -> torch.Tensor:
    return cast("torch.Tensor", cast("Any", _Collective).apply(x, ranks, dim, there, back))


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        ranks: TensorRanks,
        dim: int,
        there: _CollectiveCall,
        back: _CollectiveCall,
    ) -> torch.Tensor:
        ctx.ranks, ctx.dim, ctx.back = ranks, dim, back
        return there(x, ranks, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        return ctx.back(grad, ctx.ranks, ctx.dim), None, None, None, None


class _GatherLayerInput(torch.autograd.Function):
    """Returns the full tensor twice: for replicated compute, and for the shards of layers."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kept: _KeptShard) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.kept = kept
        ctx.set_materialize_grads(False)
        whole = kept.gathered()
        return whole, whole.detach()  # not a view: the two would hold each other

    @staticmethod
    def backward(
        ctx: Any, of_replicated: torch.Tensor | None, of_layers: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, None]:
        kept: _KeptShard = ctx.kept
        kept.let_go()
        replicated = None if of_replicated is None else _slice(of_replicated, kept.ranks, kept.dim)
        if of_layers is None:
            return replicated, None
        grad = _reduce_scatter(of_layers, kept.ranks, kept.dim)
        return grad if replicated is None else grad.add_(replicated), None
