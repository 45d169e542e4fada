# Question: what do whole chunks in spare device memory save of a step behind a link?
# Baseline: the same budget with gpu_margin_mem_ratio=0: every chunk streams, its optimizer state on
#     the host, all that fits stays from forward to backward.
# Work: the GPT-2 of benchmarks/step.py behind an emulated link of 2 GB/s each way, overlap="none".
#     Budgets: tight(1.0) and the window of gradients on their way, and beside that room for a share
#     of all payloads (16 bytes a parameter in fp32) from none to all.
# Method: for each budget the two in turn, ratios within each round, losses compared bit for bit.
"""Hybrid placement: `python benchmarks/hybrid.py [--rounds R] [--quick]`."""

from __future__ import annotations

import sys
from typing import Any

from _machine import command_line, describe_machine, spread, write_record
from _steps import QUICK, Contender, Model, make_castor, run_rounds, tight
from rich.console import Console
from rich.table import Table

LINK = "2GB/s"
SHARES = (0.0, 0.25, 0.5, 1.0)
PAYLOAD_BYTES_PER_PARAM_BYTE = 4  # parameter, gradient and two moments, all fp32


def per_step(after: dict[str, Any], before: dict[str, Any], name: str) -> float:
    """What a step added to a counter."""
    return float(after[name] - before[name]) / (after["steps"] - before["steps"])


def compare(model: Model, budget: int, rounds: int, steps: int) -> dict[str, Any]:
    """Streamed and hybrid steps in one budget."""
    found = {
        "streamed": Contender.start(
            "streamed",
            make_castor,
            model,
            budget,
            {"link_bandwidth": LINK, "gpu_margin_mem_ratio": 0.0},
        ),
        "hybrid": Contender.start("hybrid", make_castor, model, budget, {"link_bandwidth": LINK}),
    }
    before = {key: contender.report() for key, contender in found.items()}
    run_rounds(found, rounds, steps)
    after = {key: contender.report() for key, contender in found.items()}
    for contender in found.values():
        contender.stop()
    if found["streamed"].losses != found["hybrid"].losses:
        raise RuntimeError(f"losses differ in a budget of {budget} bytes")
    for key, report in after.items():
        if report["peak_device_bytes"] > budget:
            raise RuntimeError(f"{key}: peak {report['peak_device_bytes']} passed {budget} bytes")
    pairs = zip(found["hybrid"].medians, found["streamed"].medians, strict=True)
    return {
        "budget_bytes": budget,
        "resident_chunks": after["hybrid"]["resident_chunks"],
        "num_chunks": after["hybrid"]["num_chunks"],
        "resident_bytes": after["hybrid"]["resident_bytes"],
        "seconds": {
            key: spread([s for steps_ in c.seconds for s in steps_]) for key, c in found.items()
        },
        "link_bytes_per_step": {
            key: per_step(after[key], before[key], "h2d_bytes")
            + per_step(after[key], before[key], "d2h_bytes")
            for key in found
        },
        "ratio": spread([hybrid / streamed for hybrid, streamed in pairs]),
    }


def main() -> int:
    parser = command_line("hybrid", __doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2, help="of each contender in a round")
    arguments = parser.parse_args()
    console = Console()
    machine = describe_machine()

    model = QUICK if arguments.quick else Model()
    rounds, steps = (1, 1) if arguments.quick else (arguments.rounds, arguments.steps)
    ample = Contender.start("no limit, no link", make_castor, model, None)
    figures = ample.report()
    ample.stop()
    window = max(p.numel() * p.element_size() for p in model.build().parameters())
    payloads = PAYLOAD_BYTES_PER_PARAM_BYTE * figures["param_bytes"]
    results = [
        {"share": share}
        | compare(
            model,
            tight(figures, 1.0) + window + int(share * payloads),
            rounds,
            steps,
        )
        for share in (SHARES[::3] if arguments.quick else SHARES)
    ]

    table = Table(title=f"{model.title}, behind {LINK}")
    for heading in (
        "spare, of all payloads", "resident chunks", "streamed s", "hybrid s", "ratio",
        "link MB/step, streamed", "hybrid",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for result in results:
        moved = result["link_bytes_per_step"]
        table.add_row(
            f"{result['share']:.0%}",
            f"{result['resident_chunks']} of {result['num_chunks']}",
            *(f"{result['seconds'][key]['median']:.3f}" for key in ("streamed", "hybrid")),
            f"{result['ratio']['median']:.3f}",
            *(f"{moved[key] / 1e6:.0f}" for key in ("streamed", "hybrid")),
        )
    console.print(table)
    record = {
        "rounds": rounds,
        "steps_per_round": steps,
        "layers": model.layers,
        "link": LINK,
        "results": results,
    }
    write_record(arguments, "hybrid", record, machine=machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
