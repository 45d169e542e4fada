"""torch's fully_shard on a model that stays the same object."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from castor.errors import UsageError
from castor.runtime.blocks import find_blocks
from castor.runtime.hooks import ModuleHook
from castor.runtime.model_shards import ShardFinder
from castor.runtime.rank_group import RankGroup, Result
from castor.runtime.shards import Shards
from castor.runtime.tensor_types import tensor_types
from castor.runtime.torch_model import TorchModel


class ShardedModel(TorchModel):
    """A model whose parameters every rank shards, and which fully_shard gathers for passes.

    Between passes the model's parameters are the shards, after a forward without gradients as after
    a backward.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], *, ranks: RankGroup | None
    ) -> None:
        """See TorchModel; fully_shard has sharded the model."""
        super().__init__(model, optimizers, ranks=ranks, trained_by="fully_shard")
        self._model = weakref.ref(model)
        self._shards = Shards(model, ranks)
        model.register_forward_pre_hook(ModuleHook(_forward_begins, self))
        model.register_forward_hook(ModuleHook(_forward_is_over, self), always_call=True)

    def synchronise(self, on: bool) -> None:
        """See TorchModel."""
        super().synchronise(on)
        model: Any = self._model()
        if model is not None and self.ranks is not None:  # one process alone has nothing to reduce
            model.set_requires_gradient_sync(on)

    def reduce_gradients(self) -> None:
        """See TorchModel.

        Raises:
            UsageError: The last backward was under no_sync on some rank.
        """
        if self.ranks and any(self.ranks.all_gather_object(self.unreduced)):
            raise UsageError(
                "the last backward before this step was under booster.no_sync, and fully_shard "
                "reduces the ranks' gradients in a backward alone: run the last "
                "micro-batch outside it"
            )

    def gather(self, value: Any) -> list[Any]:
        """See BoostedModel."""
        self._reshard()
        return super().gather(value)

    def on_first(self, work: Callable[[], Result], shard_finder: ShardFinder) -> Result:
        """See BoostedModel."""
        self._reshard()
        return self._shards.on_first(work, shard_finder)

    def _reshard(self) -> None:
        """Shards parameters that a forward without its backward has left full."""
        from torch.distributed.fsdp import FSDPModule

        model = self._model()
        for module in model.modules() if model is not None else ():
            if isinstance(module, FSDPModule):
                module.reshard()


def groups_of(model: nn.Module) -> list[nn.Module]:
    """Returns the modules whose parameters are gathered at once: unshared blocks, and the model."""
    owners: dict[nn.Parameter, set[int]] = {}
    blocks = list(find_blocks(model).values())
    inside = {id(module): i for i, block in enumerate(blocks) for module in block.modules()}
    for module in model.modules():
        for param in module._parameters.values():
            if param is not None:
                owners.setdefault(param, set()).add(inside.get(id(module), -1))
    own = [all(len(owners[param]) == 1 for param in block.parameters()) for block in blocks]
    return [*(block for block, alone in zip(blocks, own, strict=True) if alone), model]


def islands_of(model: nn.Module, working: torch.dtype) -> list[nn.Module]:
    """Returns the outermost modules whose parameters all stay float32; see tensor_types.

    Raises:
        NotImplementedError: A parameter stays float32 in a module with others that do not, which
            fully_shard would have to gather in two types.
    """
    types = tensor_types(model, working)
    kept = {
        param for name, param in model.named_parameters() if types.of_param(name) == torch.float32
    }
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        params = list(module.parameters())
        if params and module not in inside and kept.issuperset(params):
            found.append(module)
            inside.update(module.modules())
    held = {param for module in found for param in module.parameters()}
    for name, param in model.named_parameters():
        if param in kept - held:
            raise NotImplementedError(
                f"parameter '{name}' stays float32 in {working}, and fully_shard gathers all of a "
                "module's in one type: use TorchDDPPlugin or GeminiPlugin, or give "
                "mixed_precision=, which says itself what passes compute in"
            )
    return found


def check_divisible(model: nn.Module) -> None:
    """Raises UsageError if fully_shard does not take a parameter: a scalar, or not contiguous."""
    for name, param in model.named_parameters():
        wrong = "has no dimension" if param.ndim == 0 else "is not contiguous"
        if param.ndim == 0 or not param.is_contiguous():
            raise UsageError(
                f"parameter '{name}' {wrong}, and fully_shard shards contiguous ones by their "
                "first dimension: change it, or use TorchDDPPlugin"
            )


def repoint(optimizers: Sequence[Optimizer], new: dict[torch.Tensor, torch.Tensor]) -> None:
    """Replaces the parameters of optimizers by the new ones, by identity."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"][:] = [new[param] for param in group["params"]]


def _forward_begins(boosted: ShardedModel, *_: Any) -> None:
    if torch.is_grad_enabled():
        boosted.pass_begins()


def _forward_is_over(boosted: ShardedModel, module: Any, _: Any, output: Any) -> None:
    if not torch.is_grad_enabled():
        module.reshard()  # no backward will do it
        return
    for tensor in tree_leaves(output):
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            tensor.register_hook(partial(_backward_begins, boosted))


def _backward_begins(boosted: ShardedModel, _: torch.Tensor) -> None:
    """Begins a pass of the model: fully_shard reads the state of no_sync here."""
    boosted.pass_begins()
