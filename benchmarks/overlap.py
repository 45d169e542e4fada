# Question: does a step behind a slow link take no longer than the longest of computing, copying and
#     updating, each measured by itself?
# Baseline: that maximum; beside it the step of the same run that does one thing after the other.
# Work: GPT-2 at tight(0.35), behind an emulated link of 2 GB/s each way, which parameters pass to
#     the device and gradients to the host: the 42.5M of benchmarks/step.py, where computing is the
#     work, and where copying and updating are: the same and one of 312M over 64 tokens a step.
# Compute: plain PyTorch's forward and backward alone. Link: the bytes that the step moved in the
#     busier direction, at its rate. DRAM: the bytes that norm and Adam touch in fp32 (4 and 28 a
#     parameter) at the in-place bandwidth measured here. Compute and DRAM share the cores of
#     the CPU device, so that their sum is the real floor there.
# Method: as benchmarks/step.py, in turn, ratios within each round; losses are compared, where the
#     mode clips, with plain PyTorch's, whose steps run before, by themselves. Idle OpenMP threads
#     sleep early (GOMP_SPINCOUNT): on two cores they otherwise keep Adam's threads from the core
#     that they spin on, which a GPU's would not.
"""Overlap of compute, link and update: `python benchmarks/overlap.py [--rounds R] [--quick]`."""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # read by libgomp when torch is imported

from _machine import command_line, describe_machine, spread, write_record
from _steps import (
    MAX_NORM,
    QUICK,
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
SMALL_BATCH = {"rows": 1, "sequence": 64}
CASES = {
    "42.5M, 4 x 128": Model(),
    "42.5M, 1 x 64": Model(**SMALL_BATCH),
    "312M, 1 x 64": Model(layers=24, width=1024, **SMALL_BATCH),
}
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


OF_SMALL_BATCHES = ("serial", "forward")


def bandwidth() -> float:
    """Bytes per second of updating memory in place, read and written, on all cores."""
    from castor import _C

    measured: float = _C.in_place_bandwidth(1 << 26, 9)
    return measured


def run(model: Model, modes: tuple[str, ...], rounds: int, steps: int) -> dict[str, Any]:
    """Figures of one case: of each mode, seconds and their ratios to the floors."""
    ample = Contender.start("castor, no limit, no link", make_castor, model, None)
    figures = ample.report()
    ample.stop()
    window = max(p.numel() * p.element_size() for p in model.build().parameters())
    budget = tight(figures, SHARE) + window  # of gradients on their way (docs/design/0016)
    plain = Contender.start("plain PyTorch", make_plain, model)
    plain.run(rounds * steps, timed=True)
    plain.stop()
    found = {"compute": Contender.start("forward and backward alone", make_compute, model)}
    for mode in modes:
        name, settings = MODES[mode]
        found[mode] = Contender.start(name, make_castor, model, budget, LINKED | settings)
    run_rounds(found, rounds, steps)
    reports = {mode: found[mode].report() for mode in modes}
    for contender in found.values():
        contender.stop()
    # Without clipping the steps are others.
    clipped = {mode: found[mode] for mode in modes if mode != "backward"}
    verify(clipped | {"plain": plain}, reports)
    dram = model.num_params * UPDATE_BYTES / bandwidth()
    results = {}
    for mode in modes:
        per_round = [floors(reports[mode], compute, dram) for compute in found["compute"].medians]
        pairs = list(zip(found[mode].medians, per_round, strict=True))
        results[mode] = {
            "name": found[mode].name,
            "seconds": spread([s for steps in found[mode].seconds for s in steps]),
            "floors": {key: spread([f[key] for f in per_round])["median"] for key in per_round[0]},
            "over_longest": spread([seconds / max(f.values()) for seconds, f in pairs]),
            "over_compute_and_dram": spread(
                [seconds / max(f["compute"] + f["dram"], f["link"]) for seconds, f in pairs]
            ),
            "report": reports[mode],
        }
    return {
        "title": model.title,
        "budget_bytes": budget,
        "plain_seconds": spread([s for steps in plain.seconds for s in steps]),
        "met": results["forward"]["over_longest"]["median"] <= TARGET,
        "results": results,
    }


def floors(report: dict[str, Any], compute: float, dram_seconds: float) -> dict[str, float]:
    """Seconds of a step that each resource alone needs."""
    moved = max(report["h2d_bytes"], report["d2h_bytes"]) / report["steps"]
    return {"compute": compute, "link": moved / LINK, "dram": dram_seconds}


def show(case: dict[str, Any], console: Console) -> None:
    table = Table(title=f"{case['title']}, behind {LINK / 1e9:g} GB/s")
    headings = ("", "median s", "compute s", "link s", "DRAM s", "over longest", "over c + DRAM")
    for heading in headings:
        table.add_column(heading, justify="left" if not heading else "right")
    for result in case["results"].values():
        table.add_row(
            result["name"],
            f"{result['seconds']['median']:.3f}",
            *(f"{result['floors'][key]:.3f}" for key in ("compute", "link", "dram")),
            f"{result['over_longest']['median']:.3f}",
            f"{result['over_compute_and_dram']['median']:.3f}",
        )
    console.print(table)
    verdict = "met" if case["met"] else "MISSED"
    console.print(f"overlap='forward' over the longest: at most {TARGET} {verdict}")


def main() -> int:
    parser = command_line("overlap", __doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2, help="of each contender in a round")
    arguments = parser.parse_args()
    console = Console()
    machine = describe_machine()

    rounds, steps = (1, 1) if arguments.quick else (arguments.rounds, arguments.steps)
    cases = {}
    for name, model in CASES.items():
        if arguments.quick and model != Model():
            continue
        modes = tuple(MODES) if model == Model() else OF_SMALL_BATCHES
        cases[name] = run(QUICK if arguments.quick else model, modes, rounds, steps)
        show(cases[name], console)
    record = {
        "rounds": rounds,
        "steps_per_round": steps,
        "link_bytes_per_second": LINK,
        "max_norm": MAX_NORM,
        "target": TARGET,
        "cases": cases,
    }
    write_record(arguments, "overlap", record, machine=machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
