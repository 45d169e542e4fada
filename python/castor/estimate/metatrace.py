"""Records one training step on the meta device: the order of its events, their work and memory.

The step really runs, forward and backward, on tensors that have a shape and no memory. So the order
of modules, the recomputation of checkpointed ones and the life of each activation are torch's own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from castor import _C
from castor.activations.block_profile import BlockRun
from castor.distributed.split_backward import SplitBackward
from castor.estimate.operators import Results, Work, flops_of, is_view, key_of, tensors_in
from castor.runtime.hooks import follow
from castor.runtime.spec import ModelSpec

_aten = torch.ops.aten


class BlockProfiler(Protocol):
    """Profiler of a step's passes through recomputed blocks."""

    def begin(self, now: Callable[[], tuple[int, int]]) -> None:
        """Begins a step, of which `now` gives the number of events so far and the live bytes."""
        ...

    def take(self) -> list[BlockRun]:
        """Returns the passes of the last step."""
        ...


@dataclass(frozen=True)
class Sent:
    """Traffic of one rank in a collective operation."""

    group: str
    """Name of the group of ranks that take part."""
    operation: str
    """"all_reduce", "all_gather", "all_to_all" or "ring_shift"."""
    num_bytes: int
    """Bytes of the rank's input."""


@dataclass
class TraceEvent:
    """An event of a step, and the span from it to the next one."""

    kind: int
    """Kind of the event, from castor.config.names."""
    position: int
    """Number of a module, or of a chunk whose gradients are complete."""
    nonmodel_bytes: int = 0
    """Peak bytes in the span of tensors that are not parameters."""
    live_bytes: int = 0
    """Bytes of these tensors at the event."""
    work: list[Work] = field(default_factory=list)
    """Work of each operator in the span."""
    sent: list[Sent] = field(default_factory=list)
    """Traffic to other ranks, which are simulated."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A recorded step."""

    trace: list[TraceEvent]
    """Events, in order."""
    rows: int = 0
    """Rows of the logits: samples times tokens."""
    runs: list[BlockRun] = field(default_factory=list)
    """Passes through recomputed blocks."""

    @property
    def flops(self) -> int:
        """FLOPs of all operators."""
        return sum(flops for event in self.trace for flops, _ in event.work)


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operator. The meta device lacks experts' products in fp32, which devices have."""
    if func is _aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
        left, right, *others = args
        return func(left.bfloat16(), right.bfloat16(), *others, **kwargs).to(left.dtype)
    return func(*args, **kwargs)


def _bytes_of(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Recorder(TorchDispatchMode):
    """Mode that records the work of each operator, and the storages that it makes."""

    def __init__(self, held: list[torch.Tensor], results: Results, *, masked: bool = False) -> None:
        super().__init__()
        self._masked = masked
        self.trace: list[TraceEvent] = []
        self.live_bytes = 0
        self.events: _C.StepEvents | None = None
        """Receiver of module events while recording; it refers to this object as well."""
        self._known: set[int] = set()  # keys of storages that are alive
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # those made while recording
        self._results = results
        for tensor in held:
            self._know(tensor.untyped_storage())

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tells torch that no operator is compiled, which would cost time for each."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _aten._local_scalar_dense.default and args[0].dtype == torch.bool:
            return not self._masked  # a model asks whether nothing is padded or packed
        view = is_view(func)  # half of all operators; remembering them saves nothing
        key = None if view else key_of(func, args, kwargs)
        known = self._results.find(key)
        if known:
            out, tensors = known.make(args)
            for tensor in tensors:
                self.charge(tensor)
            work = known.work
        else:
            out = _run(func, args, kwargs)
            made = [tensor for tensor in tensors_in(out) if self.charge(tensor)]
            if view and not made:
                return out  # a view reads nothing
            given = tensors_in([*args, *kwargs.values()])
            work = (flops_of(func, args, kwargs, out), _bytes_of([*given, *made]))
            if not (work[0] or made or func._schema.is_mutable):
                work = None  # nothing is read here either
            if not view:
                self._results.add(key, given, out, made, work)
        if work and self.trace:
            self.trace[-1].work.append(work)
        return out

    def _know(self, storage: torch.UntypedStorage) -> int | None:
        key: int = storage._cdata
        if key in self._known:
            return None
        self._known.add(key)
        return key

    def charge(self, tensor: torch.Tensor) -> bool:
        """Counts the storage of a tensor if it is new; returns whether it is."""
        storage = tensor.untyped_storage()
        key = self._know(storage)
        if key is None:
            return False
        size = storage.nbytes()
        self._alive[key] = weakref.ref(storage, partial(self._release, key, size))
        self.live_bytes += size
        self.note()
        return True

    def _release(self, key: int, size: int, _: object) -> None:
        self._known.discard(key)
        del self._alive[key]
        self.live_bytes -= size

    def note(self) -> None:
        """Raises the latest event's peak to the current bytes."""
        if self.trace:
            event = self.trace[-1]
            event.nonmodel_bytes = max(event.nonmodel_bytes, self.live_bytes)

    def send(self, sent: Sent) -> None:
        """Adds a collective to the latest event."""
        if self.trace:
            self.trace[-1].sent.append(sent)

    def event(self, kind: int, position: int) -> None:
        """Begins a new event, with the arguments that the runtime gets (step_events.h)."""
        self.trace.append(TraceEvent(kind, position, live_bytes=self.live_bytes))
        self.note()


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    device: str = "cuda",
) -> torch.Tensor:
    """Computes scaled_dot_product_attention by an operator that the device would run.

    Tensors are (batch, heads, positions, width).
    """
    if enable_gqa:
        groups = query.size(-3) // key.size(-3)
        key = key.repeat_interleave(groups, -3)
        value = value.repeat_interleave(groups, -3)
    # The CPU's fused kernel has no dropout, and devices other than CPU and CUDA have none.
    if device != "cuda" and (device != "cpu" or dropout_p > 0.0):
        by_scores: torch.Tensor = _aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale
        )[0]
        return by_scores
    bias = attn_mask
    if bias is not None:
        if bias.dtype == torch.bool:
            bias = torch.zeros_like(bias, dtype=query.dtype)
        bias = bias.expand(query.size(0), query.size(1), query.size(2), key.size(2))
    out: torch.Tensor = _aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, True, dropout_p, is_causal, scale=scale
    )[0]
    return out


@contextmanager
def _fused_attention(*, device: str = "cuda") -> Iterator[None]:
    """Has attention run as on devices; the meta device would make a matrix of scores.

    The function is replaced in torch itself, since a mode would not see what backward recomputes.
    """
    functional: Any = nn.functional
    before = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = partial(_attention, device=device)
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = before


@contextmanager
def _autocast_off_on_meta() -> Iterator[None]:
    """Lets a model turn autocast off for the meta device, which has none.

    peft does so for the adapters of experts.
    """
    torch_module: Any = torch
    before = torch_module.autocast

    def autocast(device_type: str, *args: Any, **settings: Any) -> Any:
        off = device_type == "meta" and settings.get("enabled") is False
        return nullcontext() if off else before(device_type, *args, **settings)

    torch_module.autocast = autocast
    try:
        yield
    finally:
        torch_module.autocast = before


@contextmanager
def _following(spec: ModelSpec, events: _C.StepEvents) -> Iterator[None]:
    handles = follow(spec, events)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def recording(
    spec: ModelSpec,
    simulator: _C.Simulator,
    held: Iterable[torch.Tensor],
    *,
    device: str = "cuda",
    results: Results | None = None,
    masked: bool = False,
) -> Iterator[Recorder]:
    """Records what a meta model computes within the context.

    Args:
        spec: The model's structure as castor sees it.
        simulator: The simulator, with the model laid out in chunks.
        held: Tensors other than parameters that exist throughout.
        device: Type of the device that the model would run on.
        results: Known results of operators, which the recording adds to.
        masked: Whether a model that asks is told that something is padded or packed.
    """
    recorder = Recorder([*spec.params], Results() if results is None else results, masked=masked)
    events = simulator.follow(spec.params, recorder.event)
    recorder.events = events
    for tensor in held:
        recorder.charge(tensor)
    try:
        with (
            _following(spec, events),
            _fused_attention(device=device),
            _autocast_off_on_meta(),
            recorder,
        ):
            yield recorder
    finally:
        recorder.events = None


def call(model: nn.Module, inputs: dict[str, torch.Tensor]) -> Any:
    """Runs one forward of a meta model, and returns its outputs.

    Raises:
        ValueError: The forward raised an exception, which is the cause. It may depend on values,
            such as a choice of experts, which meta tensors lack.
    """
    try:
        return model(**inputs)
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} cannot run on the meta device, where tensors have shapes "
            f"but no values: {type(error).__name__}: {error}"
        ) from error


def run(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Runs one forward of a meta model, and returns its loss.

    Raises:
        ValueError: The forward raised an exception (see `call`), or the outputs have no loss.
    """
    return _loss_of(call(model, inputs), model, inputs)


def _loss_of(output: Any, model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor | None = getattr(output, "loss", None)
    if loss is None:
        raise ValueError(
            f"{type(model).__name__} returns no loss for {', '.join(inputs)}; name an "
            "architecture with a head in the config's 'architectures'"
        )
    return loss


def halve(
    output: torch.Tensor,
    grad: torch.Tensor | None,
    received: torch.Tensor | None,
    recorder: Recorder,
    spec: ModelSpec,
) -> Callable[[], None]:
    """Computes the gradient of a stage's input; returns a function for those of its weights.

    Args:
        output: The stage output.
        grad: Gradient of the output; None: 1.
        received: The stage input; None: the first stage has none, and the returned function
            computes all gradients.
        recorder: Recorder of the pass.
        spec: The model's structure as castor sees it.
    """
    if received is None:
        return lambda: output.backward(grad)
    split = SplitBackward([output], [grad], [received])
    split.of_inputs()
    owners: dict[torch.Tensor, int] = {
        param: position
        for position, owner in enumerate(spec.modules)
        for param in owner.module.parameters(recurse=False)
    }

    def enter(params: Sequence[torch.Tensor]) -> None:
        assert recorder.events is not None
        for position in dict.fromkeys(owners[param] for param in params):
            recorder.events.enter_backward(position)

    return lambda: split.of_weights(enter)


def record_step(
    model: nn.Module,
    spec: ModelSpec,
    inputs: dict[str, torch.Tensor],
    simulator: _C.Simulator,
    blocks: BlockProfiler | None = None,
    *,
    device: str = "cuda",
    keeps_output: bool = False,
    masked: bool = False,
) -> Step:
    """Records one forward and backward of a meta model.

    Args:
        model: The model on the meta device, in training mode and in its working precision.
        spec: The model's structure as castor sees it.
        inputs: Keyword arguments of the forward, on the meta device, with labels.
        simulator: The simulator, with the model laid out in chunks.
        blocks: Profiler of the passes through recomputed blocks; None: no block is recomputed.
        device: Type of the device that the model would run on.
        keeps_output: Whether the training loop holds the forward's outputs until backward is over.
        masked: Whether samples are padded or packed, so that attention gets a mask.

    Returns:
        The recorded step.

    Raises:
        ValueError: See `run`.
    """
    held = (*model.buffers(), *inputs.values())
    with recording(spec, simulator, held, device=device, masked=masked) as recorder:
        if blocks:
            blocks.begin(lambda: (len(recorder.trace), recorder.live_bytes))
        output = call(model, inputs)
        loss = _loss_of(output, model, inputs)
        if not keeps_output:
            del output
        loss.backward()
        del loss
    rows = inputs["input_ids"].numel() if "input_ids" in inputs else 0
    return Step(trace=recorder.trace, rows=rows, runs=blocks.take() if blocks else [])
