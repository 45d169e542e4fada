"""Estimates the memory and time of a training step from a model's config and a machine."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from castor import _C
from castor.activations.block_profile import Events, Link, spans_of
from castor.activations.choices import Choice, Decisions, search
from castor.config import StateFormat
from castor.config.names import SCALAR_TYPES
from castor.config.settings import first_update_fraction
from castor.estimate.activations import Logits, RecomputedBlocks, TiledLoss
from castor.estimate.adapters import add_adapters
from castor.estimate.machine import Machine
from castor.estimate.metatrace import Step, TraceEvent, record_step
from castor.estimate.model import (
    SHORTEST_SEQUENCE,
    build,
    longest_sequence,
    make_inputs,
    quiet,
)
from castor.estimate.search import largest
from castor.estimate.simulator import lay_out, options, places, seconds_of
from castor.estimate.workload import Workload
from castor.runtime.blocks import find_blocks, has_switch
from castor.runtime.spec import ModelSpec

_NVME = 3e9
"""Bytes per second of the NVMe drive that an estimate proposes: a consumer drive."""
_MAX_BATCH = 2**20
"""Upper bound of the search for the largest batch, in samples."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Estimate of a training step. Sizes are bytes, times seconds."""

    fits: bool
    """Whether the machine has room for the step."""
    device_bytes: int
    """Peak device bytes of the step; if the step does not fit, the least bytes that it needs."""
    host_bytes: int
    """Host bytes of parameters, gradients, optimizer state and the window buffers of NVMe."""
    nvme_bytes: int
    """Bytes of optimizer state, parameters and gradients that the host has no room for."""
    nvme_weight_bytes: int
    """Bytes of `nvme_bytes` that are parameters and gradients."""
    step_time_s: float | None
    """Seconds of the step; None if the step does not fit."""
    bound: str | None
    """Resource that is busy longest: "compute", "h2d", "d2h", "dram" or "nvme"; None if the step
    does not fit."""
    tokens_per_s: float | None
    """Samples times tokens of a sample over seconds; None if the step does not fit."""
    device_update_fraction: float
    """Share of the host's updates that the device runs."""
    max_batch: int
    """Samples of the largest batch that fits; 0 if none does."""
    max_sequence: int | None
    """Tokens of the longest samples with which the workload's batch fits; 0 if none does, None
    if samples are images."""
    busy_s: dict[str, float]
    """Seconds that each resource is busy in a step, whether the step fits or not."""
    parameters: int
    """Number of parameters; tied ones count once, adapters are included."""
    flops: int
    """FLOPs of a step, recomputation included."""
    nonmodel_bytes: int
    """Peak bytes of activations, temporaries and gradients that are being moved."""
    blocks: int
    """Number of blocks that may be recomputed or offloaded; 0 with activations="keep"."""
    recomputed_blocks: int
    """Number of blocks that are recomputed."""
    offloaded_blocks: int
    """Number of blocks whose activations wait in host memory."""
    rows_per_tile: int
    """Number of rows of logits that are computed at a time; 0: all at once."""
    trained_parameters: int
    """Number of parameters with gradients and optimizer states; with adapters fewer than all."""
    remedies: tuple[str, ...]
    """Changes that would make the step fit; empty if it fits."""
    fits_with: tuple[str, ...]
    """Options (formats, activations, NVMe) with which the step would fit; empty if it fits."""

    def as_json(self) -> dict[str, Any]:
        """Returns the figures that `castor estimate --json` prints."""
        figures = asdict(self)
        for name in ("busy_s", "parameters", "trained_parameters", "flops", "remedies"):
            del figures[name]
        return figures


def lowest(function: Callable[[float], float]) -> float:
    """Returns where in [0, 1] a convex function is lowest, to a hundredth."""
    low, high = 0.0, 1.0
    while high - low > 0.01:
        third = (high - low) / 3
        if function(low + third) <= function(high - third):
            high -= third
        else:
            low += third
    return min((0.0, round((low + high) / 2, 3), 1.0), key=function)


class Estimator:
    """Model on the meta device, laid out in chunks, whose steps are estimated.

    A step is recorded once for each batch and sequence length; every machine uses the same record.
    """

    def __init__(
        self,
        config: Path,
        workload: Workload,
        *,
        loss: Callable[[nn.Linear, bool], TiledLoss] | None = None,
    ) -> None:
        """Builds the model.

        Args:
            config: Path of a Hugging Face model's config.json.
            workload: The step to estimate.
            loss: Makes the loss that takes the place of the model's own. Its arguments are the
                output embedding, and whether the device is the CPU device. None: the model's own.

        Raises:
            OSError: The config cannot be read.
            ValueError: transformers cannot build a model of the config.
            ModuleNotFoundError: transformers is not installed.
        """
        self.workload = workload
        dtype: torch.dtype = getattr(torch, SCALAR_TYPES[workload.precision])
        self._config = config
        self._model = build(config, dtype=dtype)
        self.num_parameters = sum(param.numel() for param in self._model.parameters())
        """Parameters of the model; tied ones count once, adapters are included."""
        if workload.lora_rank is not None:
            add_adapters(
                self._model, workload.lora_rank, workload.lora, four_bit_base=workload.four_bit_base
            )
            params = self._model.parameters()
            self.num_parameters += sum(param.numel() for param in params if param.requires_grad)
        self._spec = ModelSpec.structure(self._model, gather_embeddings=workload.gather_embeddings)
        self.num_trained = sum(p.numel() for p in self._spec.params if p.requires_grad)
        """Number of parameters with gradients and optimizer states."""
        keep = workload.activations == "keep"
        if workload.activations == "auto":  # keeps what is no block, as in training
            keep = not any(map(has_switch, find_blocks(self._model).values()))
        self._blocks = None if keep else RecomputedBlocks(self._model)
        self._logits = Logits(self._model, self._spec)
        self._simulator = self._lay_out(workload.state_format)
        self._steps: dict[tuple[int, int], Step] = {}
        self._loss = None if loss is None else functools.cache(loss)

    def step(self, batch: int, sequence: int | None = None) -> Step:
        """Returns the step of a batch, recorded on the meta device.

        Args:
            batch: Number of samples.
            sequence: Tokens in a sample. Default: the workload's.
        """
        shape = batch, sequence or self.workload.sequence
        if shape not in self._steps:
            masked = self.workload.masked
            inputs = make_inputs(self._model, batch=batch, sequence=shape[1], masked=masked)
            with quiet():
                self._steps[shape] = record_step(
                    *(self._model, self._spec, inputs, self._simulator, self._blocks),
                    masked=masked,
                )
        return self._steps[shape]

    def estimate(self, machine: Machine) -> Estimate:
        """Predicts the workload's step on a machine.

        Raises:
            ValueError: The model's step cannot be recorded on the meta device.
        """
        batch = self.workload.batch
        step = self.step(batch)
        figures = self.simulate(step, machine)
        device_needed, host_needed = figures["smallest_budget_bytes"], figures["host_bytes"]
        fits = (
            device_needed <= machine.device_bytes
            and host_needed <= machine.host_bytes
            and self.has_host_storage(machine)
        )
        seconds = figures["step_seconds"]
        max_batch, max_sequence = self._max_batch(machine), self.max_sequence(machine)
        return Estimate(
            fits=fits,
            device_bytes=figures["peak_device_bytes"] if fits else device_needed,
            host_bytes=host_needed,
            nvme_bytes=figures["nvme_bytes"],
            nvme_weight_bytes=figures["nvme_weight_bytes"],
            step_time_s=seconds if fits else None,
            bound=figures["bound"] if fits else None,
            tokens_per_s=batch * self.workload.sequence / seconds if fits else None,
            device_update_fraction=figures["device_update_fraction"],
            max_batch=max_batch,
            max_sequence=max_sequence,
            busy_s=figures["busy_seconds"],
            parameters=self.num_parameters,
            trained_parameters=self.num_trained,
            flops=step.flops,
            nonmodel_bytes=figures["nonmodel_bytes"],
            blocks=self._blocks.num_blocks if self._blocks else 0,
            recomputed_blocks=figures["recomputed_blocks"],
            offloaded_blocks=figures["offloaded_blocks"],
            rows_per_tile=figures["rows_per_tile"],
            remedies=()
            if fits
            else self._remedies(
                machine, device_needed, host_needed, figures, self._smaller(max_batch, max_sequence)
            ),
            fits_with=() if fits else self._options_that_fit(machine, device_needed),
        )

    def simulate(
        self,
        step: Step,
        machine: Machine,
        *,
        margin_ratio: float = 1.0,
        least: bool = False,
    ) -> dict[str, Any]:
        """Plans and simulates a step; see csrc/python/simulator.cc for the figures.

        Args:
            step: The recorded step, from `step`.
            machine: The machine that the step runs on.
            margin_ratio: GeminiPlugin's gpu_margin_mem_ratio. It does not change the least bytes
                that a step needs; 0 finds them sooner.
            least: Whether activations="auto" keeps no block, which takes the least memory.

        Returns:
            The simulator's figures, and "nonmodel_bytes", "recomputed_blocks", "offloaded_blocks"
            and "rows_per_tile".
        """
        rows, head = step.rows, self._logits.head
        if self._loss is not None and head is not None:
            loss = self._loss(head, machine.on_host)
            for tile in loss.rows_at_once(rows):
                trace = self._logits.replaced(step.trace, loss.num_bytes(rows, tile))
                found = self._simulated(step, trace, tile, machine, margin_ratio, least=least)
                if found["smallest_budget_bytes"] <= machine.device_bytes:
                    break
            return found
        tile = self._logits.rows_per_tile(rows, machine.device_bytes)
        trace = self._logits.tiled(step.trace, rows, tile) if tile else step.trace
        return self._simulated(step, trace, tile, machine, margin_ratio, least=least)

    def _simulated(
        self,
        step: Step,
        trace: list[TraceEvent],
        tile: int,
        machine: Machine,
        margin_ratio: float,
        *,
        least: bool,
    ) -> dict[str, Any]:
        """Plans and simulates a step whose logits are computed in tiles; see `simulate`."""
        # Times are in `seconds`; those of the events are not read.
        events: Events = [(m.kind, m.position, m.nonmodel_bytes, 0) for m in trace]
        seconds = [seconds_of(event, machine) for event in trace]
        share = self.workload.device_update_fraction
        on = options(
            machine,
            overlap=self.workload.overlap,
            max_prefetch=self.workload.max_prefetch,
            margin_ratio=margin_ratio,
            device_update_fraction=first_update_fraction(share),
        )

        num_blocks = self._blocks.num_blocks if self._blocks else 0

        link = Link(min(machine.h2d, machine.d2h), overlapped=not machine.on_host)

        def simulated(decisions: Decisions) -> dict[str, Any]:
            spans = spans_of(step.runs, decisions, link, seconds)
            moved = _C.keep_activations(events, spans.seconds, spans.spans)
            figures = dict(self._simulator.run(*moved, on))
            figures["host_bytes"] += spans.host_bytes
            busy = figures["busy_seconds"] = dict(figures["busy_seconds"])
            busy["d2h"] += spans.host_bytes / machine.d2h
            busy["h2d"] += spans.host_bytes / machine.h2d
            return figures | {"nonmodel_bytes": max(event[2] for event in moved[0])}

        def choice(decisions: Decisions) -> Choice:
            found = simulated(decisions)
            needed = found["smallest_budget_bytes"]
            if set(decisions) != {"recompute"}:  # as AutoKeep
                needed += max(run.input_bytes for run in step.runs)
            room = machine.device_bytes - needed
            if "offload" in decisions and found["host_bytes"] > machine.host_bytes:
                room = -1
            return Choice(decisions, [], found["step_seconds"], room)

        offloads = self.workload.activations == "offload"
        decisions: Decisions = ("offload" if offloads else "recompute",) * num_blocks
        if self.workload.activations == "auto" and num_blocks and not least:
            decisions = search(choice, num_blocks, num_blocks).decisions
        if share == "auto" and not least:

            def seconds_with(fraction: float) -> float:
                on["device_update_fraction"] = fraction
                return float(simulated(decisions)["step_seconds"])

            on["device_update_fraction"] = lowest(seconds_with)
        return simulated(decisions) | {
            "device_update_fraction": on["device_update_fraction"],
            "recomputed_blocks": decisions.count("recompute"),
            "offloaded_blocks": decisions.count("offload"),
            "rows_per_tile": tile,
        }

    def has_host_storage(self, machine: Machine) -> bool:
        """Whether host and NVMe have room for the bytes that do not depend on the batch."""
        room = math.inf if machine.nvme_bytes is None else machine.nvme_bytes
        stored = self._simulator.places(places(machine))
        return stored["host_bytes"] <= machine.host_bytes and stored["nvme_bytes"] <= room

    def _max_batch(self, machine: Machine) -> int:
        recorded = [batch for batch, tokens in self._steps if tokens == self.workload.sequence]
        return self._largest(
            machine, self.step, recorded, start=self.workload.batch, least=1, most=_MAX_BATCH
        )

    def max_sequence(self, machine: Machine) -> int | None:
        """Returns the tokens of the longest samples with which the workload's batch fits.

        0 if none fits, None if samples are images.
        """
        most = longest_sequence(self._model)
        if most is None:
            return None
        step = functools.partial(self.step, self.workload.batch)
        start = min(self.workload.sequence, most)
        recorded = [tokens for batch, tokens in self._steps if batch == self.workload.batch]
        return self._largest(
            machine, step, recorded, start=start, least=SHORTEST_SEQUENCE, most=most
        )

    def _largest(
        self,
        machine: Machine,
        step: Callable[[int], Step],
        recorded: Sequence[int],
        *,
        start: int,
        least: int,
        most: int,
    ) -> int:
        """Returns the largest number whose step fits, 0 if none does; see `largest`.

        Args:
            machine: The machine.
            step: Records the step of a number.
            recorded: Numbers whose steps are recorded already, for a better first guess.
            start: The first guess where these are too few.
            least: The smallest number.
            most: The largest number.
        """
        if not self.has_host_storage(machine):
            return 0

        def figures(number: int) -> dict[str, Any]:
            return self.simulate(step(number), machine, margin_ratio=0.0, least=True)

        def needed(number: int) -> int:
            found = figures(number)
            on_host = found["host_bytes"] <= machine.host_bytes
            return int(found["smallest_budget_bytes"]) if on_host else machine.device_bytes + 1

        first = figures(start)
        fixed = first["smallest_budget_bytes"] - first["nonmodel_bytes"]
        near = self._line(needed, recorded)
        if near is not None:
            fixed, slope = near
            start = int(min(max((machine.device_bytes - fixed) / slope, least), most))
        return largest(
            needed, machine.device_bytes, fixed=int(fixed), start=start, least=least, most=most
        )

    @staticmethod
    def _line(needed: Callable[[int], int], recorded: Sequence[int]) -> tuple[float, float] | None:
        """Returns the line through the needs of two steps that other machines had recorded.

        Args:
            needed: Gives the need of a number.
            recorded: Numbers whose steps have been recorded.

        Returns:
            The need of 0 and that of each further one; None: too few steps are known.
        """
        high = max(recorded, default=0)
        low = max((number for number in recorded if number < 0.9 * high), default=0)
        if not low:
            return None
        needs = needed(low), needed(high)
        slope = (needs[1] - needs[0]) / (high - low)
        return (needs[1] - slope * high, slope) if slope > 0 else None

    def _smaller(self, max_batch: int, max_sequence: int | None) -> str:
        """Describes the smaller batches that would fit."""
        batch, sequence = self.workload.batch, self.workload.sequence
        fits = [f"{max_batch} x {sequence}"] if max_batch else []
        fits += [f"{batch} x {max_sequence}"] if max_sequence else []
        if not fits:
            return "no smaller batch fits"
        return f"at most {' or '.join(fits)} tokens instead of {batch} x {sequence}"

    def _remedies(
        self,
        machine: Machine,
        device_needed: int,
        host_needed: int,
        figures: dict[str, Any],
        smaller: str,
    ) -> tuple[str, ...]:
        found = []
        if device_needed > machine.device_bytes:
            instead = (
                "--activations auto"
                if self.workload.activations == "keep"
                else "a device with that much"
            )
            module = figures["smallest_budget_module"]
            found.append(
                f"{named_in_block(self._model, module)} needs {size(device_needed)} of "
                f"device memory, {size(device_needed - machine.device_bytes)} more than there is: "
                f"{smaller}, or {instead}"
            )
        if host_needed > machine.host_bytes:
            formats = self._formats_that_fit(machine)
            instead = f"--format {' or '.join(formats)}" if formats else "a smaller model"
            what = "the windows through which NVMe is worked on"
            if machine.nvme is None:
                what = "parameters, gradients and optimizer state"
                instead = f"--nvme, or {instead}"
            what += " and offloaded activations" if figures["offloaded_blocks"] else ""
            found.append(
                f"{what} take {size(host_needed)} of host memory, "
                f"{size(host_needed - machine.host_bytes)} more than there is: "
                f"more memory, or {instead}"
            )
        if machine.nvme_bytes is not None and figures["nvme_bytes"] > machine.nvme_bytes:
            found.append(
                f"what the host has no room for takes {size(figures['nvme_bytes'])} of NVMe, "
                f"{size(figures['nvme_bytes'] - machine.nvme_bytes)} more than there is"
            )
        return tuple(found)

    def _options_that_fit(self, machine: Machine, device_needed: int) -> tuple[str, ...]:
        """Finds the fewest changes of format, activations and NVMe with which the batch fits."""
        other = ""
        offloads = self.workload.activations == "offload"
        if device_needed > machine.device_bytes or offloads:
            if self.workload.activations not in ("keep", "offload"):
                return ()
            least = Estimator(self._config, replace(self.workload, activations="auto"))
            step = least.step(self.workload.batch)
            found = least.simulate(step, machine, margin_ratio=0.0, least=True)
            if found["smallest_budget_bytes"] > machine.device_bytes:
                return ()
            other = "--activations auto"
        own = self.workload.state_format
        disk = replace(machine, nvme=_NVME, nvme_bytes=None)
        formats = _C.rule_formats(self.workload.optimizer) if self._has_formats() else [own]
        ways = [(name, machine) for name in formats]
        ways += [(name, disk) for name in formats if machine.nvme is None]
        fitting = []
        for state_format, on in ways:
            stored = self._lay_out(state_format).places(places(on))
            room = math.inf if on.nvme_bytes is None else on.nvme_bytes
            if stored["host_bytes"] <= on.host_bytes and stored["nvme_bytes"] <= room:
                words = [other] if other else []
                words += [f"--format {state_format}"] if state_format != own else []
                if on is disk:
                    taken = size(stored["nvme_bytes"])
                    words.append(f"--nvme {_NVME / 1e9:g}GB/s (of which it takes {taken})")
                fitting.append(words)
        fewest = min(map(len, fitting), default=0)
        return tuple(" ".join(words) for words in fitting if len(words) == fewest)

    def _has_formats(self) -> bool:
        return self.workload.precision == "bf16"

    def _formats_that_fit(self, machine: Machine) -> list[str]:
        if not self._has_formats():
            return []
        stored = places(machine)

        def takes(state_format: StateFormat) -> int:
            return self._lay_out(state_format).places(stored)["host_bytes"]

        formats = _C.rule_formats(self.workload.optimizer)
        return [name for name in formats if takes(name) <= machine.host_bytes]

    def _lay_out(self, state_format: StateFormat) -> _C.Simulator:
        workload = self.workload
        return lay_out(self._spec, workload.precision, state_format, workload.optimizer)


def named_in_block(model: nn.Module, module: str) -> str:
    """Names a module, and the block of the model that holds it."""
    for name in find_blocks(model):
        if module.startswith(f"{name}."):
            return f"block '{name}' (module '{module}')"
    return f"module '{module}'"


def size(num_bytes: int) -> str:
    """Formats bytes: in MiB below one GiB, else in GiB."""
    if num_bytes < 2**30:
        return f"{num_bytes / 2**20:,.1f} MiB"
    return f"{num_bytes / 2**30:,.1f} GiB"
