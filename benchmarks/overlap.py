# Question: does a step behind a slow link take no longer than the longest of computing, copying and
#     updating, each measured by itself?
# Baseline: that maximum; beside it the step of the same run that does one thing after the other.
# Work: the 42.5M GPT-2 of benchmarks/step.py at tight(0.35), behind an emulated link of 2 GB/s each
#     way, which parameters pass to the device and gradients pass home.
# Compute: plain PyTorch's forward and backward alone. Link: the bytes that the step moved in the
#     busier direction, at its rate. DRAM: the bytes that norm and Adam touch in fp32 (4 and 28 a
#     parameter) at the in-place bandwidth measured here. Compute and DRAM share the cores of
#     the CPU device, so that their sum is the real floor there.
# Method: as benchmarks/step.py, in turn, ratios within each round, losses compared where the mode
#     clips as plain PyTorch does. Idle OpenMP threads sleep early (GOMP_SPINCOUNT): on two cores
#     they otherwise keep Adam's threads from the core that they spin on, which a GPU's would not.
"""Overlap of compute, link and update: `python benchmarks/overlap.py [--rounds R] [--quick]`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # read by libgomp when torch is imported

from _machine import RESULTS, describe_machine, spread, write_record
from _steps import (
    MAX_NORM,
    Contender,
    Model,
    make_castor,
    make_compute,
    make_plain,
    run_rounds,
    tight,
    verify,
)
from rich.console import Console
from rich.table import Table

LINK = 2e9
SHARE = 0.35
UPDATE_BYTES = 4 + 28
TARGET = 1.10
LINKED = {"link_bandwidth": "2GB/s"}
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "serial": ("castor, one after the other", {"max_prefetch": 0, "overlap": "none"}),
    "none": ("castor, prefetch", {"overlap": "none"}),
    "forward": ("castor, overlap='forward'", {"overlap": "forward"}),
    "backward": (
        "castor, overlap='backward', no clipping",
        {
            "overlap": "backward",
            "max_norm": 0.0,
            "nonfinite": "ignore",
            "enable_gradient_accumulation": False,
        },
    ),
}


def bandwidth() -> float:
    """Bytes per second of updating memory in place, read and written, on all cores."""
    from castor import _C

    measured: float = _C.in_place_bandwidth(1 << 26, 9)
    return measured


def run(model: Model, rounds: int, steps: int) -> dict[str, Any]:
    ample = Contender.start("castor, no limit, no link", make_castor, model, None)
    figures = ample.report()
    ample.stop()
    window = max(p.numel() * p.element_size() for p in model.build().parameters())
    budget = tight(figures, SHARE) + window  # of gradients on their way (docs/design/0016)
    found = {
        "plain": Contender.start("plain PyTorch", make_plain, model),
        "compute": Contender.start("forward and backward alone", make_compute, model),
    }
    for mode, (name, settings) in MODES.items():
        found[mode] = Contender.start(name, make_castor, model, budget, LINKED | settings)
    run_rounds(found, rounds, steps)
    reports = {mode: found[mode].report() for mode in MODES}
    for contender in found.values():
        contender.stop()
    # Without clipping the steps are others, and nothing was updated in "compute".
    verify({key: c for key, c in found.items() if key not in ("backward", "compute")}, reports)
    return {"budget_bytes": budget, "found": found, "reports": reports}


def floors(report: dict[str, Any], compute: float, dram_seconds: float) -> dict[str, float]:
    """Seconds of a step that each resource alone needs."""
    moved = max(report["h2d_bytes"], report["d2h_bytes"]) / report["steps"]
    return {"compute": compute, "link": moved / LINK, "dram": dram_seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2, help="of each contender in a round")
    parser.add_argument("--quick", action="store_true", help="a small model, to try the script")
    parser.add_argument("--output", type=Path, default=RESULTS / "overlap.json")
    arguments = parser.parse_args()
    console = Console()
    machine = describe_machine()

    model = Model(layers=4) if arguments.quick else Model()
    done = run(model, arguments.rounds, arguments.steps)
    found: dict[str, Contender] = done["found"]
    num_params = done["reports"]["none"]["param_bytes"] // 4
    dram = num_params * UPDATE_BYTES / bandwidth()

    results = {}
    for mode in MODES:
        per_round = [
            floors(done["reports"][mode], compute, dram) for compute in found["compute"].medians
        ]
        pairs = list(zip(found[mode].medians, per_round, strict=True))
        results[mode] = {
            "name": found[mode].name,
            "seconds": spread([s for steps in found[mode].seconds for s in steps]),
            "floors": {key: spread([f[key] for f in per_round])["median"] for key in per_round[0]},
            "over_longest": spread([seconds / max(f.values()) for seconds, f in pairs]),
            "over_compute_and_dram": spread(
                [seconds / max(f["compute"] + f["dram"], f["link"]) for seconds, f in pairs]
            ),
            "report": done["reports"][mode],
        }
    met = results["forward"]["over_longest"]["median"] <= TARGET

    table = Table(title=f"GPT-2 {num_params / 1e6:.1f}M behind {LINK / 1e9:g} GB/s")
    headings = ("", "median s", "compute s", "link s", "DRAM s", "over longest", "over c + DRAM")
    for heading in headings:
        table.add_column(heading, justify="left" if not heading else "right")
    for result in results.values():
        table.add_row(
            result["name"],
            f"{result['seconds']['median']:.3f}",
            *(f"{result['floors'][key]:.3f}" for key in ("compute", "link", "dram")),
            f"{result['over_longest']['median']:.3f}",
            f"{result['over_compute_and_dram']['median']:.3f}",
        )
    console.print(table)
    console.print(
        f"overlap='forward' over the longest: at most {TARGET} {'met' if met else 'MISSED'}"
    )
    record = {
        "rounds": arguments.rounds,
        "steps_per_round": arguments.steps,
        "layers": model.layers,
        "budget_bytes": done["budget_bytes"],
        "link_bytes_per_second": LINK,
        "max_norm": MAX_NORM,
        "plain_seconds": spread([s for steps in found["plain"].seconds for s in steps]),
        "target": TARGET,
        "met": met,
        "results": results,
    }
    write_record(arguments.output, "overlap", record, machine=machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
