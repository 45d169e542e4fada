"""torch.nn.parallel.DistributedDataParallel around a model that castor boosts: for `castor run`."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed, nn
from torch.nn import parallel

from castor.errors import UsageError
from castor.integrations.uneven_data import UnevenData, multiply_gradients
from castor.runtime.boosted_model import boosted_models_holding, compiled_from
from castor.runtime.engine import Engine, engine_of
from castor.runtime.process_groups import end_groups, groups_made
from castor.runtime.rank_buffers import broadcast_flat, names_of_own
from castor.runtime.rank_group import RankGroup
from castor.runtime.ranks import describe_parameters

_ARGUMENTS = inspect.signature(parallel.DistributedDataParallel.__init__)
_HONOURED = (
    "module",
    "device_ids",
    "output_device",
    "broadcast_buffers",
    "forward_sync_buffers",
    "init_sync",
)
_NOT_NEEDED = (
    "bucket_cap_mb",
    "bucket_cap_mb_list",
    "check_reduction",
    "dim",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "skip_all_reduce_unused_params",
    "static_graph",
)
"""Arguments that change neither a loss nor a weight: what they say of gradients castor sees."""
_INSTEAD = {
    "mixed_precision": "castor's precision is `castor run --set precision=bf16`",
    "device_mesh": "a script that boosts its model shards it with HybridParallelPlugin",
}
_WITHOUT = (
    "register_comm_hook",
    "_register_builtin_comm_hook",
    "_register_buffer_comm_hook",
    "_register_fused_optim",
    "join_hook",
    "scatter",
    "gather",
    "to_kwargs",
    "_update_process_group",
    "_get_ddp_logging_data",
    "_set_ddp_runtime_logging_sample_rate",
)
"""Methods of torch's class that reach into what castor does in another way."""

_wrappers: weakref.WeakKeyDictionary[nn.Module, weakref.ref[DistributedDataParallel]] = (
    weakref.WeakKeyDictionary()
)


class DistributedDataParallel(parallel.DistributedDataParallel):
    """A module around the one that is boosted: castor's ranks have the means of its gradients.

    Made as torch's, whose arguments it takes: all ranks begin with rank 0's parameters and buffers;
    `module`, names with "module." before them, `no_sync` and `require_backward_grad_sync` are as
    there. Before a forward it gives all ranks rank 0's buffers when torch's would
    (`broadcast_buffers`, `forward_sync_buffers`). There are no buckets and no reducer.

    Raises:
        ValueError: There is no process group, or several devices.
        RuntimeError: No parameter requires a gradient.
        UsageError: Ranks were given different models.
        NotImplementedError: An argument asks for what castor does not do; the message names it.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        bound = _ARGUMENTS.bind(self, *arguments, **keywords)
        bound.apply_defaults()
        asked = bound.arguments
        module: nn.Module = asked["module"]
        _check(asked, module)
        nn.Module.__init__(self)
        self.module = module
        self.device_ids = [*asked["device_ids"]] if asked["device_ids"] else None
        self.output_device = asked["output_device"]
        self.dim = asked["dim"]
        self._begins_with_buffers, self.broadcast_buffers = _shares_buffers(asked)
        self.forward_sync_buffers = self.broadcast_buffers
        self.find_unused_parameters = asked["find_unused_parameters"]
        self.gradient_as_bucket_view = asked["gradient_as_bucket_view"]
        self.static_graph = asked["static_graph"]
        self.parameters_to_ignore = names_of_own(module)
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self._synchronised = True
        """Whether the last pass was, so that its gradients are all ranks'."""
        self.uneven: UnevenData | None = None
        """The context of a loop within `join`."""
        _wrappers[compiled_from(module)] = weakref.ref(self)
        if asked["init_sync"] and not boosted_models_holding(module):
            self._begin_as_first()

    @property
    def process_group(self) -> Any:  # type: ignore[override]
        """All ranks."""
        return distributed.group.WORLD

    @property
    def device(self) -> torch.device:
        """Device of the first parameter."""
        first: nn.Parameter = next(self.module.parameters())
        return first.device

    @property
    def device_type(self) -> str:
        """Device type of the first parameter."""
        return self.device.type

    @torch._disable_dynamo(recursive=False)  # type: ignore[attr-defined]
    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """The module's; a backward pass of it ends with the means of all ranks' gradients.

        Raises:
            UsageError: There are several ranks, and no optimizer has been made for the module.
        """
        factor = self._before_forward()
        output = self.module(*inputs, **keywords)
        self._after_forward()
        return multiply_gradients(output, factor)

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _before_forward(self) -> float:
        """Returns what the gradients of the pass are to be multiplied with."""
        trains, shares = self._trains_with_others(), self.will_sync_module_buffers()
        factor, source = 1.0, 0
        if trains:
            _engine(self.module).buffers.leave()  # or it raises
        # Rank 0 may be reading optimizer states to save them, and waits for the others.
        answers = bool(
            (trains and self._synchronised) or (shares and boosted_models_holding(self.module))
        )
        if trains and self.uneven:
            source, factor = self.uneven.forward_begins(
                synchronised=self.require_backward_grad_sync, shares=shares, answers=answers
            )
        if answers:
            _engine(self.module).answer_first()
        if shares:
            self.share_buffers(source)
        return factor

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _after_forward(self) -> None:
        """Decides at the end of a forward what its backward does, as torch's class does."""
        self.synchronise_as_asked()
        self.require_forward_param_sync = (
            torch.is_grad_enabled() and self.require_backward_grad_sync
        )

    def synchronise_as_asked(self) -> None:
        """Whether the backward that follows is synchronised is said now."""
        if self._trains_with_others():
            engine = _engine(self.module)
            engine.session.synchronise(self.require_backward_grad_sync)
            engine.check_step = functools.partial(
                _check_step, weakref.ref(self), weakref.ref(engine)
            )
            self._synchronised = self.require_backward_grad_sync

    def _trains_with_others(self) -> bool:
        return torch.is_grad_enabled() and distributed.get_world_size() > 1

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward gives all ranks rank 0's buffers."""
        return self.require_forward_param_sync and self.shares_buffers()

    def shares_buffers(self) -> bool:
        """Whether there are buffers that ranks share."""
        return bool(
            self.broadcast_buffers and distributed.get_world_size() > 1 and self._shared_buffers()
        )

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> UnevenData:
        """Surrounds a loop in which ranks have different numbers of batches, as in torch."""
        return UnevenData(
            self,
            enable=enable,
            throw=throw_on_early_termination,
            divide_by_initial=divide_by_initial_world_size,
        )

    @contextmanager
    def synchronising(self) -> Iterator[None]:
        """A backward in it is synchronised, also one whose forward was under no_sync."""
        session = _engine(self.module).session
        before = session.synchronise(True)
        self._synchronised = True
        try:
            yield
        finally:
            session.synchronise(before)

    @contextmanager
    def keeping_its_buffers(self) -> Iterator[None]:
        """Leaves to each rank the buffers that castor shares and torch's class does not."""
        shared = set(self._shared_buffers()) if self.broadcast_buffers else ()
        own = {
            name: buffer.detach().clone()
            for name, buffer in self.module.named_buffers()
            if name not in shared
        }
        yield
        for name, buffer in self.module.named_buffers():
            if name in own:
                buffer.data.copy_(own[name])

    def _set_static_graph(self) -> None:
        self.static_graph = True

    def _shared_buffers(self) -> dict[str, torch.Tensor]:
        return {
            name: buffer
            for name, buffer in self.module.named_buffers()
            if name not in self.parameters_to_ignore
        }

    def _begin_as_first(self) -> None:
        if distributed.get_world_size() == 1:
            return
        with groups_made() as groups:
            # Of CPU tensors, whatever the script's group is for.
            peers = RankGroup.of_all_ranks(sends_tensors=False)
            peers.check_equal(describe_parameters(self.module))
            buffers = self._shared_buffers().values() if self._begins_with_buffers else ()
            peers.broadcast_all((*self.module.parameters(), *buffers))
        end_groups(groups)

    def share_buffers(self, source: int) -> None:
        """One rank's buffers become every rank's. Collective."""
        buffers = [*self._shared_buffers().values()]
        if buffers:
            send = functools.partial(distributed.broadcast, src=source)
            broadcast_flat(buffers, send, buffers[0].device)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)


def _refuses(name: str) -> Any:
    def refused(self: Any, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(
            f"the script calls DistributedDataParallel.{name}, and castor reduces the gradients "
            "itself: leave it out"
        )

    return refused


for _name in _WITHOUT:
    setattr(DistributedDataParallel, _name, _refuses(_name))


def wrapper_of(module: nn.Module) -> DistributedDataParallel | None:
    """The one that a module is, or is in; compiled or not."""
    inner = compiled_from(module)
    if isinstance(inner, DistributedDataParallel):
        return inner
    known = _wrappers.get(inner)
    return None if known is None else known()


def _check_step(ref: weakref.ref[DistributedDataParallel], held: weakref.ref[Engine]) -> None:
    """Raises NotImplementedError where torch's class would leave each rank to itself."""
    wrapper, engine = ref(), held()
    if wrapper and not (wrapper.require_backward_grad_sync or wrapper._synchronised):
        raise NotImplementedError(
            "an optimizer steps under DistributedDataParallel.no_sync, where each rank would step "
            "by its own gradients (local SGD, as accelerate's LocalSGD and torch's "
            "PostLocalSGDOptimizer have it), and castor's ranks train one model, whose optimizer "
            "states they share: step outside of it, and leave LocalSGD out, or give it "
            "enabled=False"
        )
    if wrapper and engine and wrapper.uneven:
        wrapper.uneven.step_begins(engine)


def check_device(wrapper: DistributedDataParallel, device: torch.device) -> None:
    """Castor computes where the wrapper was told to.

    Args:
        wrapper: Of a model that is about to be boosted.
        device: The plugin's.

    Raises:
        UsageError: It does not.
    """
    given = [*(wrapper.device_ids or ()), wrapper.output_device]
    for one in given:
        index = one if one is None or isinstance(one, int) else torch.device(one).index
        if index is not None and (device.type == "cpu" or index != device.index):
            raise UsageError(
                f"the script's DistributedDataParallel has device_ids={wrapper.device_ids} and "
                f"output_device={wrapper.output_device}, and castor computes on {device} here: "
                "give the GPU of the rank's number on its machine (LOCAL_RANK), or none for the CPU"
            )


def _shares_buffers(asked: Mapping[str, Any]) -> tuple[bool, bool]:
    """Returns whether ranks begin with rank 0's buffers, and whether they get them in forwards.

    From torch 2.13 on broadcast_buffers is None by default, and forward_sync_buffers decides over
    forwards alone.
    """
    forwards = asked.get("forward_sync_buffers")
    if forwards is not None:
        return True, bool(forwards)
    both = asked["broadcast_buffers"] is None or bool(asked["broadcast_buffers"])
    return both, both


def _engine(module: nn.Module) -> Engine:
    try:
        return engine_of(module)
    except UsageError:
        raise UsageError(
            f"the loop calls a DistributedDataParallel around a {type(module).__name__} with "
            "gradients, and no optimizer has been made for it: castor run boosts a model with its "
            "optimizers; make them before, or call it in torch.no_grad()"
        ) from None


def _check(asked: Mapping[str, Any], module: nn.Module) -> None:
    defaults = _ARGUMENTS.parameters
    for name, value in asked.items():
        known = name == "self" or name in _HONOURED or name in _NOT_NEEDED
        if known or value == defaults[name].default or name == "process_group":
            continue
        raise NotImplementedError(
            f"the script's DistributedDataParallel has {name}={value!r}, which castor run does not "
            f"honour: {_INSTEAD.get(name, 'leave it out')}"
        )
    if len(asked["device_ids"] or ()) > 1:
        raise ValueError(
            f"DistributedDataParallel has device_ids={asked['device_ids']}: a rank computes on one"
        )
    size, group = distributed.get_world_size(), asked["process_group"]
    if group is not None and distributed.get_world_size(group) != size:
        raise NotImplementedError(
            f"the script's DistributedDataParallel has a process_group of "
            f"{distributed.get_world_size(group)} of the {size} ranks, and castor run trains a "
            "model on all: leave it out, or start as many ranks as train it"
        )
    if not any(param.requires_grad for param in module.parameters()):
        raise RuntimeError(
            f"no parameter of this {type(module).__name__} requires a gradient: "
            "DistributedDataParallel is for models that train"
        )
    ignored = names_of_own(module).intersection(name for name, _ in module.named_parameters())
    if ignored:
        raise NotImplementedError(
            f"DistributedDataParallel is told to ignore parameter '{min(ignored)}', and castor run "
            "has the means of all gradients: freeze it, or train it on all ranks"
        )
