"""Pipeline parallelism: the stages of a model on several ranks, and the parameters they share."""

from __future__ import annotations

import itertools
import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed, nn
from torch.optim import Optimizer

from castor import _C
from castor.distributed.context_parallel import ContextParallel
from castor.distributed.inputs import asked_of
from castor.distributed.parallel_groups import ModelParallelGroup
from castor.distributed.pipeline_plan import PipelinePlan, cheapest_cuts
from castor.distributed.rank_rng import Generators
from castor.distributed.stage_transfer import StageTransfer
from castor.distributed.stages import StageModules, places_of
from castor.distributed.tensor_parallel import TensorParallel
from castor.errors import UsageError
from castor.lazy import is_lazy, random_states
from castor.runtime.hooks import ModuleHook
from castor.runtime.model_shards import FullModel, Runs, Segments
from castor.runtime.packed import is_packed
from castor.runtime.peft_model import adapter_tensors, is_peft_model
from castor.runtime.rank_group import RankGroup
from castor.runtime.waits import waiting
from castor.runtime.weight_conversions import file_layout

# --- Parameters that several stages share, such as a tied embedding; each rank has one copy -------

# Source: Narayanan et al. 2021 (Megatron-LM, section 2.2), for tied embeddings on two stages.


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedCopy:
    """This rank's copy of a parameter that several stages share."""

    param: nn.Parameter
    ranks: ModelParallelGroup
    """Ranks that have a copy."""


class SharedParameters:
    """This rank's copies of shared parameters.

    Before a step each copy gets the sum of all copies' gradients, so all copies stay equal.
    """

    def __init__(self, copies: Sequence[SharedCopy]) -> None:
        """Takes the copies; changes nothing.

        Args:
            copies: This rank's copies, in an order that is the same on all ranks.
        """
        self._copies = list(copies)
        self._summed: bool | None = None
        """Whether gradients are summed over the copies; None: no backward has begun yet."""

    @property
    def counted_elsewhere(self) -> AbstractSet[nn.Parameter]:
        """Parameters whose gradient another rank counts in the norm of all gradients."""
        return {copy.param for copy in self._copies if copy.ranks.rank > 0}

    def begin(self) -> None:
        """Prepares for backward passes: keeps sums of an earlier step on one rank only.

        Otherwise a later sum would count them once for each rank.
        """
        if self._summed:
            for param in self.counted_elsewhere:
                if param.grad is not None:
                    param.grad.data.zero_()
        self._summed = False

    def settle(self) -> None:
        """Sums the gradients over the copies, once after any number of passes. Collective."""
        if self._summed is not False:
            return
        for copy in self._copies:
            grad = copy.param.grad
            if grad is not None:
                # Through .data: an edit by the user would be refused under a loss scale.
                grad.data.copy_(copy.ranks.all_reduce_on_host(grad))
        self._summed = True


# --- The stages of a model on several ranks ------------------------------------------------------

_NOBODY_SENDS = 1 << 20
"""Tag of a message that is never sent; torch's schedules use no tags."""


class PipelineParallel:
    """A model of which this process has some pipeline stages."""

    def __init__(
        self,
        model: nn.Module,
        plan: PipelinePlan,
        ranks: ModelParallelGroup,
        *,
        subset_of_pp: Callable[[Sequence[int]], ModelParallelGroup | None],
        group: distributed.ProcessGroup,
        chunks: int = 1,
        folded: bool = False,
        layers: Sequence[int] | None = None,
    ) -> None:
        """Assigns blocks to stages and stages to ranks; changes nothing.

        Args:
            model: A full model of transformers, on the CPU, lazy or not.
            plan: Pipeline plan of the model.
            ranks: Ranks that have its stages.
            subset_of_pp: Makes a group of some of these ranks, by their numbers, or returns None
                if this rank is not among them. All ranks of the run call it with the same numbers.
            group: Process group that stage inputs and outputs go through.
            chunks: Number of stages of each rank.
            folded: Whether every second row of stages goes back from the last rank to the first, as
                a V. Otherwise each row begins at the first rank again.
            layers: Number of blocks of each stage; None: balanced by their cost.

        Raises:
            UsageError: There are too few blocks, or `layers` does not fit.
            NotImplementedError: The model's outputs have router logits, and castor cannot send
                them between stages; see ask_for_router_logits.
        """
        blocks = plan.blocks_of(model)
        stages = ranks.size * chunks
        if len(blocks) < stages:
            raise UsageError(
                f"this {type(model).__name__} has {len(blocks)} blocks, too few for {stages} "
                f"stages (pp_size={ranks.size} x num_model_chunks={chunks})"
            )
        if layers is None:
            layers = cheapest_cuts(model, plan, stages)
        elif len(layers) != stages or sum(layers) != len(blocks):
            raise UsageError(
                f"num_layers_per_stage={list(layers)} is of {len(layers)} stages and "
                f"{sum(layers)} blocks, and there are {stages} (pp_size={ranks.size} x "
                f"num_model_chunks={chunks}) and {len(blocks)}"
            )
        elif min(layers) < 1:
            raise UsageError(
                f"num_layers_per_stage={list(layers)} leaves a stage without a block; give each "
                "one at least"
            )
        self.ranks = ranks
        self.num_stages = stages
        self._rank_of = [_rank_of(stage, ranks.size, folded=folded) for stage in range(stages)]
        self.rank_of_block = [
            rank for rank, of in zip(self._rank_of, layers, strict=True) for _ in range(of)
        ]
        """Number of the rank that has each block of the model."""
        self.tensor: TensorParallel | None = None
        """Tensor parallelism of each layer; None: there is none."""
        self.sequences: ContextParallel | None = None
        """Context parallelism; None: there is none."""
        self.running = False
        """Whether a pass through all stages is under way, in which the model may be called."""
        self.broken = ""
        """Reason why the ranks are no longer connected; empty: they are."""
        self._idle = waiting(
            ranks.rank, ranks.size,
            place="is in a pass through all stages",
            awaited="a rank with another stage",
        )  # fmt: skip
        self._model = weakref.ref(model)
        self._plan = plan
        self._transfer = StageTransfer.of(model, plan)
        self.ask_for_router_logits(model, {})
        self._cuts = [sum(layers[:stage]) for stage in range(stages + 1)]
        self._subset_of_pp = subset_of_pp
        self.group = group
        self.device = torch.device("cpu")
        """Device that this rank computes on."""
        self.generators = Generators(self.device)
        self.full_model: FullModel | None = None
        self._shared = SharedParameters([])
        """Parameters of which other ranks' stages have copies too."""
        self._modules: StageModules | None = None

    @property
    def transport(self) -> tuple[distributed.ProcessGroup, torch.device]:
        """Process group that sends stage inputs and outputs, and the device they are on."""
        link = self.ranks.device_link
        return (link.group, link.device) if link else (self.group, torch.device("cpu"))

    @property
    def has_last(self) -> bool:
        """Whether this process has the last stage."""
        return self._rank_of[-1] == self._rank

    @property
    def modules(self) -> StageModules:
        """This process's stages."""
        assert self._modules is not None
        return self._modules

    @property
    def encoder(self) -> nn.Module | None:
        """The encoder of an encoder-decoder; None: the model has none."""
        model, row = self._model(), self._plan.encoder
        assert model is not None
        return model.get_submodule(row.base) if row else None

    def apply(self, optimizers: Sequence[Optimizer], named: nn.Module) -> None:
        """Leaves this rank's stages in the model, and their parameters in the optimizers.

        Parameters get rank 0's values. Collective.

        Args:
            optimizers: The model's optimizers.
            named: Module whose state_dict names the tensors: the model, or the PeftModel around it.

        Raises:
            UsageError: Ranks would draw different values for lazy parameters (every rank raises
                it), or a parameter is quantised.
            NotImplementedError: PEFT's file of an adapter has a tensor that is not the model's.
        """
        model = self._model()
        assert model is not None
        places = places_of(model, self._plan, self._cuts, self._transfer)
        owners: dict[nn.Parameter, set[int]] = {}
        for place in places:
            for param, stages in place.params():
                owners.setdefault(param, set()).update(self._rank_of[stage] for stage in stages)
        what = "the random states that lazy parameters are drawn from (torch.manual_seed)"
        self.ranks.check_equal({what: random_states(model)})
        for tensor in (*model.parameters(), *model.buffers()):
            if not is_lazy(tensor):
                self.ranks.broadcast(tensor)
        mine = [stage for stage in range(self.num_stages) if self._rank_of[stage] == self._rank]
        self.full_model = _describe(named, optimizers)
        self._modules = StageModules(places, mine, self._cuts, self._transfer)
        own = set(model.parameters())
        self._shared = self._find_shared(owners)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                kept = [param in own for param in group["params"]]
                for listed in ("params", "param_names"):
                    if listed in group:
                        group[listed][:] = itertools.compress(group[listed], kept)

    def start(self, dtype: torch.dtype, device: torch.device) -> None:
        """Installs the hooks that check calls of the model and of state_dict, after boost.

        Args:
            dtype: Type that the model computes in.
            device: Device that the model computes on.
        """
        model = self._model()
        assert model is not None
        self.device, self.generators = device, Generators(device)
        self._transfer.dtype = dtype
        self._transfer.routers.start(model, self._plan, self.modules.own_blocks)
        for called in (model, self.encoder):
            if called is not None:
                called.register_forward_pre_hook(ModuleHook(self._check_call), prepend=True)
        for module in model.modules():
            module.register_state_dict_pre_hook(ModuleHook(self._check_reader))

    def ask_for_router_logits(self, model: nn.Module, kwargs: Mapping[str, Any]) -> None:
        """Has router logits sent along with hidden states if the outputs of a call have them.

        Args:
            model: The model of these stages.
            kwargs: Arguments of its forward, by name.

        Raises:
            NotImplementedError: Router logits are asked for, in a form that castor does not know.
        """
        self._transfer.routers.ask(bool(asked_of(model, kwargs, "output_router_logits")))

    def begin(self) -> None:
        """Prepares the gradients of shared parameters for the backward passes that follow."""
        self._shared.begin()

    def settle_gradients(self, session: _C.Session, params: Sequence[nn.Parameter]) -> None:
        """Sums the gradients of parameters that several stages share, before a step. Collective.

        Args:
            session: Session of this process's stages.
            params: Parameters of the session, in its order.
        """
        self._shared.settle()
        if self.tensor:
            self.tensor.settle_gradients(session, params)

    def check_connected(self) -> None:
        """Checks that the ranks are still connected, before a call that needs the others.

        Raises:
            UsageError: A step has failed, and the ranks have disconnected from each other.
        """
        if self.broken:
            raise UsageError(
                "the stages of this model have let go of each other when a step failed "
                f"({self.broken}): start all again, from the last checkpoint"
            )

    @contextmanager
    def awaiting(self) -> Iterator[None]:
        """Marks this rank as waiting for other stages, except within computing()."""
        with self._idle:
            yield

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Marks this rank as computing, inside awaiting()."""
        self._idle.__exit__()
        try:
            yield
        finally:
            self._idle.__enter__()

    def disconnect(self) -> None:
        """Disconnects this rank, which cannot go on.

        Ranks that wait for it, in a schedule or a layer, raise.
        """
        for other in range(self.ranks.size):
            if other != self._rank:
                # A wait of gloo that runs out of time closes the connections of its group.
                with suppress(RuntimeError):
                    awaited = distributed.irecv(
                        torch.empty(1), group=self.group, group_src=other, tag=_NOBODY_SENDS
                    )
                    assert awaited is not None
                    awaited.wait(timedelta(milliseconds=1))
        if link := self.ranks.device_link:
            link.fail()
        for divided in (self.tensor, self.sequences):
            if divided:
                divided.ranks.leave()

    def norm(self, params: Sequence[torch.Tensor], squares: Sequence[float]) -> float:
        """Returns the L2 norm of all stages' gradients; see TensorParallel. Collective."""
        elsewhere = self._shared.counted_elsewhere
        own = {
            param: square
            for param, square in zip(params, squares, strict=True)
            if param not in elsewhere
        }
        mine = [*own], [*own.values()]
        squared = self.tensor.squared_norm(*mine) if self.tensor else sum(mine[1])
        return math.sqrt(sum(self.ranks.all_gather_object(squared)))

    def full_shape(self, param: torch.Tensor) -> tuple[int, ...] | None:
        """See TensorParallel."""
        return self.tensor.full_shape(param) if self.tensor else None

    def local_shard(self, param: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
        """See TensorParallel."""
        assert self.tensor is not None
        return self.tensor.local_shard(param, full)

    def runs(self, param: torch.Tensor) -> Runs | Segments | None:
        """See TensorParallel."""
        return self.tensor.runs(param) if self.tensor else None

    @property
    def peers(self) -> Sequence[RankGroup]:
        """See TensorParallel."""
        return (*(self.tensor.peers if self.tensor else ()), self.ranks)

    @property
    def stage(self) -> int:
        """Number of this rank in the pipeline."""
        return self._rank

    @property
    def has_first_shard(self) -> bool:
        """Whether this rank is the first of those with its stages; see TensorParallel."""
        return self.tensor is None or self.tensor.has_first_shard

    def barrier(self) -> None:
        """Returns when the ranks of all stages are here; see TensorParallel. Collective.

        Raises:
            UsageError: A step has failed, and the ranks have disconnected from each other; or a
                rank is within a pass.
            Error: A rank is gone.
        """
        self.check_connected()
        if self.tensor:
            self.tensor.barrier()
        self.ranks.all_gather_object(None)

    def _find_shared(self, owners: Mapping[nn.Parameter, set[int]]) -> SharedParameters:
        """Makes the groups of ranks that share parameters. Collective.

        Args:
            owners: Ranks that have each parameter.
        """
        groups: dict[tuple[int, ...], ModelParallelGroup | None] = {}
        copies = []
        for param, ranks in owners.items():
            if len(ranks) == 1:
                continue
            members = tuple(sorted(ranks))
            if members not in groups:
                groups[members] = self._subset_of_pp(members)
            if group := groups[members]:
                copies.append(SharedCopy(param=param, ranks=group))
        return SharedParameters(copies)

    @property
    def _rank(self) -> int:
        return self.ranks.rank

    def _check_call(self, model: nn.Module, _: Any) -> None:
        if torch.is_grad_enabled() and not self.running:
            raise UsageError(
                f"rank {self._rank} of {self.ranks.size} has some stages of this "
                f"{type(model).__name__}, which cannot be called with gradients: use "
                "booster.execute_pipeline(data_iter, model, criterion, optimizer); under "
                "torch.no_grad() all ranks may call it, and have its outputs"
            )

    def _check_reader(self, module: nn.Module, _prefix: str, keep_vars: bool) -> None:
        if not keep_vars:
            raise UsageError(
                f"rank {self._rank} of {self.ranks.size} has some stages of the model that this "
                f"{type(module).__name__} belongs to, and its state_dict would lack the others: "
                "booster.save_model, or booster.save, on all ranks writes the full model"
            )


def _rank_of(stage: int, size: int, *, folded: bool) -> int:
    row, place = divmod(stage, size)
    return size - 1 - place if folded and row % 2 else place


def _describe(model: nn.Module, optimizers: Sequence[Optimizer]) -> FullModel:
    tensors: dict[str, tuple[int, tuple[int, ...]]] = {}
    numbers: dict[int, int] = {}
    for key, tensor in model.state_dict(keep_vars=True).items():
        tensors[key] = numbers.setdefault(id(tensor), len(numbers)), tuple(tensor.shape)
    names = {param: name for name, param in model.named_parameters()}
    for param, name in names.items():
        if is_packed(param):
            raise UsageError(
                f"parameter '{name}' is quantised, and what unpacks it is no tensor of the model "
                "that stages could tell each other: train quantised models without pp_size"
            )
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return FullModel(
        tensors=tensors,
        groups=[[names[param] for param in group["params"]] for group in groups],
        files=file_layout(model),
        adapters=_adapters_of(model) if is_peft_model(model) else None,
    )


def _adapters_of(model: nn.Module) -> dict[str, dict[str, str]]:
    """Returns the tensors that PEFT writes of a full model; see FullModel.adapters."""
    state = model.state_dict(keep_vars=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about the file, which nothing writes here
        found = adapter_tensors(model, state)
    key_of = {id(tensor): key for key, tensor in reversed(state.items())}
    for adapter, tensors in found.items():
        for key, tensor in tensors.items():
            if id(tensor) not in key_of:
                kind = str(model.peft_config[adapter].peft_type).rpartition(".")[2]  # type: ignore[index, union-attr]
                raise NotImplementedError(
                    f"PEFT computes '{key}' of adapter '{adapter}' ({kind}) of several tensors "
                    "when it writes it, and no rank with some stages has all of these: give "
                    "pp_size=1, or another kind of adapter"
                )
    return {
        adapter: {key: key_of[id(tensor)] for key, tensor in tensors.items()}
        for adapter, tensors in found.items()
    }
