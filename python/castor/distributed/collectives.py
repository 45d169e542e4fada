"""Collectives with gradients, of tensor, sequence and context parallelism.

Shards come in rank order, and those of a tensor have the same size unless a width is given.

Sources: Shoeybi et al. 2019 (Megatron-LM, section 3), whose f is `copy_to_layer` and whose g is
`all_reduce`. Korthikanti et al. 2022 (Reducing Activation Recomputation in Large Transformer
Models, section 4.2.2), whose g is `gather_layer_input` and whose g-bar is `reduce_scatter`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch.autograd.graph import saved_tensors_hooks

if TYPE_CHECKING:
    from castor.distributed.parallel_groups import ModelParallelGroup


def copy_to_layer(x: torch.Tensor, ranks: ModelParallelGroup) -> torch.Tensor:
    """Returns the common input of a layer's shards: its gradient is all-reduced.

    Layers that take the same tensor one after the other (query, key and value) share one
    all-reduce.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    if parts := GatheredInput.of(x):
        return x if parts.entered is None else parts.entered
    known = ranks.entered.output_for(x)
    if known is None:
        gradient = EnteredGradient(ranks)
        known = cast("torch.Tensor", cast("Any", _Enter).apply(x, gradient))
        known._castor_gradient = gradient  # type: ignore[attr-defined]
        ranks.entered.remember(x, known)
    EnteredGradient.of(known).users += 1
    return known


class EnteredGradient:
    """The gradient of the common input of layers, which their ranks sum.

    Layers that run linear_of_entered add their gradients up here. The last of them begins the
    all-reduce, and computes its weight's gradient beside it. Everything else that takes the input
    gives its gradient to autograd, and the sum of all is reduced when autograd comes to the input.
    """

    def __init__(self, ranks: ModelParallelGroup) -> None:
        """Takes the ranks that sum the gradient."""
        self._ranks = ranks
        self.users = 0
        """Number of calls that the input was given to."""
        self.linear = 0
        """Number of these that are linear layers, which add up here."""
        self._came = 0
        self._total: torch.Tensor | None = None
        self._work: Any = None

    @staticmethod
    def of(entered: torch.Tensor) -> EnteredGradient:
        """Returns the gradient of a tensor that copy_to_layer has returned."""
        gradient: EnteredGradient = entered._castor_gradient  # type: ignore[attr-defined]
        return gradient

    @property
    def adds_up(self) -> bool:
        """Whether all that takes the input are linear layers, which add up here."""
        return self.linear == self.users

    def add(self, grad: torch.Tensor) -> None:
        """Adds the gradient of a linear layer, a new tensor, in the order of autograd."""
        self._came += 1
        self._total = grad if self._total is None else self._total.add_(grad)
        if self._came == self.linear:
            self._work = self._ranks.links.begin_all_reduce(self._total)

    def reduced(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        """Returns the sum over the ranks.

        Args:
            grad: Sum of the gradients that autograd was given; None: there is none.
        """
        self._ranks.entered.forget()  # that of a block that is recomputed here
        total, work = self._total, self._work
        self._came, self._total, self._work = 0, None, None
        if work is not None:
            work.wait()
        elif total is not None:  # backward did not come to all of the layers
            total = self._ranks.all_reduce(total)
        if grad is None:
            return total
        others = self._ranks.all_reduce(grad)
        return others if total is None else total + others


def linear_of_entered(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ranks: ModelParallelGroup
) -> torch.Tensor | None:
    """Returns a linear layer's output, with its input's gradient summed beside its weight's.

    The bits are those of torch.nn.functional.linear.

    Args:
        x: Input that copy_to_layer has returned.
        weight: Weight of shape (outputs, inputs).
        bias: Bias; None: there is none.
        ranks: Ranks that have the other rows of the weight.

    Returns:
        The output. None where nothing would go beside: tensors go through the host, the weight is
        frozen, backward computes gradients of weights later than those of inputs (ZBV), or code is
        being compiled.
    """
    if (
        not (weight.requires_grad and torch.is_grad_enabled() and x.requires_grad)
        or not ranks.entered.sums_beside
        or not ranks.links.sends_from_device(x)
        or x.dtype != weight.dtype
        or x.dim() < 2
        or torch.is_autocast_enabled(x.device.type)
        or torch.compiler.is_compiling()
        or GatheredInput.of(x)
    ):
        return None
    gradient = EnteredGradient.of(x)
    gradient.linear += 1
    return cast("torch.Tensor", cast("Any", _LinearOfEntered).apply(x, weight, bias, gradient))


def all_reduce(x: torch.Tensor, ranks: ModelParallelGroup) -> torch.Tensor:
    """Returns the sum of the outputs of a layer's shards."""
    return _collective(x, lambda x: ranks.all_reduce(x), _unchanged)


def all_reduce_mean(x: torch.Tensor, ranks: ModelParallelGroup) -> torch.Tensor:
    """Returns the mean over the ranks; the gradient passes through unchanged on each rank."""
    return _collective(x, lambda x: ranks.all_reduce(x) / ranks.size, _unchanged)


def gather_columns(x: torch.Tensor, ranks: ModelParallelGroup, width: int) -> torch.Tensor:
    """Gathers all ranks' columns; `width` is their full number."""
    return _collective(x, lambda x: ranks.all_gather_columns(x, width), ranks.local_columns)


def scatter_columns(x: torch.Tensor, ranks: ModelParallelGroup) -> torch.Tensor:
    """Returns this rank's columns of a tensor that every rank has."""
    width = x.shape[-1]
    return _collective(
        x,
        lambda x: ranks.local_columns(x).contiguous(),
        lambda g: ranks.all_gather_columns(g, width),
    )


def all_to_all(
    x: torch.Tensor, ranks: ModelParallelGroup, scattered: int, gathered: int
) -> torch.Tensor:
    """Scatters a full dimension and gathers a sharded one, in one all-to-all.

    Args:
        x: Tensor of the same shape on every rank.
        ranks: Ranks that exchange shards.
        scattered: Dimension of which each rank keeps its shard.
        gathered: Dimension whose shards each rank gathers, in rank order.
    """
    return _collective(
        x,
        lambda x: ranks.exchange(x, scattered, gathered),
        lambda g: ranks.exchange(g, gathered, scattered),
    )


def gather_tokens(x: torch.Tensor, ranks: ModelParallelGroup) -> torch.Tensor:
    """Gathers dimension 1, with which all ranks compute the same.

    A shard's gradient is multiplied by the number of ranks, so that it counts once in the mean of
    the ranks' gradients.
    """
    return _collective(
        x,
        lambda x: _all_gather(x, ranks, 1),
        lambda g: g.chunk(ranks.size, dim=1)[ranks.rank] * ranks.size,
    )


def scatter(x: torch.Tensor, ranks: ModelParallelGroup, dim: int) -> torch.Tensor:
    """Returns this rank's slice of a dimension; its gradient is all-gathered."""
    return _collective(x, lambda x: _slice(x, ranks, dim), lambda g: _all_gather(g, ranks, dim))


def all_gather_replicated(x: torch.Tensor, ranks: ModelParallelGroup, dim: int) -> torch.Tensor:
    """All-gathers a dimension for replicated compute: the gradient of a shard is its slice."""
    return _collective(x, lambda x: _all_gather(x, ranks, dim), lambda g: _slice(g, ranks, dim))


def all_gather(x: torch.Tensor, ranks: ModelParallelGroup, dim: int) -> torch.Tensor:
    """All-gathers a dimension; the gradients of the ranks are reduce-scattered."""
    return _collective(
        x, lambda x: _all_gather(x, ranks, dim), lambda g: ranks.reduce_scatter(g, dim)
    )


def reduce_scatter(x: torch.Tensor, ranks: ModelParallelGroup, dim: int) -> torch.Tensor:
    """Reduce-scatters a dimension; the gradients of the ranks are all-gathered."""
    return _collective(
        x, lambda x: ranks.reduce_scatter(x, dim), lambda g: _all_gather(g, ranks, dim)
    )


def gather_layer_input(x: torch.Tensor, ranks: ModelParallelGroup, dim: int) -> torch.Tensor:
    """All-gathers the input of a tensor-parallel layer; its gradient is reduce-scattered.

    The layer (copy_to_layer) saves only this rank's shard for backward, which gathers it again
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
        entered: The layer's input, from copy_to_layer.
    """
    parts = GatheredInput.of(entered)
    return nullcontext() if not parts or _others_save() else parts.kept.keeping(entered)


def _others_save() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


class _KeptShard:
    """This rank's shard of a gathered tensor, saved for backward."""

    def __init__(self, part: torch.Tensor, ranks: ModelParallelGroup, dim: int) -> None:
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


def _all_gather(shard: torch.Tensor, ranks: ModelParallelGroup, dim: int) -> torch.Tensor:
    return torch.cat(ranks.all_gather(shard).unbind(), dim)


def _slice(x: torch.Tensor, ranks: ModelParallelGroup, dim: int) -> torch.Tensor:
    """Returns this rank's slice, as a new contiguous tensor."""
    return x.chunk(ranks.size, dim)[ranks.rank].clone(memory_format=torch.contiguous_format)


def _unchanged(grad: torch.Tensor) -> torch.Tensor:
    return grad


def _collective(
    x: torch.Tensor,
    there: Callable[[torch.Tensor], torch.Tensor],
    back: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Returns there(x), whose gradient is back(gradient)."""
    return cast("torch.Tensor", cast("Any", _Collective).apply(x, there, back))


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        there: Callable[[torch.Tensor], torch.Tensor],
        back: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.back(grad), None, None


class _Enter(torch.autograd.Function):
    """Returns a layer's input, whose gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gradient: EnteredGradient) -> torch.Tensor:
        ctx.gradient = gradient
        ctx.set_materialize_grads(False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        return ctx.gradient.reduced(grad), None


class _LinearOfEntered(torch.autograd.Function):
    """A linear layer whose input's gradient goes to EnteredGradient before its weight's is made."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        gradient: EnteredGradient,
    ) -> torch.Tensor:
        ctx.gradient = gradient
        ctx.save_for_backward(x, weight)
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        of_x: torch.Tensor | None = rows.mm(weight).view(x.shape)
        if ctx.gradient.adds_up:
            ctx.gradient.add(of_x)
            of_x = None
        of_weight = rows.t().mm(x.reshape(-1, x.shape[-1]))
        of_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return of_x, of_weight, of_bias, None


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
        grad = kept.ranks.reduce_scatter(of_layers, kept.dim)
        return grad if replicated is None else grad.add_(replicated), None
