"""Decides on each block's activations, from a profile of a step that recomputed all blocks."""

from __future__ import annotations

import functools
import math
import mmap
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from castor import _C
from castor.activations.block_profile import (
    BlockProfile,
    BlockRun,
    Decided,
    Link,
    Tiles,
    spans_of,
    without_copies,
)
from castor.activations.choices import BlockRanks, Choice, Decisions, best_for_all, search
from castor.activations.offload import offloading
from castor.config import SCALAR_TYPES, GeminiConfig
from castor.config.names import ReducedOn
from castor.config.settings import first_update_fraction
from castor.runtime.engine import Engine
from castor.runtime.spec import ModelSpec

_PROBE_BYTES = 1 << 22
"""Bytes of the copy that measures a GPU's link, at most the device budget over _PROBE_SHARE."""
_PROBE_SHARE = 64
_LEAST_COPIED = 1 << 26
"""Bytes of the copy that measures the host's memory, or those of all its caches if these are more.

The copy takes at most the host budget over _COPIED_SHARE; the chunks of a smaller budget stay in
caches.
"""
_COPIED_SHARE = 8
_REPETITIONS = 3
_FAULTED_BYTES = 1 << 25
"""Bytes of new memory that are written to measure page faults."""
_STEP_ENDS = "the end of a step, where ranks decide which blocks run again"
_Size = tuple[int, int]
"""Size of a block's inputs: the most elements, and the most rows of a sample."""


class AutoKeep:
    """Policy that decides which blocks of a model are kept, recomputed or offloaded.

    The first step is a profile. It recomputes every block, which needs little memory, and records
    the bytes that each block would keep and the time of its second forward. From the profile
    _C.keep_activations derives the steps with other decisions without running them, and the planner
    and the simulator predict their time and memory. Kept activations take room from chunks,
    recomputed ones cost computing, and offloaded ones cost the link and host memory. The fastest
    step that fits, with the bytes of one block's input to spare, is the plan of the next step.

    Some blocks are recomputed though the plan keeps or offloads them:

    - a block whose input is larger than in all profiles; the next step is a profile again, and of
      several profiles the one that keeps the fewest blocks counts;
    - the blocks that follow when device memory holds more than the plan and the spare bytes;
    - a block in which an allocation fails.

    Ranks that compute a block together decide alike. Of the decisions that they propose, they take
    one that fits on all ranks and is fastest on the slowest one. A block is recomputed on all ranks
    if one rank asks for it before its forward. An allocation that fails in a forward is then an
    error.
    """

    def __init__(
        self,
        model: nn.Module,
        engine: Engine,
        config: GeminiConfig,
        num_blocks: int,
        offload: _C.ActivationOffload,
        block_ranks: BlockRanks,
    ) -> None:
        self._session = engine.session
        self._block_ranks = block_ranks
        num_ranks = engine.ranks.size if engine.ranks else 1
        self._options = functools.partial(
            _options, config, engine.session, engine.device, num_ranks
        )
        self._all_recomputed: Decisions = tuple("recompute" for _ in range(num_blocks))
        self._decisions = self._all_recomputed
        self._simulator = _lay_out(model, engine, config)
        self._offload = offload
        self.tiles = Tiles()
        """Number of pieces that MLPs run in."""
        # Plain PyTorch has the same page faults: without "auto" asked for, they do not count.
        self._counts_faults = engine.device.type == "cpu" and not config.activations_by_default
        self._profile = BlockProfile(engine.session.step_position)
        self._profiling = True
        self._has_clock = engine.session.time_next_step()
        self._most_kept = num_blocks
        self._sizes: list[dict[int, _Size]] = []  # of each profile, by block
        self._seen: dict[int, _Size] = {}  # in this step
        self._grown = False
        self._fell_short = False
        self._nvme_share = 1.0  # share of NVMe's free bytes that is counted on
        self._expected: list[int] = []  # non-model bytes of the chosen step, by event
        self._spare = 0  # bytes of the budget beyond the chosen step's need
        self.kept_bytes = 0
        """Bytes of the activations of kept blocks, in the profile's step."""
        self.recompute_seconds = 0.0
        """Seconds of the second forwards of recomputed blocks, in the profile's step."""

    def recomputes(self, block: int) -> bool:
        """Whether the current decision for a block is to recompute it."""
        return self._decisions[block] == "recompute"

    @property
    def offloaded_blocks(self) -> int:
        """Number of blocks whose current decision is to offload."""
        return self._decisions.count("offload")

    def offloading(self) -> AbstractContextManager[None]:
        """Returns the context in which the forward of an offloaded block runs."""
        return offloading(self._offload)

    def decide(self, block: int, inputs: Iterable[Any]) -> Decided:
        """Returns the decision for the activations of a forward of a block with such inputs."""
        size = _size(inputs)
        if self._profiling:
            seen = self._seen.get(block, (0, 0))
            self._seen[block] = (max(size[0], seen[0]), max(size[1], seen[1]))
            return "recompute"
        grown = not any(_within(size, sizes.get(block, (0, 0))) for sizes in self._sizes)
        self._grown |= grown
        if self.recomputes(block):
            return "recompute"
        careful = grown or self._fell_short or not self._has_room()
        careful = any(self._block_ranks.all_gather(f"the forward of block {block}", careful))
        return "recompute" if careful else self._decisions[block]

    @property
    def may_run_again(self) -> bool:
        """Whether a kept block may still be recomputed when its forward has begun.

        With several ranks it may not: the others would not take part in the repeated collectives.
        """
        return self._block_ranks.alone

    def cut(self, number: int) -> None:
        """Has MLPs run in `number` pieces from now on; a new number discards the profiles."""
        if number != self.tiles.number:
            self.tiles.number = number
            self._profiling, self._decisions = True, self._all_recomputed
            self._sizes, self._most_kept = [], len(self._decisions)
            self._session.time_next_step()

    @property
    def nonmodel_bytes(self) -> int:
        """Bytes of activations and temporaries that are on the device now."""
        return self._session.step_position()[1]

    def simulated_steps(self) -> tuple[_C.Simulator, dict[str, Any]]:
        """Returns the simulator, and its options for questions about bytes only."""
        return self._simulator, self._options(measured=False) | {"margin_ratio": 0.0}

    def fell_short(self, tier: str) -> None:
        """Has the rest of the step recompute its blocks, after a block has found no room in a tier.

        The next step is a profile. If the device had no room, activations that are being offloaded
        since the block before leave it.

        Args:
            tier: The tier that had no room.
        """
        self._fell_short = True
        if tier == "device":
            self._offload.begin()
        elif tier == "nvme":  # tensors are rounded up to pages there, which was not counted
            self._nvme_share /= 2

    def _has_room(self) -> bool:
        """Whether non-model memory exceeds that of the chosen step by no more than is spare."""
        event, now = self._session.step_position()
        if not 0 < event <= len(self._expected):
            return True
        return now <= self._expected[event - 1] + self._spare

    def open(self, block: int) -> BlockRun:
        """Opens the profile of a pass through a block that is recomputed."""
        return self._profile.open(block)

    def step_ended(self) -> None:
        """Ends a step: decides if it was a profile, else whether the next one is."""
        runs = self._profile.take()
        if self._profiling:
            timeline = self._session.timeline() if runs else None
            # A step that was under way when it became a profile was not timed: the next one is.
            timed = timeline is not None and bool(timeline["device_times"] or not self._has_clock)
            complete = timeline is not None and timeline["complete"]
            everyone = self._block_ranks.all_gather(_STEP_ENDS, (timed, complete))
            self._profiling = not all(ran for ran, _ in everyone)
            # An incomplete timeline, of a step with too many events, has no plan either.
            if timeline and not self._profiling and all(whole for _, whole in everyone):
                self._decide(runs, timeline)
        elif any(self._block_ranks.all_gather(_STEP_ENDS, self._grown or self._fell_short)):
            self._profiling, self._decisions = True, self._all_recomputed
        if self._profiling:
            self._session.time_next_step()
        self._seen, self._grown, self._fell_short = {}, False, False

    def _decide(self, runs: list[BlockRun], timeline: dict[str, Any]) -> None:
        events = without_copies([(m[0], m[1], m[4], m[2]) for m in timeline["events"]], runs)
        seconds = compute_seconds(timeline)
        options = self._options()
        margin = max(run.input_bytes for run in runs)
        faults = _fault_seconds() if self._counts_faults else 0.0
        overlapped = options["parameter_copies"] == "overlapped"
        ready = self._offload.figures()
        link = Link(
            options["d2h_bytes_per_second"],
            overlapped,
            host_room=self._session.free_host_bytes + ready["ready_host_bytes"],
            nvme_bytes_per_second=options["nvme_bytes_per_second"] or math.inf,
        )
        # The NVMe bytes of a tensor are learnt by failing, which several ranks cannot do.
        nvme_room = self._nvme_share * ready["ready_nvme_bytes"] if self.may_run_again else 0

        def choice(decisions: Decisions) -> Choice:
            spans = spans_of(runs, decisions, link, seconds)
            step, durations = _C.keep_activations(events, spans.seconds, spans.spans)
            found = self._simulator.run(step, durations, options)
            kept_bytes = sum(run.kept_bytes for run in runs if decisions[run.block] == "keep")
            needed = found["smallest_budget_bytes"] + (margin if spans.spans else 0)
            spare = options["device_bytes"] - needed
            return Choice(
                decisions=decisions,
                events=step,
                seconds=found["step_seconds"] + kept_bytes * faults,
                spare_bytes=spare if spans.nvme_bytes <= nvme_room else -1,
            )

        best = search(choice, len(self._decisions), self._most_kept)
        if not self._block_ranks.alone:
            best = best_for_all(choice, best, self._all_recomputed, self._block_ranks)
        self._most_kept = best.kept
        self._decisions = best.decisions
        self._sizes = [s for s in self._sizes if not _covers(self._seen, s)] + [self._seen]
        kept = [run for run in runs if best.decisions[run.block] == "keep"]
        self.kept_bytes = sum(run.kept_bytes for run in kept)
        self.recompute_seconds = sum(
            sum(seconds[run.second_forward()]) for run in runs if self.recomputes(run.block)
        )
        self._expected = [event[2] for event in best.events]
        self._spare = max(0, best.spare_bytes)
        if best.decisions != self._all_recomputed:
            self._session.load_trace(best.events)


def compute_seconds(timeline: dict[str, Any]) -> list[float]:
    """Returns the seconds from each event of a timeline to the next, without waits for copies.

    They are those of the device's clock if the step was timed by it, else of the host's.
    """
    if timeline["device_times"]:
        return [compute_ns / 1e9 for _, compute_ns in timeline["device_times"]]
    times = [event[2] for event in timeline["events"]] + [timeline["update_begin_ns"]]
    held = [0] * len(timeline["events"])
    for _, cause, event, _, _, submit_ns, wait_ns, _ in timeline["transfers"]:
        if cause != "step_end":
            held[event] += submit_ns + wait_ns
    return [max(times[i + 1] - times[i] - copies, 0) / 1e9 for i, copies in enumerate(held)]


def _fault_seconds() -> float:
    """Measures the seconds per byte of page faults in new memory.

    Malloc returns large tensors to the kernel when they are freed, so kept activations are new
    memory in each step. Those of a recomputed or an offloaded block take the memory of the block
    before.
    """
    with mmap.mmap(-1, _FAULTED_BYTES) as fresh:
        pages = torch.frombuffer(fresh, dtype=torch.uint8)
        times = [time.perf_counter()]
        for value in range(2):
            pages.fill_(value)
            times.append(time.perf_counter())
        del pages
    first, second = times[1] - times[0], times[2] - times[1]
    return max(0.0, first - second) / _FAULTED_BYTES


def _size(inputs: Iterable[Any]) -> _Size:
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    rows = (tensor.shape[-2] for tensor in tensors if tensor.dim() > 1)
    return max((tensor.numel() for tensor in tensors), default=0), max(rows, default=0)


def _within(size: _Size, limit: _Size) -> bool:
    return size[0] <= limit[0] and size[1] <= limit[1]


def _covers(sizes: dict[int, _Size], others: dict[int, _Size]) -> bool:
    return all(_within(size, sizes.get(block, (0, 0))) for block, size in others.items())


def _lay_out(model: nn.Module, engine: Engine, config: GeminiConfig) -> _C.Simulator:
    """Returns a simulator with the chunks of the session."""
    spec = ModelSpec.structure(model, gather_embeddings=config.gather_embeddings)
    params = zip(spec.names, spec.params, engine.trained, strict=True)
    return _C.Simulator(
        params=[(name, param.numel(), trained) for name, param, trained in params],
        modules=[(module.name, module.params, module.parent) for module in spec.modules],
        precision=SCALAR_TYPES[config.precision],
        chunk_bytes=config.chunk_bytes,
        state_format=engine.session.optim_state_format,
        num_ranks=engine.ranks.size if engine.ranks else 1,
        ruled=engine.ruled,
        rule=engine.rule.name if engine.rule else "adam",  # which then updates nothing
        in_fp32=[param.dtype == torch.float32 for param in engine.params],
        by_row=engine.by_row,
    )


def _options(
    config: GeminiConfig,
    session: _C.Session,
    device: torch.device,
    num_ranks: int,
    *,
    measured: bool = True,
) -> dict[str, Any]:
    """Returns the options of Simulator.run for this machine; unmeasured speeds mean nothing."""
    on_gpu = device.type != "cpu"
    dram, link = 1e9, float(config.link_bytes_per_second or 1e9)
    if measured:
        num_bytes = _copied_bytes(config.host_bytes)
        dram = _dram_of(num_bytes)
        link = config.link_bytes_per_second or (
            _link_of(device, config) if on_gpu else _copy_of(num_bytes)
        )
    copies = "overlapped" if on_gpu or config.link_bytes_per_second else "synchronous"
    margin = config.gpu_margin_mem_ratio
    reduced_on: ReducedOn = "device" if session.report()["reduced_on"] == "device" else "host"
    return {
        "policy": config.placement_policy,
        "offload_optim_frac": config.offload_optim_frac,
        "offload_param_frac": config.offload_param_frac,
        "margin_ratio": 1.0 if margin is None else margin,
        "max_prefetch": config.max_prefetch,
        "device_bytes": int(config.device_bytes * config.steady_cuda_cap_ratio),
        "host_bytes": config.host_bytes,
        "nvme_bytes_per_second": 1e9 if config.nvme_paths else 0.0,
        "ranks_sharing": session.ranks_sharing,
        "reduced_on": reduced_on,
        "h2d_bytes_per_second": float(link),
        "d2h_bytes_per_second": float(link),
        "dram_bytes_per_second": dram,
        "update_bytes_per_second": 0.0,
        "device_update_fraction": first_update_fraction(config.device_update_fraction),
        "device_memory_bytes_per_second": 10 * dram if on_gpu else dram,
        "parameter_copies": copies,
        "gradient_copies": copies,
        "update_cores": "own" if on_gpu else "shared",
        "overlap": "none" if config.overlap == "none" else "forward",
        "num_ranks": num_ranks,
        "gathering_ranks": num_ranks if reduced_on == "device" else 1,
        "with_norm": config.max_norm > 0 or config.nonfinite != "ignore",
    }


def _link_of(device: torch.device, config: GeminiConfig) -> float:
    """Measures the bytes per second of a GPU's link, from page-locked memory on CUDA."""
    num_bytes = min(_PROBE_BYTES, config.device_bytes // _PROBE_SHARE)
    source = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    events = torch.get_device_module(device).Event

    def seconds() -> float:
        start, end = events(enable_timing=True), events(enable_timing=True)
        start.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        milliseconds: float = start.elapsed_time(end)
        return milliseconds / 1e3

    return num_bytes / min(seconds() for _ in range(4))


def _copied_bytes(host_bytes: int) -> int:
    """Returns the bytes of a copy within the host that exceeds its caches."""
    most = max(1 << 12, host_bytes // _COPIED_SHARE)
    return min(max(_LEAST_COPIED, _C.cache_bytes()), most)


@functools.cache  # measured once: a machine does not change
def _dram_of(num_bytes: int) -> float:
    return _C.in_place_bandwidth(2 * num_bytes // 4, _REPETITIONS)  # as much as a copy touches


@functools.cache
def _copy_of(num_bytes: int) -> float:
    return _C.copy_bandwidth(num_bytes, _REPETITIONS)
