# Question: how much host time do castor's hooks add to a module's forward and backward, and how
#     much of that is the core's?
# Baseline: the same model without castor, in the same process, forward and backward in turn.
# Model: 10,000 modules of the smallest useful size, x + 0.1 * Linear(4, 4)(x) one after another, so
#     that host time is all there is; the budget is ample and the plan is made before timing.
#     optimizer.step() and zero_grad() run between the repetitions, off the clock.
# Clock: CPU time of the process, so that other work on the machine is not counted; wall-clock time
#     with --wall. Nothing here waits: on an idle machine the two agree.
# The core's share is measured by benchmarks/cpp/core_events.cc, which drives the same events
#     without torch and Python, on the wall clock.
"""Host time of castor's hooks per module: `python benchmarks/hooks.py [--modules N]`."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from _cpp import build, can_build, run
from _machine import command_line, describe_machine, spread, write_record
from rich.console import Console
from rich.table import Table
from torch import nn

from castor import Booster, GeminiPlugin

TOTAL_BAR_US, CORE_BAR_US = 10.0, 3.0
WIDTH, CORE_STEPS = 4, 51


class Chain(nn.Module):
    """Residual blocks; the scale keeps 10,000 of them finite."""

    def __init__(self, modules: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(modules))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, WIDTH) in and out."""
        scale = 1.0 / len(self.layers)
        for layer in self.layers:
            x = x + layer(x) * scale
        return x


class Contender:
    """A model with its optimizer and the seconds of its timed repetitions."""

    def __init__(self, modules: int, *, boosted: bool) -> None:
        torch.manual_seed(0)
        self.model = Chain(modules)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.booster = None
        if boosted:
            plugin = GeminiPlugin(device="cpu", device_memory="1TiB", precision="fp32")
            self.booster = Booster(plugin=plugin)
            self.booster.boost(self.model, self.optimizer)
        self.forward: list[float] = []
        self.backward: list[float] = []
        self.step: list[float] = []
        self.losses: list[float] = []

    def run(self, x: torch.Tensor, clock: Callable[[], float], *, timed: bool) -> None:
        """One forward, backward and step; the seconds are kept if `timed`."""
        gc.collect()
        gc.disable()
        start = clock()
        loss = self.model(x).square().mean()
        middle = clock()
        loss.backward()
        end = clock()
        gc.enable()
        self.optimizer.step()
        self.optimizer.zero_grad()
        finished = clock()
        self.losses.append(loss.item())
        if timed:
            self.forward.append(middle - start)
            self.backward.append(end - middle)
            self.step.append(finished - end)


def added_us(boosted: list[float], plain: list[float], modules: int) -> dict[str, float]:
    """Microseconds per module, paired within each repetition."""
    return spread([1e6 * (b - p) / modules for b, p in zip(boosted, plain, strict=True)])


def core_events(modules: int, steps: int, console: Console) -> dict[str, Any] | None:
    """Builds and runs core_events; None, said aloud, where there is no CMake."""
    if not can_build():
        console.print("[yellow]SKIPPED: the core's share: cmake is not installed")
        return None
    program = build("core_events")
    shares = {"ample": 2.0, "streaming 35%": 0.35}
    return {name: run(program, modules, steps, share) for name, share in shares.items()}


def main() -> int:
    parser = command_line("hooks", __doc__)
    parser.add_argument("--modules", type=int, default=10_000)
    parser.add_argument("--repetitions", type=int, default=11)
    parser.add_argument("--wall", action="store_true", help="wall-clock instead of CPU time")
    arguments = parser.parse_args()
    clock = time.perf_counter if arguments.wall else time.process_time
    console = Console()
    machine = describe_machine()

    modules, repetitions = arguments.modules, arguments.repetitions
    if arguments.quick:
        modules, repetitions = 100, 1
    plain = Contender(modules, boosted=False)
    boosted = Contender(modules, boosted=True)
    x = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(1))
    for repetition in range(-2, repetitions):
        order = (plain, boosted) if repetition % 2 else (boosted, plain)
        for contender in order:
            contender.run(x, clock, timed=repetition >= 0)
    report = boosted.booster.report()
    differences = [abs(b - p) / abs(p) for p, b in zip(plain.losses, boosted.losses, strict=True)]
    if not max(differences) <= 1e-5:
        raise RuntimeError(f"the losses differ by {max(differences):.1e}")
    if report.divergent_steps or not report.plans:
        raise RuntimeError("the boosted model did not run by plan")

    both = [[f + b for f, b in zip(c.forward, c.backward, strict=True)] for c in (boosted, plain)]
    added = {
        "forward + backward": added_us(*both, modules),
        "forward": added_us(boosted.forward, plain.forward, modules),
        "backward": added_us(boosted.backward, plain.backward, modules),
        "step and zero_grad (not in the target)": added_us(boosted.step, plain.step, modules),
    }
    core = core_events(modules, 3 if arguments.quick else CORE_STEPS, console)

    table = Table(title=f"castor's hooks, {modules:,} modules: us added per module")
    for heading in ("", "median", "quartiles", "target", ""):
        table.add_column(heading)
    for name, us in added.items():
        quartiles = f"{us['lower_quartile']:.2f} - {us['upper_quartile']:.2f}"
        is_target = name == "forward + backward"
        bar = f"<= {TOTAL_BAR_US:g}" if is_target else ""
        verdict = ("[green]met" if us["median"] <= TOTAL_BAR_US else "[red]missed") * is_target
        table.add_row(name, f"{us['median']:.2f}", quartiles, bar, verdict)
    for name, result in (core or {}).items():
        us = result["ns_per_module"]["median"] / 1000
        extremes = [result["ns_per_module"][key] / 1000 for key in ("min", "max")]
        verdict = "[green]met" if us <= CORE_BAR_US else "[red]missed"
        table.add_row(
            f"core alone, {name}",
            f"{us:.2f}",
            f"{extremes[0]:.2f} - {extremes[1]:.2f} (extremes)",
            f"<= {CORE_BAR_US:g}",
            verdict,
        )
    console.print(table)

    figures = {
        "modules": modules,
        "repetitions": repetitions,
        "clock": "wall" if arguments.wall else "cpu",
        "plain_seconds": {"forward": spread(plain.forward), "backward": spread(plain.backward)},
        "added_us_per_module": added,
        "core": core,
        "largest_relative_loss_difference": max(differences),
        "targets_us": {"total": TOTAL_BAR_US, "core": CORE_BAR_US},
    }
    write_record(arguments, "hooks", figures, machine=machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
