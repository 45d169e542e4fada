"""Chooses the blocks that keep their activations, from a profile of a step that kept none."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from castor import _C
from castor.activations.block_profile import BlockProfile, BlockRun
from castor.config import SCALAR_TYPES, GeminiConfig
from castor.runtime.engine import Engine
from castor.runtime.spec import ModelSpec

_GRID = 8
"""Numbers of kept blocks that are tried first, evenly spread, before those beside the best."""
_PROBE_BYTES = 1 << 22
"""Of a copy that measures a link; at most this share of the device budget:"""
_PROBE_SHARE = 64
Events = list[tuple[int, int, int, int]]
"""Of a step, as _C takes them."""
_Size = tuple[int, int]
"""Of a block's inputs: most elements, and most rows of a sample."""


@dataclass(frozen=True)
class Choice:
    """A number of blocks that are kept, and the step that the simulator predicts with it."""

    kept: int
    events: Events
    seconds: float
    spare_bytes: int
    """Of the device budget, beyond what the step needs at least; below 0: it does not fit."""


class AutoKeep:
    """Which blocks of a model keep their activations: as many as make a step fastest.

    The first step recomputes every block, which needs the least memory, and records what each one
    would keep and what its second forward takes. From that the steps with more kept blocks follow
    without running them (_C.keep_activations), and the planner and the simulator say what each
    would take: kept activations cost no computing, but room in which chunks could stay. Kept are
    the last blocks, whose activations live the shortest. The chosen step is the next one's plan.

    A block whose input is larger than any that was profiled is recomputed, and the step after it is
    a profile again; of several profiles the one that keeps the fewest blocks counts. Where more
    stands in the device's memory than the profile saw, and than the budget has to spare, blocks
    that come are recomputed too, so that the step goes on.
    """

    def __init__(
        self, model: nn.Module, engine: Engine, config: GeminiConfig, num_blocks: int
    ) -> None:
        self._session = engine.session
        self._options = functools.partial(_options, config, engine.device)
        self._num_blocks = num_blocks
        self._simulator = _lay_out(model, engine, config)
        self._profile = BlockProfile(engine.session.moment)
        self._profiling = True
        self._most_kept = num_blocks
        self._first_kept = num_blocks
        self._sizes: list[dict[int, _Size]] = []  # of each profile, by block
        self._seen: dict[int, _Size] = {}  # in this step
        self._grown = False
        self._expected: list[int] = []  # non-model bytes of the chosen step, by moment
        self._spare = 0  # bytes of the budget beyond what that needs
        self.kept_bytes = 0
        """Of the activations of the blocks that are kept, in the profile's step."""
        self.recompute_seconds = 0.0
        """Of the second forwards of the others there."""

    def recomputes(self, block: int) -> bool:
        """Whether backward runs the block again, as far as was decided."""
        return block < self._first_kept

    def keeps(self, block: int, inputs: Iterable[Any]) -> bool:
        """Whether the forward of a block with such inputs keeps its activations."""
        size = _size(inputs)
        if self._profiling:
            seen = self._seen.get(block, (0, 0))
            self._seen[block] = (max(size[0], seen[0]), max(size[1], seen[1]))
            return False
        if not any(_within(size, sizes.get(block, (0, 0))) for sizes in self._sizes):
            self._grown = True
            return False
        return block >= self._first_kept and self._has_room()

    def _has_room(self) -> bool:
        """Whether non-model memory is as the chosen step has it, or there is room for more."""
        moments, now = self._session.moment()
        if not 0 < moments <= len(self._expected):
            return True
        return now <= self._expected[moments - 1] + self._spare

    def open(self, block: int) -> BlockRun:
        """A pass through a block that is not kept."""
        return self._profile.open(block)

    def step_ended(self) -> None:
        """Decides after a step that was a profile."""
        runs = self._profile.take()
        if self._profiling:
            if runs:
                self._decide(runs)
        elif self._grown:
            self._profiling, self._first_kept = True, self._num_blocks
        self._seen, self._grown = {}, False

    def _decide(self, runs: list[BlockRun]) -> None:
        timeline = self._session.timeline()
        self._profiling = False
        if timeline is None or not timeline["complete"]:
            return  # a step of so many moments has no plan either
        events: Events = [(m[0], m[1], m[4], m[2]) for m in timeline["moments"]]
        seconds = compute_seconds(timeline)
        options = self._options()
        margin = max(run.kept_bytes for run in runs)

        def choice(kept: int) -> Choice:
            spans = [run.span() for run in runs if run.block >= self._num_blocks - kept]
            step, durations = _C.keep_activations(events, seconds, spans)
            found = self._simulator.run(step, durations, options)
            # Backward of a block that is recomputed frees tensors sooner than of one that is kept.
            needed = found["smallest_budget_bytes"] + (margin if kept else 0)
            return Choice(kept, step, found["step_seconds"], options["device_bytes"] - needed)

        best = search(choice, self._most_kept)
        self._most_kept = best.kept
        self._first_kept = self._num_blocks - best.kept
        self._sizes = [s for s in self._sizes if not _covers(self._seen, s)] + [self._seen]
        kept = [run for run in runs if run.block >= self._first_kept]
        self.kept_bytes = sum(run.kept_bytes for run in kept)
        self.recompute_seconds = sum(run.seconds for run in runs if run.block < self._first_kept)
        self._expected = [event[2] for event in best.events]
        self._spare = max(0, best.spare_bytes)
        if best.kept:
            self._session.load_trace(best.events)


def search(choice: Callable[[int], Choice], most: int) -> Choice:
    """The fastest choice that fits, of 0 to `most` kept blocks; none kept where no choice fits.

    Step times are not convex in that number: freed memory holds chunks, and whole ones. So a grid
    comes first, then numbers ever closer to the best.
    """
    tried: dict[int, Choice] = {}

    def best() -> Choice:
        fitting = [found for found in tried.values() if found.spare_bytes >= 0]
        return min(fitting, key=lambda found: (found.seconds, -found.kept), default=tried[0])

    for i in range(_GRID + 1):
        kept = round(most * i / _GRID)
        tried[kept] = tried.get(kept) or choice(kept)
    distance = -(-most // _GRID)
    while distance > 1:
        distance = -(-distance // 2)
        middle = best().kept
        for kept in (middle - distance, middle + distance):
            if 0 <= kept <= most and kept not in tried:
                tried[kept] = choice(kept)
    return best()


def compute_seconds(timeline: dict[str, Any]) -> list[float]:
    """Of each moment of a step, until the next, without the copies that held it up."""
    times = [moment[2] for moment in timeline["moments"]] + [timeline["update_begin_ns"]]
    held = [0] * len(timeline["moments"])
    for _, cause, moment, _, _, submit_ns, wait_ns, _ in timeline["transfers"]:
        if cause != "step_end":
            held[moment] += submit_ns + wait_ns
    return [max(times[i + 1] - times[i] - copies, 0) / 1e9 for i, copies in enumerate(held)]


def _size(inputs: Iterable[Any]) -> _Size:
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    rows = (tensor.shape[-2] for tensor in tensors if tensor.dim() > 1)
    return max((tensor.numel() for tensor in tensors), default=0), max(rows, default=0)


def _within(size: _Size, limit: _Size) -> bool:
    return size[0] <= limit[0] and size[1] <= limit[1]


def _covers(sizes: dict[int, _Size], others: dict[int, _Size]) -> bool:
    return all(_within(size, sizes.get(block, (0, 0))) for block, size in others.items())


def _lay_out(model: nn.Module, engine: Engine, config: GeminiConfig) -> _C.Simulator:
    """The simulator, laid out as the session is."""
    spec = ModelSpec.structure(model, gather_embeddings=config.gather_embeddings)
    params = zip(spec.names, spec.params, engine.trained, strict=True)
    return _C.Simulator(
        params=[(name, param.numel(), trained) for name, param, trained in params],
        modules=[(module.name, module.params, module.parent) for module in spec.modules],
        precision=SCALAR_TYPES[config.precision],
        chunk_bytes=config.chunk_bytes,
        state_format=engine.session.optim_state_format,
        num_ranks=engine.ranks.size if engine.ranks else 1,
    )


def _options(config: GeminiConfig, device: torch.device) -> dict[str, Any]:
    """What Simulator.run is told of the machine."""
    on_gpu = device.type != "cpu"
    dram = _C.in_place_bandwidth(_PROBE_BYTES, 3)
    link = config.link_bytes_per_second or (
        _link_of(device, config) if on_gpu else _C.copy_bandwidth(_PROBE_BYTES, 3)
    )
    copies = "overlapped" if on_gpu or config.link_bytes_per_second else "synchronous"
    margin = config.gpu_margin_mem_ratio
    return {
        "policy": config.placement_policy,
        "offload_optim_frac": config.offload_optim_frac,
        "offload_param_frac": config.offload_param_frac,
        "margin_ratio": 1.0 if margin is None else margin,
        "max_prefetch": config.max_prefetch,
        "device_bytes": int(config.device_bytes * config.steady_cuda_cap_ratio),
        "host_bytes": config.host_bytes,
        "nvme_bytes_per_second": 1e9 if config.nvme_paths else 0.0,
        "h2d_bytes_per_second": float(link),
        "d2h_bytes_per_second": float(link),
        "dram_bytes_per_second": dram,
        "device_memory_bytes_per_second": 10 * dram if on_gpu else dram,
        "parameter_copies": copies,
        "gradient_copies": copies,
        "update_cores": "own" if on_gpu else "shared",
        "overlap": "none" if config.overlap == "none" else "forward",
        "with_norm": config.max_norm > 0 or config.nonfinite != "ignore",
    }


def _link_of(device: torch.device, config: GeminiConfig) -> float:
    """Bytes per second that a GPU's link takes, of page-locked memory where there is such."""
    num_bytes = min(_PROBE_BYTES, config.device_bytes // _PROBE_SHARE)
    source = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def seconds() -> float:
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        target[-1:].cpu()  # which waits for it
        return time.perf_counter() - start

    return num_bytes / min(seconds() for _ in range(4))
