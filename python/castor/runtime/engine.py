"""Puts a model into chunks and follows its modules."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from castor import _C
from castor.config.names import SCALAR_TYPES, GatherExperts, Precision, Reduction
from castor.errors import IoError, UsageError
from castor.lazy import Materialisation, check_inactive, in_own_pages
from castor.runtime.blocks import BlockPolicy, check_no_cuda_graphs, find_blocks
from castor.runtime.boosted_model import (
    all_boosted,
    boosted_model_of,
    boosted_models_holding,
    check_not_boosted,
    remember,
)
from castor.runtime.collective_calls import CollectiveCalls
from castor.runtime.device import make_backend
from castor.runtime.device_groups import DeviceReduction
from castor.runtime.experts import Experts, choose_experts
from castor.runtime.guard import guard
from castor.runtime.history import StepHistory
from castor.runtime.hooks import ModuleHook, Replaced, follow, warn_of_late_compiles
from castor.runtime.input_cast import InputCast, convert_buffers, input_param, input_type
from castor.runtime.memory_sharing import Aliases, check_unshared, refuse_sharing
from castor.runtime.model_shards import ModelShards
from castor.runtime.packed import check_packed_layers, is_packed, settle_layers
from castor.runtime.rank_buffers import RankBuffers
from castor.runtime.rank_group import DataParallelGroup
from castor.runtime.ranks import memory_mark
from castor.runtime.report import LogitFigures, MemoryReport
from castor.runtime.rules import FusedRule
from castor.runtime.spec import ModelSpec, check_distinct_memory
from castor.runtime.stored_weight import StoredWeights
from castor.runtime.tensor_types import TensorTypes, scalar_type, tensor_types
from castor.runtime.trace_file import read_trace, write_trace

WORKING_DTYPES: dict[Precision, torch.dtype] = {
    precision: getattr(torch, name) for precision, name in SCALAR_TYPES.items()
}


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Settings of an engine, which a plugin makes from its arguments."""

    session: _C.SessionOptions
    precision: Precision
    """Precision of `session`, by the name that users give."""
    rule: FusedRule | None = None
    """Update rule of `session`; None: an optimizer runs its own step, or there is none."""
    device: torch.device
    """Device that the model computes on."""
    link_bytes_per_second: int = 0
    """CPU device: bandwidth of an emulated link, each way; 0: memory's own bandwidth."""
    gather_embeddings: bool = False
    """Whether embeddings stay in host memory, where forward reads the rows that it looks up."""
    gather_experts: GatherExperts = False
    """Whether passes fetch single experts."""
    trace_file: Path | None = None
    """A trace of this model from an earlier run."""
    nvme_directory: Path | None = None
    """First directory of the NVMe tier; None: there is no such tier."""
    ranks: DataParallelGroup | None = None
    """The ranks that share the model; None: this process is alone."""
    data_shards: int = 1
    """Number of ranks with samples of their own: replicas of the model, over all its ranks."""
    reads: str = ""
    """Name of the process group in which ranks read each other's shards of weights and gradients,
    where they share no memory; "": nothing is read so."""
    zero_stage: int = 0
    """ZeRO stage that ranks run at least (Rajbhandari et al. 2020, section 5); 0: any."""
    reduction: Reduction | Literal[""] = ""
    """Addition of what several ranks give; "": this process is alone."""
    sums: DeviceReduction | None = None
    """Collectives of `ranks` between devices; None: the host reduces gradients, or this process is
    alone."""
    reduces_on_host: str = ""
    """Why the host reduces gradients, where that is a choice."""
    device_link: str = ""
    """Backend that sends activations from device to device; "": they go through the host."""
    communicator_bytes: int = 0
    """Device memory that its communicators take."""
    communicators: _C.Reservation | None = None
    """Reservation of that memory in the device budget."""
    extra_dp_size: int = 1
    """Number of copies of the weights that ranks keep in shards."""
    locked_limit_bytes: int = 0
    """Host memory that the system page-locks for the device, where that is less than the budget;
    0: no limit was met."""


class Engine(CollectiveCalls):
    """One boosted model: its C++ session, and its state in Python.

    The engine holds the parameters, not the model. The hooks on the model's modules and its
    optimizer hold the engine and the session, which end when the last of these is gone.
    """

    at_end: Callable[[Engine], None] | None = None
    """Called with the engine when it is deleted, for its last figures; None: nothing is called."""

    def __init__(
        self,
        model: nn.Module,
        settings: EngineSettings,
        *,
        updated: Mapping[torch.Tensor, bool] | None = None,
        types: TensorTypes | None = None,
    ) -> None:
        """Takes the model's parameters over and installs the hooks.

        Args:
            model: The model.
            settings: Settings of the engine.
            updated: Parameters that optimizers hold, each with whether the session's rule updates
                it; None: all parameters, by the rule.
            types: Types of the model's tensors; None: tensor_types chooses them.

        Raises:
            UsageError: The model is boosted already, or cannot be.
            OutOfMemoryError: A budget is too small; the model is unchanged.
            IoError: A path cannot be used, and the model is unchanged. Or NVMe failed later, and
                the message says that the model must be built anew.
        """
        check_not_boosted(model)
        check_inactive()
        self.settings = settings
        self.types = types or tensor_types(model, WORKING_DTYPES[settings.precision])
        """The types of the model's parameters and buffers."""
        self.device = settings.device
        self.ranks = settings.ranks
        self.rule = settings.rule
        self.skipped_steps = 0
        self.step_skipped = False
        self.gradient_norm: float | None = None
        self.being_loaded = False
        """Whether state_dict is asked for names and memory only, whatever the values are."""
        self.resumed_steps = 0
        """Number of steps before this process, from the checkpoint it resumed from."""
        self._updated = updated
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """The boosted optimizers that step the parameters."""
        self.updates = 0
        """Number of optimizer steps that this process has taken."""
        self.states_given: list[Any] = []
        """Entries of optimizer states that user code may still hold; see StoredState."""
        self.replaced = Replaced()
        lazy = Materialisation(model)
        with _telling_what_is_lost(model):
            try:
                spec, aliases = self._take_over(model, lazy)
            except BaseException:
                lazy.cancel()
                raise
            lazy.run(self._place, self._finish)
            aliases.follow()
            self.session.share_weights()
            self.session.zero_states()  # last: memory holds no states while values are made
        self.model_name = type(model).__name__
        self.modules = [module.name for module in spec.modules]
        self.positions = weakref.WeakKeyDictionary(
            {module.module: i for i, module in enumerate(spec.modules)}
        )
        """Positions, in `modules`, of the modules that the session follows."""
        self.history = StepHistory()
        self.logits = LogitFigures()
        self.blocks = BlockPolicy()
        self.model_shards: ModelShards | None = None
        """Shards or stages of the model on this process; None: it has the full model."""
        self._install_hooks(model, spec)
        convert_buffers(model, self.types, self.device, aliases.tensors)
        self.buffers = RankBuffers(model, self.ranks)
        settle_layers(model, self.device, self.ranks, self.replaced)
        guard(model)
        self._owned = [
            (weakref.ref(part.module), name, param)
            for part in spec.modules
            for name, param in part.module._parameters.items()
            if param is not None
        ]
        remember(model, self)
        refuse_sharing(_content_of)

    def __del__(self) -> None:
        if self.at_end is not None:
            self.at_end(self)

    def _take_over(self, model: nn.Module, lazy: Materialisation) -> tuple[ModelSpec, Aliases]:
        """Lays the parameters out in chunks, and moves the values there that exist already."""
        settings = self.settings
        spec = ModelSpec.of(model, gather_embeddings=settings.gather_embeddings)
        check_packed_layers(model, self.types.of_param)
        check_distinct_memory(spec)
        check_unshared(spec)
        aliases = Aliases(model, spec)
        for part in spec.modules:
            if part.compiled and self.device.type != "cpu":
                check_no_cuda_graphs(part.name, part.module)
        events = read_trace(settings.trace_file, spec) if settings.trace_file else None
        self.names = spec.names
        self.params = spec.params
        self.types_before = [param.dtype for param in spec.params]
        """Types of the parameters before boost."""
        self.index_of = {param: i for i, param in enumerate(spec.params)}
        held = dict.fromkeys(spec.params, True) if self._updated is None else self._updated
        self.trained = [param.requires_grad and param in held for param in spec.params]
        """Per parameter, whether its gradient is in chunks; p.grad of others is torch's own."""
        self.ruled = [held.get(param, False) for param in spec.params]
        """Per parameter, whether the session's rule updates it, with states in chunks."""
        self.frozen = [self._updated is None or not trained for trained in self.trained]
        """Per parameter, whether no optimizer steps it."""
        experts = choose_experts(model, spec, self.frozen, settings.gather_experts)
        self.experts = Experts(experts, settings.gather_experts)
        by_row = {i for position in experts for i in spec.modules[position].params}
        self.by_row = [i in by_row for i in range(len(spec.params))]
        """Per parameter, whether passes may read single rows of it, those of experts."""
        if self.ranks:
            without_values = set(lazy.params)
            for param in spec.params:
                if param not in without_values:
                    self.ranks.broadcast(param)
        self.session = _C.Session(
            params=spec.params,
            param_names=spec.names,
            trained=self.trained,
            ruled=self.ruled,
            by_row=self.by_row,
            types=[
                None if is_packed(param) else scalar_type(self.types.of_param(name))
                for name, param in zip(spec.names, spec.params, strict=True)
            ],
            modules=[(m.name, m.params, m.parent) for m in spec.modules],
            options=settings.session,
            backend=make_backend(settings.device, settings.link_bytes_per_second),
            groups=self.ranks.names if self.ranks else None,
            memory_mark=memory_mark() if self.ranks else None,
            reads=settings.reads,
            sums=settings.sums.sums if settings.sums else None,
            communicator_bytes=settings.sums.communicator_bytes if settings.sums else 0,
            most_reduction_bytes=settings.sums.most_bytes if settings.sums else None,
            reduces_on_host=settings.reduces_on_host,
            zero_stage=settings.zero_stage,
            extra_dp_size=settings.extra_dp_size,
            valueless=[self.index_of[param] for param in lazy.params],
            name=type(model).__name__,
        )
        _sessions.add(self.session)
        if events is not None:
            self.session.load_trace(events)
        return spec, aliases

    def _place(self, param: nn.Parameter, dtype: torch.dtype) -> torch.Tensor | None:
        """Returns memory in which a lazy parameter's initialisers of type `dtype` may run.

        That is memory of its chunk where possible; None: the chunk has no memory of the host's.
        """
        index = self.index_of[param]
        # Each rank's initialisers run, before all take rank 0's values.
        if not self.session.weight_is_own(index):
            return in_own_pages(param.shape, dtype)
        host, master = self.on_host(param).data, self.session.master_view(self.index_of[param])
        if host.device.type != "cpu":  # its storage is a GPU's memory
            return None
        if dtype == host.dtype:
            return host
        if master is not None and dtype == master.dtype:
            return master
        if dtype.itemsize < host.element_size():
            return host.view(-1).view(dtype)[: host.numel()]
        return in_own_pages(param.shape, dtype)

    def on_host(self, param: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of a parameter's values to read and write until the next forward.

        Args:
            param: A parameter of the model, in host memory; any other tensor is returned as it is.

        Returns:
            A CPU tensor over its host storage; the parameter itself where that is a GPU's memory or
            NVMe.
        """
        index = self.index_of.get(param)  # type: ignore[call-overload]
        host = None if index is None else self.session.host_storage(index)
        return param if host is None else host

    def trained_index(self, param: torch.Tensor) -> int | None:
        """Returns the number of a parameter whose gradient is in chunks; None: it is no such one.

        It trained when the model was boosted, whatever its requires_grad is now.
        """
        index: int | None = self.index_of.get(param)  # type: ignore[call-overload]
        return index if index is not None and self.trained[index] else None

    def _finish(self, param: nn.Parameter, values: torch.Tensor) -> None:
        """Makes host storage and master of a lazy parameter from its values."""
        if self.ranks:
            name = self.names[self.index_of[param]]
            self.ranks.check_equal({"the lazy parameter that gets its values next": name})
            self.ranks.broadcast(values)
        if values.element_size() < param.element_size():  # they may be in memory of _place:
            values = values.clone()  # wider elements would overwrite values not read yet
        self.session.adopt(self.index_of[param], values)
        if self.ranks:
            # The initialiser of the next parameter may read this one.
            self.ranks.barrier("takes the values of a lazy parameter")

    def input_cast(self, dtype: torch.dtype, param: int | None) -> InputCast:
        """Makes the cast of the inputs of a module of that type.

        Args:
            dtype: The type.
            param: A parameter of the module, whose type before boost its inputs may have in fp32.
        """
        if self.settings.precision != "fp32" or param is None or is_packed(self.params[param]):
            return InputCast(dtype, self.device)
        return InputCast(dtype, self.device, self.types_before[param])

    def _install_hooks(self, model: nn.Module, spec: ModelSpec) -> None:
        first = input_param(spec)
        cast = self.input_cast(input_type(spec, self.types), first)
        if cast.needed:
            model.register_forward_pre_hook(cast, with_kwargs=True)
        follow(spec, self.session, self.experts.start(spec, self.session, self.frozen))
        stored = self.settings.nvme_directory and StoredWeights(self.settings.nvme_directory)
        owning = [m for m in model.modules() if m is model or [*m.parameters(recurse=False)]]
        for module in owning:
            # keep_vars=True hands out the parameters themselves, whose storages are read without an
            # operator.
            module.register_state_dict_pre_hook(ModuleHook(_settle, self))
            if stored:
                module.register_state_dict_post_hook(ModuleHook(stored.lend, self))
            if self.session.optim_state_format != "fp32":
                before_load = ModuleHook(_before_load, self, weakref.ref(module))
                module.register_load_state_dict_pre_hook(before_load)
        self.history.watch(model)
        warn_of_late_compiles(model, find_blocks(model))

    def check_modules(self) -> None:
        """Checks that modules still have the parameters that are stepped and saved.

        Raises:
            UsageError: A parameter was deleted from a module since boost, or replaced.
        """
        for owner, name, param in self._owned:
            module = owner()
            now = None if module is None else module._parameters.get(name, module)
            if now is not None and now is not param:  # None: the model computes without it
                raise UsageError(
                    f"parameter '{self.names[self.index_of[param]]}' of the model was replaced "
                    f"after booster.boost ({type(module).__name__}._parameters['{name}'] is "
                    "another tensor now), and neither castor nor the optimizer has the new one: "
                    "write values into the old one in place (param.copy_(values), or param.data = "
                    "values), or call booster.release(model), replace it, and boost anew"
                )

    @contextmanager
    def unsynchronised(self) -> Iterator[None]:
        """Makes a context in which backward passes leave each rank its own gradients."""
        before = self.session.synchronise(False)
        try:
            yield
        finally:
            self.session.synchronise(before)

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the run, skipped ones and those before a resume included."""
        return self.resumed_steps + int(self.session.report()["steps"])

    @num_steps.setter
    def num_steps(self, steps: int) -> None:
        self.resumed_steps = steps - int(self.session.report()["steps"])

    def report(self) -> MemoryReport:
        """Returns the figures so far."""
        figures: dict[str, Any] = dict(self.session.report())
        figures |= asdict(self.logits) | asdict(self.blocks.figures())
        experts = self.experts.figures()
        figures |= asdict(experts)
        figures["h2d_bytes"] += experts.expert_fetched_bytes + experts.expert_guessed_bytes
        if own := self.ep_group:
            rank, ranks = figures["rank"] * own.size + own.rank, figures["ranks"] * own.size
            figures |= {"rank": rank, "ranks": ranks}
        seconds = self.history.totals.seconds
        reducing = figures.pop("reduction_communicator_bytes")
        link = self.settings.device_link
        if self.settings.sums and figures["reduced_on"] == "device":
            link = self.settings.sums.backend
        return MemoryReport(
            **figures,
            rank_exposed_share=figures["rank_exposed_seconds"] / seconds if seconds else 0.0,
            reduction=self.settings.reduction,
            device_link=link,
            communicator_bytes=self.settings.communicator_bytes + reducing,
            locked_limit_bytes=self.settings.locked_limit_bytes,
            skipped_steps=self.skipped_steps,
            step_skipped=self.step_skipped,
            gradient_norm=self.gradient_norm,
        )

    def save_trace(self, path: Path) -> None:
        """Writes the trace that the current plan was made from.

        Raises:
            UsageError: No step has been finished yet.
        """
        events = self.session.trace()
        if events is None:
            raise UsageError("there is no trace yet; finish one optimizer step first")
        write_trace(path, events, self.modules)


def _memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns a tensor's storage and byte offset, which identify its memory without an address."""
    offset = tensor.storage_offset() * tensor.element_size()
    return int(tensor.untyped_storage()._cdata), int(offset)


@contextmanager
def _telling_what_is_lost(model: nn.Module) -> Iterator[None]:
    """Makes an IoError say that the model is lost, if boost has moved parameters by then.

    The parameters' old memory is freed one by one, so that boost cannot restore the model.
    """
    dense = [param for param in model.parameters() if param.layout == torch.strided]
    before = [_memory_of(param) for param in dense]
    try:
        yield
    except IoError as error:
        if [_memory_of(param) for param in dense] == before:
            raise
        raise type(error)(
            error.errno,
            f"{error.strerror}. booster.boost had begun to move the parameters of this "
            f"{type(model).__name__}, and they may be rounded: build the model anew, and boost it "
            "with a path that works",
            error.filename,
        ) from error


_sessions: weakref.WeakSet[_C.Session] = weakref.WeakSet()
"""All live sessions; one may outlive its model until the garbage collector runs."""


def _leave_sessions_to_the_parent() -> None:
    """Keeps a forked child, such as a data loader's worker, from using or destroying sessions.

    The memory and threads of a session belong to the parent alone.
    """
    for session in _sessions:
        session.stay_with_parent()


os.register_at_fork(after_in_child=_leave_sessions_to_the_parent)


def engine_of(model: nn.Module) -> Engine:
    """Returns the engine of a boosted model.

    Raises:
        UsageError: The model is not boosted, or torch's own classes train it.
    """
    boosted = boosted_model_of(model)
    if not isinstance(boosted, Engine):
        raise UsageError(
            f"this {type(model).__name__} is trained by torch's own classes, and what was asked "
            "for is of castor's chunks: boost it with GeminiPlugin or LowLevelZeroPlugin"
        )
    return boosted


@contextmanager
def being_loaded(engines: list[Engine]) -> Iterator[None]:
    """Lets state_dict give names and memory even where a step failed half-way."""
    for engine in engines:
        engine.being_loaded = True
    try:
        yield
    finally:
        for engine in engines:
            engine.being_loaded = False


def engines_holding(model: nn.Module) -> list[Engine]:
    """Returns the engines with parameters of `model`: its own, or that of a model around it."""
    return [one for one in boosted_models_holding(model) if isinstance(one, Engine)]


@contextmanager
def turns(engines: Iterable[Engine], what: str) -> Iterator[None]:
    """Makes a context in which no other thread runs a pass on these models; waits for such passes.

    Args:
        engines: Engines of the models.
        what: Name of this thread's work for messages in other threads, such as "a save".

    Raises:
        UsageError: A pass of another thread did not end; see docs/guides/own-loops.md.
    """
    with ExitStack() as over:
        for engine in sorted(engines, key=id):  # one order for all threads, against deadlocks
            over.enter_context(engine.session.turn(what))
        yield


def _content_of(storage: int) -> str:
    """Names the parameter, gradient or state of a boosted model in a storage; "": none."""
    sessions = (engine.session for engine in all_boosted() if isinstance(engine, Engine))
    return next(filter(None, (session.content_of(storage) for session in sessions)), "")


def _settle(engine: Engine, *_: Any) -> None:
    """Waits for updates and for other threads' passes and steps; a state_dict pre-hook."""
    if not engine.being_loaded:
        engine.session.settle()


def _before_load(
    engine: Engine,
    owner: weakref.ref[nn.Module],
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    *_: Any,
) -> None:
    """Tells the session of weights that load_state_dict is about to change; a pre-hook of it.

    The weights then become their own masters: a master whose upper half is the weight cannot tell
    afterwards that the weight was replaced.
    """
    if module is not owner():  # copy.copy of a module takes its hooks along
        return
    for name, param in module._parameters.items():
        values = state.get(prefix + name)
        if (
            param in engine.index_of
            and isinstance(values, torch.Tensor)
            and values.shape == param.shape  # load_state_dict refuses other shapes
        ):
            engine.session.before_overwrite(engine.index_of[param], values.detach())
