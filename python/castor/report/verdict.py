"""A sentence on how a run goes, and advice on what would make it better."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from castor.runtime.report import size

if TYPE_CHECKING:
    from castor.report.source import Source


MANY_WAITS = 0.10
"""Share of the last step that may wait for chunks before that is advised against."""
MANY_SKIPPED = 0.05
"""Share of the steps whose update may be skipped."""
MANY_DIVERGENT = 0.10
"""Share of the steps whose modules may run in another order than planned."""
LONG_UPDATE = 0.25
"""Share of the last step that the update may take on a GPU, where another mode can hide it."""
UNUSED_BUDGET = 0.30
"""Share of the device budget that may stay free."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Judgement of a run."""

    good: bool
    """Whether nothing has to be mended; advice on unused memory alone leaves it True."""
    text: str
    """One sentence."""
    advice: list[str]
    """Changes to make, the most important first; each names the argument."""


def verdict_of(source: Source) -> Verdict:
    """Judges a run by its last step and its history.

    Args:
        source: What a report shows.
    """
    mend = [*_of_values(source), *_of_order(source), *_of_time(source)]
    memory = source.memory
    share = memory.peak_device_bytes / max(1, memory.device_budget_bytes)
    words = [
        f"at most {size(memory.peak_device_bytes)} of a device budget of "
        f"{size(memory.device_budget_bytes)} ({share:.0%})"
    ]
    if source.step.guidance == "demand":
        words.append("this step was the first, which records the order of modules for a plan")
    else:
        words.append(f"{_waits(source):.1%} of the last step waited for chunks")
    return Verdict(
        good=not mend,
        text=f"{'Can run better' if mend else 'Runs well'}: {'; '.join(words)}.",
        advice=[*mend, *([] if mend else _of_room(source, share))],
    )


def _waits(source: Source) -> float:
    return source.waited_ns() / max(1, source.step.end_ns)


def _of_values(source: Source) -> list[str]:
    found = []
    last = next((record for record in reversed(source.records) if record.loss is not None), None)
    if last and last.loss is not None and not math.isfinite(last.loss):
        found.append(
            f"The loss of step {last.step:,} is {last.loss}: lower the learning rate or clip "
            "gradients (max_norm=1.0), and go on from an earlier checkpoint."
        )
    steps, skipped = source.totals.steps, source.totals.skipped_steps
    if skipped > MANY_SKIPPED * steps:
        found.append(
            f"{skipped:,} of {steps:,} updates were skipped, because a gradient was not finite: "
            "lower the learning rate, or use precision='bf16' instead of 'fp16'."
        )
    return found


def _of_order(source: Source) -> list[str]:
    steps, divergent = source.memory.steps, source.memory.divergent_steps
    if divergent <= MANY_DIVERGENT * steps:
        return []
    return [
        f"{divergent:,} of {steps:,} steps ran modules in another order than the plan, so that "
        "chunks came on demand: batches that take different paths through the model need a larger "
        "device_memory."
    ]


def _of_time(source: Source) -> list[str]:
    if source.step.guidance == "demand":
        return []
    found, step = [], source.step
    if _waits(source) > MANY_WAITS:
        found.append(
            f"{_waits(source):.0%} of the last step waited for chunks: more tokens in a step "
            "(a larger batch, or fewer accumulation steps) hide more copies, and a larger "
            "device_memory needs fewer."
        )
    update = sum(end - start for phase, start, end in step.phases() if phase == "optimizer")
    if source.engine.device.type != "cpu" and update > LONG_UPDATE * max(1, step.end_ns):
        found.append(
            f"The update took {update / step.end_ns:.0%} of the last step: overlap='forward' runs "
            "it beside the next forward."
        )
    return found


def _of_room(source: Source, share: float) -> list[str]:
    free = source.memory.device_budget_bytes - source.memory.peak_device_bytes
    if share > 1 - UNUSED_BUDGET or source.step.guidance == "demand":
        return []
    return [f"{size(free)} of the device budget stayed free: a larger batch would use it."]
