"""Records one rank's stages of a model on the meta device, with a micro-batch.

Layers, sequences and blocks are sharded by the code that shards them in training. The other ranks
are simulated (see below). So modules, activations and collectives are those of a real rank instead
of formulas.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from castor import _C
from castor.config import Precision, StateFormat
from castor.distributed import (
    ContextParallel,
    Generators,
    Mode,
    ModelParallelGroup,
    TensorParallel,
    find_pipeline_plan,
    find_plan,
    with_expert_parallel,
)
from castor.distributed.inputs import asked_of
from castor.distributed.pipeline_plan import PipelinePlan, cheapest_cuts
from castor.distributed.stage_transfer import StageTransfer
from castor.distributed.stages import Place, StageModules, places_of
from castor.estimate.activations import Logits, RecomputedBlocks
from castor.estimate.metatrace import Recorder, Sent, TraceEvent, call, halve, recording, run
from castor.estimate.model import build, make_inputs, quiet
from castor.estimate.operators import Results
from castor.estimate.simulator import lay_out
from castor.planner.balanced_experts import balance_experts, count_experts
from castor.planner.repeated_blocks import NotRepeated, RepeatedBlocks
from castor.runtime.engine import WORKING_DTYPES
from castor.runtime.parallel_dims import ONE_RANK, ParallelDims
from castor.runtime.spec import ModelSpec

# --- Simulated ranks, whose collectives note the bytes of a step and send nothing -----------------


class SimulatedGroup(ModelParallelGroup):
    """One rank of a group whose other ranks are simulated and hold the same values."""

    @classmethod
    def simulate(
        cls, name: str, size: int, tell: Callable[[Sent], None], *, rank: int = 0
    ) -> SimulatedGroup:
        """Makes a group of simulated ranks around this process.

        Args:
            name: Name of the group in the notes.
            size: Number of ranks.
            tell: Called with each collective's traffic of this rank, in the thread that runs it.
            rank: Number of this rank in the group.
        """
        sends = cast("_C.RankTensors", _Sends(name, size, tell))
        return cls(rank=rank, size=size, group=cast("_C.RankGroup", None), name=name, tensors=sends)

    def all_gather_object(self, value: Any, *, place: str = "") -> list[Any]:
        """Returns the value once for each rank: the others have the same."""
        return [value] * self.size

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Does nothing: the others have the tensor."""

    def check_equal(self, facts: Mapping[str, Any], *, extra: Any = None) -> list[Any]:
        """Returns `extra` once for each rank: the facts are equal."""
        return [extra] * self.size


class _Sends:
    """Replacement of _C.RankTensors that notes what it would send."""

    def __init__(self, name: str, size: int, tell: Callable[[Sent], None]) -> None:
        self._name = name
        self._size = size
        self._tell = tell

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self._note("all_reduce", tensor)

    def all_gather(self, own: torch.Tensor, _parts: torch.Tensor) -> None:
        self._note("all_gather", own)

    def all_to_all(self, parts: torch.Tensor, _received: torch.Tensor) -> None:
        self._note("all_to_all", parts)

    def ring_shift(self, sent: torch.Tensor, _received: torch.Tensor) -> None:
        self._note("ring_shift", sent)

    device_backend = ""

    def sends_from_device(self, _tensor: torch.Tensor) -> bool:
        return False

    def backend_sums(self, _tensor: torch.Tensor) -> bool:
        return False

    def gather_bytes(self, own: bytes, _place: str) -> list[bytes]:
        return [own] * self._size

    def _note(self, operation: str, tensor: torch.Tensor) -> None:
        self._tell(Sent(self._name, operation, tensor.numel() * tensor.element_size()))


class SimulatedGenerators(Generators):
    """Generators that are never drawn from: simulated tensors have no values."""

    def __init__(self) -> None:
        """Makes generators of a model on the meta device."""
        super().__init__(torch.device("cpu"))

    def states(self) -> tuple[torch.Tensor, ...]:
        """Returns no states."""
        return ()

    def restore(self, states: tuple[torch.Tensor, ...]) -> None:
        """Does nothing: no state has changed."""

    def seed(self, seed: int) -> None:
        """Does nothing: nothing is drawn."""


# --- Records one rank's stages of a model on the meta device, with a micro-batch ------------------

_LABELS = "labels"
_OF_EVERY_BLOCK = ("output_router_logits", "output_hidden_states", "output_attentions")
"""Settings of a config by which a forward returns something of every block."""
TENSOR, SEQUENCE = "tensor", "sequence"
"""Names of the tensor- or expert-parallel ranks, and of the context-parallel ones."""


@dataclass(frozen=True, kw_only=True)
class StagePass:
    """Pass of a micro-batch through a stage, with no other micro-batch under way."""

    forward: list[TraceEvent]
    """Events of the forward."""
    backward: list[TraceEvent]
    """Events of the backward, without those of `of_weights`."""
    of_weights: list[TraceEvent]
    """Events of the weights' gradients, if the backward is split; else empty."""
    kept_bytes: int
    """Bytes between forward and backward, the stage input included."""
    kept_for_weights: int
    """Bytes between the halves of a split backward."""
    sent_bytes: int
    """Bytes of the stage output; its gradient, which comes back, takes as many."""

    @property
    def flops(self) -> int:
        """FLOPs of all operators."""
        trace = (*self.forward, *self.backward, *self.of_weights)
        return sum(flops for event in trace for flops, _ in event.work)


@dataclass(frozen=True, kw_only=True)
class SimulatedRank:
    """A rank of a pipeline and its stages."""

    simulator: _C.Simulator
    """Simulator of the rank's chunks."""
    laid_out: Callable[..., _C.Simulator]
    """Lays the rank's parameters out in other chunks; see lay_out."""
    passes: dict[int, StagePass]
    """Passes of a micro-batch, by number of the stage."""
    param_bytes: int
    """Bytes of the parameters, trainable or not; tied ones count once."""
    settled_bytes: int
    """Bytes of the parameters outside experts, whose gradients the expert-parallel ranks with
    different samples sum."""
    element_bytes: int
    """Bytes of a parameter's element."""

    def of_replicas(self, replicas: int) -> SimulatedRank:
        """Returns the rank as one of several replicas, with chunks laid out for their number."""
        return replace(self, simulator=self.laid_out(num_ranks=replicas))


class SimulatedModel:
    """Model whose layers and sequences are sharded, and whose stages can be recorded."""

    def __init__(
        self,
        config: Path,
        *,
        precision: Precision,
        state_format: StateFormat,
        rule: str = "adam",
        dims: ParallelDims = ONE_RANK,
        sequence_mode: Mode = "all_to_all",
        sequence_parallel: bool = False,
        results: Results | None = None,
    ) -> None:
        """Builds the model and shards it.

        Args:
            config: Path of the model's config.json.
            precision: Precision of parameters and computing.
            state_format: Format of the optimizer state.
            rule: Name of the optimizer's update rule.
            dims: Sizes of the groups of ranks, of which tp, ep and cp are read. All experts are
                chosen equally often.
            sequence_mode: Mode of context parallelism.
            sequence_parallel: Whether the tensor-parallel ranks shard the tokens between layers
                (sequence parallelism).
            results: Known results of operators, shared with other models of the same config; None:
                they are not shared.

        Raises:
            OSError, ModuleNotFoundError, ValueError: See castor.estimate.model.build.
            UsageError: A size does not fit the model.
            NotImplementedError: The model cannot be sharded in this way.
        """
        self._precision, self._state_format, self._rule = precision, state_format, rule
        self._dtype = WORKING_DTYPES[precision]
        self.model: Any = build(config, dtype=self._dtype)
        self._parallel: TensorParallel | None = None
        self._experts: Container[torch.Tensor] | None = None
        self._sequence_size = dims.cp
        self._tell: Recorder | None = None
        self._results = Results() if results is None else results
        self._plan: PipelinePlan | None = None
        self._layers: dict[int, list[int]] = {}
        self._sequences: ContextParallel | None = None
        if dims.cp > 1:
            # With all-gather of keys, the last rank attends to all of them, through a mask.
            last = dims.cp - 1
            peers = SimulatedGroup.simulate(SEQUENCE, dims.cp, self._note, rank=last)
            self._sequences = ContextParallel(
                self.model, peers, tensor_size=dims.tp, mode=sequence_mode
            )
        if dims.layer_shards > 1:
            self._shard_layers(dims, sequence_parallel=sequence_parallel)
        if self._sequences:
            self._sequences.start()
        self._blocks: RecomputedBlocks | None = None

    def _shard_layers(self, dims: ParallelDims, *, sequence_parallel: bool) -> None:
        counts = count_experts(self.model) if dims.ep > 1 else {}
        plan = find_plan(self.model, dims.tp, None) if dims.tp > 1 else {}
        if dims.ep > 1:
            plan = with_expert_parallel(self.model, plan, dims.ep)
        peers = SimulatedGroup.simulate(TENSOR, dims.layer_shards, self._note)
        layers = TensorParallel(self.model, plan, peers, sequence_parallel=sequence_parallel)
        layers.apply()
        if dims.tp > 1:
            layers.start(SimulatedGenerators())
            self._parallel = layers
        else:
            self._experts = layers.shard_specs
        balance_experts(self.model, counts)

    def plan(self) -> PipelinePlan:
        """Returns the plan by which the model is cut into stages.

        Raises:
            NotImplementedError: castor has no plan for the model, the model has an encoder, or its
                router logits have a form of their own.
        """
        if self._plan is None:
            plan = find_pipeline_plan(self.model)
            if plan.encoder:
                raise NotImplementedError(
                    f"castor cannot split a {type(self.model).__name__} into simulated "
                    "stages: what an encoder's stages send is not recorded yet; plan it without "
                    "stages"
                )
            self._transfer(plan)
            self._plan = plan
        return self._plan

    def layers_of(self, stages: int) -> list[int]:
        """Returns the number of blocks of each stage, as training cuts the model into `stages`."""
        if stages not in self._layers:
            self._layers[stages] = cheapest_cuts(self.model, self.plan(), stages)
        return self._layers[stages]

    def record(
        self, own: Sequence[int], stages: int, *, rows: int, sequence: int, tile: int,
        recomputes: bool = False, splits: bool = False, layers: Sequence[int] | None = None,
    ) -> SimulatedRank:  # fmt: skip
        """Records a rank's stages with a micro-batch.

        Args:
            own: Numbers of the rank's stages.
            stages: Number of the model's stages; 1: the model is not cut.
            rows: Samples of the micro-batch.
            sequence: Tokens in a sample.
            tile: Bytes of device memory, which decide whether logits are computed in tiles.
            recomputes: Whether all blocks are recomputed in backward.
            splits: Whether weights' gradients come later than those of hidden states.
            layers: Number of blocks of each stage; None: as training cuts the model.

        Raises:
            ValueError: The model cannot run on the meta device, or has no blocks that transformers
                can checkpoint.
            UsageError, NotImplementedError: The model cannot be cut in this way.
        """
        if recomputes and self._blocks is None:
            self._blocks = RecomputedBlocks(self.model)
        if self._blocks:
            self._blocks.switch(on=recomputes)
        inputs = make_inputs(self.model, batch=rows, sequence=sequence)
        if stages == 1:
            self._shard_tokens_in(None)
            return self._recorded(inputs, None, [], own, tile, splits=False)
        plan = self.plan()
        cuts = [0, *itertools.accumulate(layers or self.layers_of(stages))]
        transfer = self._transfer(plan)
        places = places_of(self.model, plan, cuts, transfer)
        with ExitStack() as undo:
            undo.callback(_restore, places)
            modules = StageModules(places, own, cuts, transfer)
            self._shard_tokens_in(modules.own_blocks)
            undo.enter_context(transfer.routers.start(self.model, plan, modules.own_blocks))
            # Outputs of every block need all blocks to run: none is left out then.
            of_all = any(asked_of(self.model, {}, name) for name in _OF_EVERY_BLOCK)
            repeated = [] if of_all else places
            return self._recorded(inputs, modules, repeated, own, tile, splits=splits)

    def _shard_tokens_in(self, stages: Sequence[range] | None) -> None:
        if self._parallel:
            self._parallel.shard_in(stages)

    def _transfer(self, plan: PipelinePlan) -> StageTransfer:
        transfer = StageTransfer.of(self.model, plan)
        transfer.dtype = self._dtype
        transfer.routers.ask(asked_of(self.model, {}, "output_router_logits"))
        return transfer

    def _recorded(
        self, inputs: dict[str, torch.Tensor], modules: StageModules | None,
        places: Sequence[Place], own: Sequence[int], tile: int, *, splits: bool,
    ) -> SimulatedRank:  # fmt: skip
        spec = ModelSpec.structure(self.model)
        laid_out = functools.partial(lay_out, spec, self._precision, self._state_format, self._rule)
        simulator = laid_out()
        passes = {}
        for stage in own:
            pass_of = functools.partial(
                self._pass, spec, simulator, inputs, modules, stage, tile, splits=splits
            )
            blocks = RepeatedBlocks.of_stage(places, stage)
            try:
                passes[stage] = pass_of(
                    RepeatedBlocks(blocks, spec, self._precision, simulator.chunks)
                    if blocks
                    else None
                )
            except NotRepeated:
                passes[stage] = pass_of(None)
        return SimulatedRank(
            simulator=simulator,
            laid_out=laid_out,
            passes=passes,
            param_bytes=sum(_bytes_of(param) for param in spec.params),
            settled_bytes=sum(
                _bytes_of(param)
                for param in spec.params
                if self._experts is not None and param not in self._experts
            ),
            element_bytes=self._dtype.itemsize,
        )

    def _pass(
        self,
        spec: ModelSpec,
        simulator: _C.Simulator,
        inputs: dict[str, torch.Tensor],
        modules: StageModules | None,
        stage: int,
        tile: int,
        repeated: RepeatedBlocks | None,
        *,
        splits: bool,
    ) -> StagePass:
        sent, received = None, None
        held, known = self.model.buffers(), self._results
        followed = repeated.each if repeated else simulator
        with quiet(), recording(spec, followed, held, results=known) as recorder:
            self._tell = recorder
            for tensor in inputs.values():
                recorder.charge(tensor)
            fixed = sum(_bytes_of(buffer) for buffer in self.model.buffers())
            if self._blocks and self._blocks.on:
                self._blocks.begin(lambda: (len(recorder.trace), recorder.live_bytes))
            if modules is None:
                last = run(self.model, inputs)
            else:
                with (
                    modules.running(stage) as transfer,
                    repeated.shortened() if repeated else nullcontext(),
                ):
                    if stage:
                        rows, tokens = transfer.size_of(inputs)
                        block = modules.cuts[stage]
                        tokens //= self._sequence_size
                        received = transfer.empty(rows, tokens, block, device="meta")
                        received.requires_grad_()
                        recorder.charge(received)
                        transfer.received = received
                    is_last = stage == len(modules.cuts) - 2
                    if self._sequences:
                        self._sequences.joins = is_last
                    if is_last:
                        last = run(self.model, inputs)
                    else:
                        given = {key: of for key, of in inputs.items() if key != _LABELS}
                        call(self.model, given)
                        assert transfer.sent is not None
                        last = sent = transfer.sent
                        if splits and sent._is_view():
                            last = sent = sent.clone()  # as in training: halves detach it
            forward, kept = len(recorder.trace), recorder.live_bytes - fixed
            grad = None if sent is None else torch.empty_like(sent)
            for_weights = 0
            if splits:
                later = halve(last, grad, received, recorder, spec)
                backward, for_weights = len(recorder.trace), recorder.live_bytes - fixed
                later()
            else:
                last.backward(grad)
                backward = len(recorder.trace)
            self._tell = None
            if self._blocks and self._blocks.on:
                self._blocks.take()
        every = recorder.trace
        if repeated:
            every, (forward, backward), beside = repeated.full_trace(every, forward, backward)
            kept += beside[0]
            for_weights += beside[1] if splits else 0
        # `of_weights` counts the full gradients of logits: their tiles are not known there.
        trace = self._tiled(spec, every[:backward], inputs, tile)
        return StagePass(
            forward=trace[:forward],
            backward=trace[forward:],
            of_weights=every[backward:],
            kept_bytes=kept,
            kept_for_weights=for_weights,
            sent_bytes=0 if sent is None else _bytes_of(sent),
        )

    def _tiled(
        self, spec: ModelSpec, trace: list[TraceEvent], inputs: dict[str, torch.Tensor], tile: int
    ) -> list[TraceEvent]:
        logits = Logits(self.model, spec)
        rows = inputs["input_ids"].numel() if "input_ids" in inputs else 0
        each = 0 if self._parallel else logits.rows_per_tile(rows, tile)
        return logits.tiled(trace, rows, each) if each else trace

    def _note(self, sent: Sent) -> None:
        if self._tell:
            self._tell.send(sent)


def _restore(places: Sequence[Place]) -> None:
    for place in places:
        place.put(place.module)


def _bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def num_blocks(model: nn.Module, plan: PipelinePlan) -> int:
    """Returns the number of blocks that stages are cut from."""
    return len(list(model.get_submodule(plan.blocks).children()))
