"""Autograd functions that exchange tokens of hidden states between ranks.

Source: Korthikanti et al. 2022 (Reducing Activation Recomputation in Large Transformer Models,
section 4.2.2), whose g is `enter_parts` and whose g-bar is `sum_to_parts`. Every part of a tensor
has the same size, and parts come in rank order.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch.autograd.graph import saved_tensors_hooks

if TYPE_CHECKING:
    from castor.distributed.tensor_ranks import TensorRanks

    _Exchange = Callable[[torch.Tensor, TensorRanks, int], torch.Tensor]


def own_part(x: torch.Tensor, ranks: TensorRanks, dim: int) -> torch.Tensor:
    """This rank's part of a dimension of what every rank has."""
    return _exchanged(x, ranks, dim, there=_own, back=_gathered)


def parts_of_all(x: torch.Tensor, ranks: TensorRanks, dim: int) -> torch.Tensor:
    """All of a dimension of which each rank has a part, for what every rank computes alike."""
    return _exchanged(x, ranks, dim, there=_gathered, back=_own)


def all_parts(x: torch.Tensor, ranks: TensorRanks, dim: int) -> torch.Tensor:
    """... for what each computes otherwise: a part's gradient is the sum of theirs."""
    return _exchanged(x, ranks, dim, there=_gathered, back=_summed_part)


def sum_to_parts(x: torch.Tensor, ranks: TensorRanks, dim: int) -> torch.Tensor:
    """This rank's part of a dimension of the sum over the ranks."""
    return _exchanged(x, ranks, dim, there=_summed_part, back=_gathered)


def enter_parts(x: torch.Tensor, ranks: TensorRanks, dim: int) -> torch.Tensor:
    """All of a dimension of which each rank has a part, as input of a layer's parts.

    What enters of it (TensorRanks.enter) keeps this rank's part until backward, where it is
    gathered again (`keeping`), and its gradient is the sum of the parts'. Other uses of it are
    taken to be the same on every rank.
    """
    kept = _KeptPart(x, ranks, dim)
    whole, entered = cast("Any", _EnterParts).apply(x, kept)
    entered._castor_in_parts = InParts(None, entered._version, kept)
    whole._castor_in_parts = InParts(entered, whole._version, kept)
    return cast("torch.Tensor", whole)


class InParts(NamedTuple):
    """Record of a tensor that enter_parts returns: an attribute of the tensor."""

    entered: torch.Tensor | None
    """Tensor that layers take instead; None: it is this one."""
    version: int
    """Version of the tensor."""
    kept: _KeptPart

    @staticmethod
    def of(x: torch.Tensor) -> InParts | None:
        """Returns the record of a tensor; None: it has none, or has been written since."""
        found: InParts | None = getattr(x, "_castor_in_parts", None)
        return found if found and found.version == x._version else None


def keeping(entered: torch.Tensor) -> AbstractContextManager[Any]:
    """In it a layer is given what has entered, and autograd saves this rank's part of it.

    Not where others decide what is saved: a block that runs again keeps nothing of it, and one that
    is offloaded has it elsewhere.
    """
    parts = InParts.of(entered)
    return nullcontext() if not parts or _others_save() else parts.kept.keeping(entered)


def _others_save() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


class _KeptPart:
    """This rank's part of a tensor that has been gathered, until backward has read it."""

    def __init__(self, part: torch.Tensor, ranks: TensorRanks, dim: int) -> None:
        self.ranks = ranks
        self.dim = dim
        self._part = part.detach()
        self._version = part._version
        self._again: torch.Tensor | None = None

    def gathered(self) -> torch.Tensor:
        whole = _gathered(self._part, self.ranks, self.dim)
        if _others_save():  # nobody will ask for the part
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
        """Backward has read it."""
        self._again = None

    def _unpack(self, kept: Any) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        if self._part._version != self._version:
            raise RuntimeError(
                f"hidden states of shape {tuple(self._part.shape)} have been written in place "
                "after a divided layer had taken them, and its backward needs them as they were: "
                "write to a copy"
            )
        if self._again is None:
            self._again = self.gathered()
        return self._again.as_strided(*kept)


def _gathered(part: torch.Tensor, ranks: TensorRanks, dim: int) -> torch.Tensor:
    part = part.detach().contiguous()
    parts = part.new_empty((ranks.size, *part.shape))
    ranks.tensors.gather(part, parts)
    return torch.cat(parts.unbind(), dim)


def _summed_part(x: torch.Tensor, ranks: TensorRanks, dim: int) -> torch.Tensor:
    parts = torch.stack(x.detach().chunk(ranks.size, dim))
    received = torch.empty_like(parts)
    ranks.tensors.exchange(parts, received)
    return received.sum(0, dtype=torch.float32).to(x.dtype)


def _own(x: torch.Tensor, ranks: TensorRanks, dim: int) -> torch.Tensor:
    """A tensor of its own."""
    return x.chunk(ranks.size, dim)[ranks.rank].clone(memory_format=torch.contiguous_format)


def _exchanged(
    x: torch.Tensor, ranks: TensorRanks, dim: int, *, there: _Exchange, back: _Exchange
) -> torch.Tensor:
    return cast("torch.Tensor", cast("Any", _Exchanged).apply(x, ranks, dim, there, back))


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        ranks: TensorRanks,
        dim: int,
        there: _Exchange,
        back: _Exchange,
    ) -> torch.Tensor:
        ctx.ranks, ctx.dim, ctx.back = ranks, dim, back
        return there(x, ranks, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        return ctx.back(grad, ctx.ranks, ctx.dim), None, None, None, None


class _EnterParts(torch.autograd.Function):
    """Gives the whole twice: for what every rank computes alike, and for parts of layers."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kept: _KeptPart) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.kept = kept
        ctx.set_materialize_grads(False)
        whole = kept.gathered()
        return whole, whole.detach()  # no view: they would hold each other

    @staticmethod
    def backward(
        ctx: Any, of_alike: torch.Tensor | None, of_layers: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, None]:
        kept: _KeptPart = ctx.kept
        kept.let_go()
        alike = None if of_alike is None else _own(of_alike, kept.ranks, kept.dim)
        if of_layers is None:
            return alike, None
        grad = _summed_part(of_layers, kept.ranks, kept.dim)
        return grad if alike is None else grad.add_(alike), None
