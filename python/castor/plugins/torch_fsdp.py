"""torch's fully_shard under castor's loop (FSDP2; Colossal-AI's TorchFSDPPlugin)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from castor.config.declared import documented
from castor.config.settings import StepSettings
from castor.errors import UsageError
from castor.optim.hybrid_adam import HybridAdam
from castor.optim.rules import optimizer_params
from castor.optim.torch_step import TorchStep
from castor.plugins.arguments import takes
from castor.plugins.parallelize import check_states
from castor.plugins.torch_settings import TorchPlugin, check_precision, only_neutral
from castor.runtime.blocks import find_blocks
from castor.runtime.hooks import ModuleHook
from castor.runtime.model_shards import ShardFinder
from castor.runtime.peft_model import is_peft_model
from castor.runtime.process_groups import lasting_group
from castor.runtime.rank_group import RankGroup, Result
from castor.runtime.ranks import be_alone
from castor.runtime.shards import Shards
from castor.runtime.tensor_types import tensor_types
from castor.runtime.torch_model import TorchModel

if TYPE_CHECKING:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
else:  # torch.distributed.fsdp takes as long to import as all of castor
    CPUOffloadPolicy = MixedPrecisionPolicy = Any


# --- torch's fully_shard on a model that stays the same object ------------------------------------


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


# --- torch's fully_shard under castor's loop (FSDP2; Colossal-AI's TorchFSDPPlugin) ---------------

_NEUTRAL: dict[str, tuple[object, str]] = {
    "process_group": (None, "all ranks shard the model"),
    "sharding_strategy": (None, "give reshard_after_forward; TorchDDPPlugin shards nothing"),
    "auto_wrap_policy": (None, "the model's blocks are all-gathered one by one"),
    "backward_prefetch": (None, "fully_shard gathers ahead by itself"),
    "ignored_modules": (None, "all parameters are sharded"),
    "param_init_fn": (None, "build the model in castor.LazyInitContext"),
    "fp8_communication": (False, "give mixed_precision"),
}
"""Arguments of Colossal-AI's plugin that do nothing here."""


def _check_reshard(value: object, name: str) -> None:
    if not isinstance(value, bool | int):
        raise TypeError(f"{name} is {value!r}; give True, False, a number of ranks or None")


@dataclass(frozen=True, kw_only=True)
class FSDPArguments(StepSettings):
    """Arguments of TorchFSDPPlugin, as a user gives them."""

    reshard_after_forward: Annotated[bool | int, _check_reshard] | None = None
    """Whether a block's parameters are sharded again after its forward, and gathered once more for
    its backward. An integer: they are then sharded over that many ranks. None: True for blocks,
    False for the parameters outside of them."""
    cpu_offload: bool | CPUOffloadPolicy | None = None
    """Whether shards wait on the host, where the optimizer steps: True, False or a torch
    CPUOffloadPolicy. True on a GPU: in page-locked memory. On the CPU device they are there
    anyway."""
    mixed_precision: MixedPrecisionPolicy | None = None
    """A torch MixedPrecisionPolicy, instead of precision."""
    sync_module_states: bool = True
    """Whether rank 0's values become every rank's at boost. False: each rank has made the same
    values."""
    device: str | torch.device | None = None
    """Device that the model computes on, as in TorchDDPPlugin. On a GPU a block's full parameters
    are moved there one block at a time, and leave shards."""
    precision: Annotated[str, check_precision] | None = None
    """"fp32", or "bf16": parameters are gathered and computed with in bfloat16, and gradients are
    summed in float32. Shards and states are float32. Parameters that transformers keeps in float32
    are gathered in float32. Default: "fp32"."""


@documented(FSDPArguments)
class TorchFSDPPlugin(TorchPlugin):
    """Sharded parameters, gradients and optimizer states by fully_shard (Zhao et al. 2023).

    torch.distributed.fsdp.fully_shard shards the model's blocks, as castor finds them, and then the
    rest of the model. A block's parameters are full while it computes. Between passes the
    parameters, p.grad and optimizer.state are DTensors. boost gives the optimizer the new
    parameters; references taken before boost are to tensors that are no longer trained. Every rank
    runs the same forwards, also those without gradients, and keeps buffers of its own.

    Names of arguments are Colossal-AI's, fully_shard's or GeminiPlugin's; all are keyword-only.

    Args:
        **arguments: The fields of FSDPArguments, by name.
        **not_yet: Arguments of Colossal-AI's plugin, accepted at the value that asks for nothing.

    Raises:
        ValueError: A value is out of range, or precision and mixed_precision are both given.
        TypeError: A value has the wrong type, or an argument does not exist or is for castor's
            chunks.
        NotImplementedError: An argument asks for something this version lacks; the message names
            it.
        UsageError: There is no such GPU, or none for this rank, or this torch has no CUDA.
    """

    @takes(FSDPArguments, others=only_neutral(_NEUTRAL))
    def __init__(self, arguments: FSDPArguments) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

        precision, mixed_precision = arguments.precision, arguments.mixed_precision
        self._resolve(arguments, arguments.device, precision or "fp32")
        if precision is not None and mixed_precision is not None:
            raise ValueError(
                f"precision={precision!r} and mixed_precision both say what passes compute in; "
                "give one"
            )
        if mixed_precision is not None and not isinstance(mixed_precision, MixedPrecisionPolicy):
            raise TypeError(
                f"mixed_precision is a {type(mixed_precision).__name__}; give a "
                "torch.distributed.fsdp.MixedPrecisionPolicy"
            )
        cpu_offload = arguments.cpu_offload
        if not isinstance(cpu_offload, bool | CPUOffloadPolicy | None):
            raise TypeError(
                f"cpu_offload is a {type(cpu_offload).__name__}; give True, False or a "
                "torch.distributed.fsdp.CPUOffloadPolicy"
            )
        if cpu_offload is True:
            cpu_offload = CPUOffloadPolicy(pin_memory=self.settings.device != "cpu")
        self._sync_module_states = arguments.sync_module_states
        dtype = self.settings.compute_dtype
        self._options: dict[str, Any] = {
            "reshard_after_forward": arguments.reshard_after_forward,
            "offload_policy": cpu_offload or OffloadPolicy(),
            "mp_policy": mixed_precision
            or MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype and torch.float32),
        }

    def configure(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> ShardedModel:
        """Takes model and optimizers over, in place. Booster.boost calls it.

        Raises:
            UsageError: The model or an optimizer cannot be boosted, or the ranks were given
                different ones, or share a GPU; model and optimizers are unchanged.
            NotImplementedError: The optimizer is not supported, the model is a PeftModel, or a
                module has a parameter that stays float32 beside others that do not.
            ValueError: reshard_after_forward is an integer that does not divide the number of
                ranks.
        """
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        self._check(model, optimizers)
        working = self.settings.compute_dtype
        islands = islands_of(model, working) if working else []
        if optimizers:
            optimizer_params(model, optimizers, [None] * len(optimizers))
        self._check_divisible(model, optimizers)
        ranks = self._join(model, optimizers)
        backend = self._backend(ranks)
        self._take_device()
        self._give_values(model)
        if ranks is None:
            be_alone()
        elif self._sync_module_states:
            ranks.broadcast_all((*model.parameters(), *model.buffers()))
        mesh = DeviceMesh.from_group(lasting_group(backend), self.device.type)
        before = dict(model.named_parameters())
        for module in islands:
            options = {**self._options, "mp_policy": MixedPrecisionPolicy()}
            fully_shard(module, mesh=mesh, **options)
        for module in groups_of(model):
            fully_shard(module, mesh=mesh, **self._options)
        after = dict(model.named_parameters())
        repoint(optimizers, {param: after[name] for name, param in before.items()})
        boosted = ShardedModel(model, optimizers, ranks=ranks)
        TorchStep(boosted, model, optimizers, self.settings)
        return boosted

    def _backend(self, ranks: RankGroup | None) -> str:
        """Returns the backend of the ranks' process group, which sends host memory as well.

        Raises:
            UsageError: torch has no backend for the ranks' GPUs.
        """
        if self.device.type == "cpu":
            return "gloo"
        return f"cpu:gloo,{self.device.type}:{self._device_backend(ranks).name}"

    def _check_divisible(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        check_divisible(model)
        if is_peft_model(model):
            raise NotImplementedError(
                "TorchFSDPPlugin does not shard PeftModels, whose files are of their adapters "
                "alone: use TorchDDPPlugin"
            )
        for optimizer in optimizers:
            if isinstance(optimizer, HybridAdam):
                raise NotImplementedError(
                    "HybridAdam steps full tensors, and TorchFSDPPlugin leaves each rank a shard: "
                    "use torch.optim.AdamW"
                )
        check_states(optimizers, "full parameters, which fully_shard's")
