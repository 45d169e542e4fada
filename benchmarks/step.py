# Question: what does a training step cost in castor, with room for the whole model and inside a
#     budget it does not fit, beside plain PyTorch, and what does it cost in its peers?
# Baseline: plain PyTorch (AdamW(fused=True), clip_grad_norm_ 1.0); DeepSpeed ZeRO-3 and ZeRO-2 with
#     everything offloaded that the stage can offload and its own CPU Adam, one process; FSDP2 with
#     CPUOffloadPolicy, gloo, one process.
#     DeepSpeed has the settings that benchmarks/deepspeed_settings.py found to be its fastest.
# Model: GPT-2 of 42.5M parameters (12 layers, 512 wide, 8 heads, vocabulary 8192), batch 4 x 128,
#     fp32, the same seed and batches everywhere. tight(x) is the non-model peak of the ample run
#     and x * parameter bytes.
# Method: each contender is a process of its own that lives through the whole run and sleeps while
#     another one steps; rounds of a few steps in rotating order; ratios are taken within a round.
"""One training step, castor against its peers: `python benchmarks/step.py [--rounds R]`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from _machine import RESULTS, command_line, describe_machine, paired, spread, write_record
from _steps import (
    QUICK,
    Contender,
    Model,
    make_castor,
    make_deepspeed,
    make_fsdp2,
    make_plain,
    run_rounds,
    tight,
    verify,
)
from rich.console import Console
from rich.table import Table

TIGHT_SHARE = 0.35
MEMORY = ("peak_resident_bytes", "anonymous_bytes", "huge_page_bytes")  # of the process


def fastest_settings(stage: int) -> dict[str, Any]:
    """Of DeepSpeed's ZeRO, as recorded; its defaults where nothing is."""
    path = RESULTS / "deepspeed_settings.json"
    if not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))["results"][f"zero{stage}"]["best"]
    return found


PEERS: dict[str, tuple[str, Callable[..., Any], tuple[Any, ...]]] = {
    "zero3": ("DeepSpeed ZeRO-3, CPU offload", make_deepspeed, (3, fastest_settings(3))),
    "zero2": ("DeepSpeed ZeRO-2, CPU offload", make_deepspeed, (2, fastest_settings(2))),
    "fsdp2": ("FSDP2, CPUOffloadPolicy", make_fsdp2, ()),
}
BARS = {  # ratio, largest or smallest value that meets the target
    "castor ample / plain": ("<=", 1.05),
    "castor tight / plain": ("<=", 1.10),
    "zero3 / castor tight": (">=", 1.6),
    "zero2 / castor tight": (">=", 1.3),
    "fsdp2 / castor tight": ("", None),  # no target: FSDP2 moves nothing at world size 1
}


def start_contenders(model: Model, console: Console, leave_out: list[str]) -> dict[str, Contender]:
    found = {"plain": Contender.start("plain PyTorch", make_plain, model)}
    ample = Contender.start("castor, ample budget", make_castor, model, None)
    found["castor ample"] = ample
    budget = tight(ample.report(), TIGHT_SHARE)
    name = f"castor, tight({TIGHT_SHARE}) = {budget / 2**20:.0f} MiB"
    found["castor tight"] = Contender.start(name, make_castor, model, budget)
    for key, (peer, make, arguments) in PEERS.items():
        missing = make is make_deepspeed and find_spec("deepspeed") is None
        if key in leave_out or missing:
            why = "deepspeed is not installed" if missing else "left out"
            console.print(f"[yellow]SKIPPED: {peer}: {why}")
            continue
        if make is make_deepspeed:
            console.print(f"{peer}: the first run on a machine builds its CPU Adam, 3 minutes")
        found[key] = Contender.start(peer, make, model, *arguments)
    return found


def compare(found: dict[str, Contender]) -> dict[str, dict[str, Any]]:
    result = {}
    for name, (relation, bar) in BARS.items():
        numerator, denominator = name.split(" / ")
        if numerator not in found or denominator not in found:
            continue
        ratio: dict[str, Any] = paired(found[numerator].medians, found[denominator].medians)
        if bar is not None:
            met = ratio["median"] <= bar if relation == "<=" else ratio["median"] >= bar
            ratio |= {"bar": f"{relation} {bar}", "met": met}
        result[name] = ratio
    return result


def main() -> int:
    parser = command_line("step", __doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3, help="of each contender in a round")
    parser.add_argument("--leave-out", action="append", default=[], choices=PEERS, metavar="PEER")
    arguments = parser.parse_args()
    console = Console()
    model = QUICK if arguments.quick else Model()
    rounds, steps = (1, 1) if arguments.quick else (arguments.rounds, arguments.steps)

    machine = describe_machine()
    found = start_contenders(model, console, arguments.leave_out)
    run_rounds(found, rounds, steps)
    reports = {key: contender.report() for key, contender in found.items()}
    differences = verify(found, reports)
    compared = compare(found)
    for contender in found.values():
        contender.stop()

    table = Table(title=f"{model.title}, fp32: {rounds} x {steps} steps")
    headings = (
        "",
        "median s",
        "quartiles",
        "tokens/s",
        "resident MiB",
        "device MiB",
        "loss vs plain",
    )
    for heading in headings:
        table.add_column(heading, justify="left" if not heading else "right")
    results = {}
    for key, contender in found.items():
        seconds = spread([s for steps in contender.seconds for s in steps])
        results[key] = {
            "name": contender.name,
            "seconds": seconds,
            "round_medians": contender.medians,
            "tokens_per_second": model.tokens / seconds["median"],
            **{name: reports[key][name] for name in MEMORY},
            "peak_device_bytes": reports[key].get("peak_device_bytes"),
            "largest_relative_loss_difference": differences[key],
        }
        device = results[key]["peak_device_bytes"]
        table.add_row(
            contender.name,
            f"{seconds['median']:.3f}",
            f"{seconds['lower_quartile']:.3f} - {seconds['upper_quartile']:.3f}",
            f"{results[key]['tokens_per_second']:.0f}",
            f"{results[key]['peak_resident_bytes'] / 2**20:.0f}",
            "" if device is None else f"{device / 2**20:.0f}",
            f"{differences[key]:.1e}",
        )
    console.print(table)
    summary = Table(title="paired within each round")
    for heading in ("", "median", "quartiles", "target", ""):
        summary.add_column(heading)
    for name, ratio in compared.items():
        quartiles = f"{ratio['lower_quartile']:.3f} - {ratio['upper_quartile']:.3f}"
        verdict = ("[green]met" if ratio["met"] else "[red]missed") if "met" in ratio else ""
        summary.add_row(name, f"{ratio['median']:.3f}", quartiles, ratio.get("bar", ""), verdict)
    console.print(summary)

    figures = {
        "rounds": rounds,
        "steps_per_round": steps,
        "deepspeed_settings": {key: PEERS[key][2][1] for key in ("zero3", "zero2")},
        "results": results,
        "reports": {key: reports[key] for key in ("castor ample", "castor tight")},
        "ratios": compared,
    }
    write_record(arguments, "step", figures, machine=machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
