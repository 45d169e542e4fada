"""The source of a report's figures, for every form in which they are shown."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from torch import nn

from castor.booster import Booster
from castor.config.event_names import BACKWARD_ENTER, FORWARD_ENTER
from castor.errors import UsageError
from castor.report.timeline import StepTimeline
from castor.runtime.engine import Engine, engine_of
from castor.runtime.history import HistoryTotals, StepRecord
from castor.runtime.report import MemoryReport, size

RECENT_STEPS = 20

PAYLOAD_NAMES = {
    "param": "parameters",
    "grad": "gradients",
    "master": "fp32 master weights",
    "exp_avg": "exp_avg",
    "exp_avg_sq": "exp_avg_sq",
    "momentum_buffer": "momentum buffers",
    "remainder": "low halves of the masters",
    "scales": "scales of the moments",
}
GUIDANCE = {
    "demand": "no plan yet: chunks came on demand",
    "plan": "followed the plan",
    "diverged": "left the plan: chunks came on demand from there on",
}


@dataclass(frozen=True, kw_only=True)
class Source:
    """Everything a report shows."""

    model: str
    engine: Engine
    memory: MemoryReport
    step: StepTimeline
    records: list[StepRecord]
    totals: HistoryTotals

    @property
    def modules(self) -> list[str]:
        """Names of the modules that own parameters; the model itself is number 0."""
        return self.engine.modules

    @property
    def params(self) -> list[str]:
        """Names of the parameters."""
        return self.engine.names

    def parameters(self) -> str:
        """The number of parameters, as "42.6M parameters"."""
        count = sum(param.numel() for param in self.engine.params)
        where = " on this rank" if self.engine.ep_group else ""
        for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
            if count >= unit:
                return f"{count / unit:.1f}{name} parameters{where}"
        return f"{count} parameters{where}"

    @property
    def time_name(self) -> str:
        """Name of the clock by which the step's times are: a device works behind the host."""
        return "time" if self.engine.device.type == "cpu" else "host time"

    def setting(self) -> str:
        """Precision, device and the batch of the last step, in words."""
        words = [self.engine.settings.precision, f"device {self.engine.device}"]
        if self.memory.ranks > 1:
            words.append(f"rank {self.memory.rank} of {self.memory.ranks}")
        last = self.records[-1] if self.records else None
        if last and last.samples:
            of = f" of {last.tokens / last.samples:,.0f} tokens" if last.tokens else ""
            words.append(f"{last.samples:,} samples{of} a step")
        return ", ".join(words)

    def module_at(self, place: int) -> str:
        """The module that an event enters; inference in the middle of a step has none.

        Args:
            place: Number of the event in the step.
        """
        event = self.step.events[place]
        enters = event.kind in (FORWARD_ENTER, BACKWARD_ENTER)
        return self.modules[event.id] if enters else "inference"

    def rate(self) -> tuple[float, str] | None:
        """(median over the last steps, unit) of tokens or samples per second, of all ranks."""
        recent = [r for r in self.records[-RECENT_STEPS:] if r.seconds]
        for unit, counts in (
            ("tokens/s", [r.tokens for r in recent]),
            ("samples/s", [r.samples for r in recent]),
        ):
            if any(counts):
                pairs = zip(counts, recent, strict=True)
                own = statistics.median(n / (r.seconds or 1.0) for n, r in pairs)
                return own * self.engine.settings.data_shards, unit
        return None

    def step_seconds(self) -> float | None:
        """The median time of the last steps; None where no step's time is known."""
        recent = [r.seconds for r in self.records[-RECENT_STEPS:] if r.seconds]
        return statistics.median(recent) if recent else None

    def waited_ns(self) -> int:
        """Time for which the last step waited for chunks: transfers that nothing has hidden."""
        return sum(t.stall_ns for t in self.step.transfers if t.kind == "fetch")

    def last_loss(self) -> float | None:
        """The loss of the last step that has one."""
        return next((r.loss for r in reversed(self.records) if r.loss is not None), None)

    def headline(self) -> list[tuple[str, str, str]]:
        """(what, value, remark) of the figures that matter most."""
        step, memory = self.step, self.memory
        stall_ns = self.waited_ns()
        fetches = [t for t in step.transfers if t.kind == "fetch"]
        prefetched = sum(t.cause == "prefetch" for t in fetches)
        h2d = sum(t.bytes for t in fetches)
        d2h = sum(t.bytes for t in step.transfers if t.kind != "fetch")
        loss, rate = self.last_loss(), self.rate()
        resident = [
            (
                "Resident",
                size(memory.resident_bytes),
                f"{memory.resident_chunks} chunks live on the device, optimizer state included",
            )
        ]
        recomputed = [
            (
                "Recomputed",
                f"{memory.recomputed_blocks} of {memory.activation_blocks} blocks",
                f"{duration(int(memory.recompute_seconds * 1e9))} of a step; the others keep "
                f"{size(memory.saved_activation_bytes)}"
                if memory.recompute_seconds
                else "in backward; their activations are not kept",
            )
        ]
        offloaded = [
            (
                "Offloaded",
                f"{memory.offloaded_blocks} of {memory.activation_blocks} blocks",
                f"{size(memory.offloaded_activation_bytes)} of activations a step",
            )
        ]
        tiled = [
            (
                "Tiled",
                f"{memory.tiled_blocks} of {memory.activation_blocks} blocks",
                f"MLPs in {memory.mlp_tiles} pieces, for the budget has no room for whole ones"
                if memory.mlp_tiles
                else "a part of each runs on some rows at a time, in backward once more",
            )
        ]
        _, _, reason = memory.reduced_on.partition(": ")
        reduced = [
            (
                "Gradients",
                "reduced on the devices",
                f"by communicators of {size(memory.communicator_bytes)}",
            )
            if memory.reduced_on == "device"
            else ("Gradients", "reduced on the host", reason)
        ]
        steps_remark = f"{memory.skipped_steps} skipped, {memory.divergent_steps} left the plan"
        return [
            (
                "Device peak",
                size(memory.peak_device_bytes),
                f"{memory.peak_device_bytes / memory.device_budget_bytes:.1%} of the budget of "
                f"{size(memory.device_budget_bytes)}",
            ),
            ("Non-model peak", size(memory.peak_nonmodel_bytes), "activations and temporaries"),
            *(recomputed if memory.recomputed_blocks else []),
            *(offloaded if memory.offloaded_blocks else []),
            *(tiled if memory.tiled_blocks else []),
            ("Host memory", size(memory.host_bytes), f"in {memory.num_chunks} chunks"),
            *(resident if memory.resident_chunks else []),
            *(reduced if memory.ranks > 1 else []),
            ("Loss", "unknown" if loss is None else f"{loss:.4f}", f"of step {memory.steps}"),
            (
                "Speed",
                "unknown" if rate is None else f"{rate[0]:,.0f} {rate[1]}",
                f"median of up to {RECENT_STEPS} steps"
                + (", all ranks" if memory.ranks > 1 else ""),
            ),
            (
                "Last step",
                duration(step.end_ns),
                f"{duration(stall_ns)} waiting for chunks ({stall_ns / max(1, step.end_ns):.1%})"
                + ("" if self.time_name == "time" else f", in {self.time_name}"),
            ),
            (
                "Copied in the last step",
                f"{size(h2d)} in, {size(d2h)} out",
                f"{len(fetches)} fetches, {prefetched} of them ahead of use",
            ),
            ("Steps", f"{memory.steps:,}", steps_remark),
        ]


def source_of(target: Booster | nn.Module) -> Source:
    """Reads a boosted model.

    Args:
        target: A Booster (the model it boosted last) or a boosted model.

    Raises:
        TypeError: `target` is neither.
        UsageError: Nothing is boosted, or no step has finished.
    """
    if isinstance(target, Booster):
        engine = target._engine(None)
    elif isinstance(target, nn.Module):
        engine = engine_of(target)
    else:
        raise TypeError(
            f"a report needs a Booster or a boosted model; it was given a {type(target).__name__}"
        )
    return source_of_engine(engine)


def source_of_engine(engine: Engine) -> Source:
    """Reads what an engine has done.

    Raises:
        UsageError: No step has finished.
    """
    timeline = engine.session.timeline()
    if timeline is None:
        raise UsageError(
            "there is nothing to report yet; run forward, backward and optimizer.step() once first"
        )
    return Source(
        model=engine.model_name,
        engine=engine,
        memory=engine.report(),
        step=StepTimeline.of(timeline, engine.session.chunks()),
        records=engine.history.records,
        totals=engine.history.totals,
    )


def duration(nanoseconds: int) -> str:
    """A time, in s from 10 s on, else in ms, below 1 ms in µs."""
    if nanoseconds >= 10**10:
        return f"{nanoseconds / 1e9:,.1f} s"
    return f"{nanoseconds / 1e6:,.1f} ms" if nanoseconds >= 10**6 else f"{nanoseconds / 1e3:.0f} µs"
