# Question: how long does planning a step take, and how does that grow with the step's length?
# Baseline: none; the targets are 1,000,000 accesses in under 1 s, and growth no worse than n log n.
# Method: benchmarks/cpp/planner.cc plans made-up traces whose length doubles from 125,000 to
#     2,000,000 accesses, for each case below: a deeper and deeper model (chunks grow with the
#     length), or more and more micro-batches over a fixed number of chunks; budgets so small that
#     chunks come and go all the time. The median counts against 1 s, the fastest runs for growth.
# Growth: seconds of the longest over seconds of the shortest, per doubling, against the same of
#     n log n. SLACK allows for the longer ones leaving the caches; a quadratic term would give 4.
"""The planner's time against the length of the step: `python benchmarks/planner.py [--quick]`."""

from __future__ import annotations

import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from _cpp import build, run
from _machine import command_line, describe_machine, spread, write_record
from rich.console import Console
from rich.table import Table

SHORTEST, DOUBLINGS, TARGET_LENGTH = 125_000, 4, 1_000_000
TARGET_SECONDS, SLACK = 1.0, 1.15


@dataclass(frozen=True, kw_only=True)
class Case:
    """Arguments of the C++ program; see there."""

    shape: str
    policy: str
    share: float
    prefetch: int
    chunks: int = 0

    def __str__(self) -> str:
        chunks = f"{self.chunks:,} chunks" if self.chunks else "8 accesses a chunk"
        return f"{self.policy}, {chunks}, {self.share:.0%} fits, prefetch {self.prefetch}"


CASES = (
    Case(shape="deep", policy="auto", share=0.2, prefetch=1),
    Case(shape="deep", policy="auto", share=0.02, prefetch=16),
    Case(shape="deep", policy="cpu", share=0.2, prefetch=4),
    Case(shape="wide", policy="auto", share=0.3, prefetch=4, chunks=16),
    Case(shape="wide", policy="auto", share=0.2, prefetch=4, chunks=1_000),
    Case(shape="wide", policy="auto", share=0.5, prefetch=16, chunks=1_000),
    Case(shape="wide", policy="cpu", share=0.2, prefetch=4, chunks=100),
    Case(shape="wide", policy="static", share=0.3, prefetch=4, chunks=10_000),
)


def measure(program: Path, case: Case, length: int, repetitions: int) -> dict[str, Any]:
    found: dict[str, Any] = run(
        program,
        length,
        repetitions,
        case.shape,
        case.chunks,
        case.policy,
        case.share,
        case.prefetch,
    )
    # Verified after timing, beside what the program checks itself: the budget was small enough.
    if found["evictions"] < 0.05 * found["accesses"]:
        raise RuntimeError(f"{case}: only {found['evictions']} evictions; the budget is not tight")
    return {**found, "seconds": spread(found["seconds"])}


def growth(points: list[dict[str, Any]]) -> dict[str, float]:
    """Per doubling: of the fastest runs' seconds, and what n log n would give."""
    first, last = points[0], points[-1]
    doublings = math.log2(last["accesses"] / first["accesses"])
    n_log_n = [point["accesses"] * math.log(point["accesses"]) for point in (first, last)]
    return {
        "per_doubling": (last["seconds"]["min"] / first["seconds"]["min"]) ** (1 / doublings),
        "n_log_n_per_doubling": (n_log_n[1] / n_log_n[0]) ** (1 / doublings),
    }


def main() -> int:
    parser = command_line("planner", __doc__)
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    console = Console()
    machine = describe_machine()
    program = build("planner")

    doublings, repetitions = DOUBLINGS, arguments.repetitions
    if arguments.quick:
        doublings, repetitions = 1, 1
    lengths = [SHORTEST * 2**i for i in range(doublings + 1)]
    table = Table(title=f"planning {lengths[-1]:,} accesses, {repetitions} repetitions")
    for heading in ("", "s", "us/access", "x per doubling", ""):
        table.add_column(heading, justify="right" if heading else "left")
    results = []
    for case in CASES:
        points = [measure(program, case, length, repetitions) for length in lengths]
        grown = growth(points)
        met = grown["per_doubling"] <= SLACK * grown["n_log_n_per_doubling"]
        if TARGET_LENGTH in lengths:
            target = points[lengths.index(TARGET_LENGTH)]
            met = met and target["seconds"]["median"] < TARGET_SECONDS
        results.append(
            {"name": str(case), "case": asdict(case), "points": points, "growth": grown, "met": met}
        )
        seconds = points[-1]["seconds"]["median"]
        table.add_row(
            str(case),
            f"{seconds:.3f}",
            f"{1e6 * seconds / points[-1]['accesses']:.2f}",
            f"{grown['per_doubling']:.2f} (n log n {grown['n_log_n_per_doubling']:.2f})",
            "[green]met" if met else "[red]missed",
        )
    console.print(table)
    figures = {
        "repetitions": repetitions,
        "targets": {
            "accesses": TARGET_LENGTH,
            "seconds": TARGET_SECONDS,
            "growth_over_n_log_n": SLACK,
        },
        "results": results,
    }
    write_record(arguments, "planner", figures, machine=machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
