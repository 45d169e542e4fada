# Question: with which settings does DeepSpeed run fastest here? step.py runs it with them.
# Baseline: DeepSpeed's defaults, ZeRO-2 and ZeRO-3 with everything offloaded that the stage can.
# Work: step.py's, the 42.5M GPT-2 at 4 x 128 tokens; losses compared with plain PyTorch's.
# Method: one setting is changed at a time, in a process beside that of the defaults; both step in
#     turn, ratios are taken within a round. Then all together that took at most WORTH of its time.
"""DeepSpeed's settings, one by one: `python benchmarks/deepspeed_settings.py [--rounds R]`."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

from _machine import command_line, describe_machine, paired, write_record
from _steps import (
    QUICK,
    Contender,
    Model,
    make_deepspeed,
    make_plain,
    run_rounds,
    verify,
)
from rich.console import Console
from rich.table import Table

WORTH = 0.98
BOTH: dict[str, Any] = {
    "overlap_comm": True,
    "contiguous_gradients": False,
    "reduce_bucket_size": 50_000_000,
    "allgather_bucket_size": 50_000_000,
}
SETTINGS: dict[int, dict[str, Any]] = {
    2: BOTH | {"round_robin_gradients": True},
    3: BOTH
    | {
        "sub_group_size": 8_000_000,
        "stage3_prefetch_bucket_size": 5_000_000,
        "stage3_max_live_parameters": 50_000_000,
        "stage3_max_reuse_distance": 50_000_000,
        "stage3_param_persistence_threshold": 0,
    },
}
"""Of "zero_optimization", with another value than DeepSpeed's default."""


def compare(
    model: Model,
    stage: int,
    settings: dict[str, Any],
    others: dict[str, Contender],
    rounds: int,
    steps: int,
) -> dict[str, Any]:
    """Steps with these settings over steps with the defaults."""
    name = f"ZeRO-{stage}, {settings}"
    changed = Contender.start(name, make_deepspeed, model, stage, settings)
    default = others["default"]
    seen = len(default.seconds)
    run_rounds({"default": default, "changed": changed}, rounds, steps)
    verify({"plain": others["plain"], "changed": changed}, {})
    changed.stop()
    return {"settings": settings, "ratio": paired(changed.medians, default.medians[seen:])}


def sweep(model: Model, stage: int, rounds: int, steps: int, quick: bool) -> dict[str, Any]:
    """Each setting by itself, and all together that are worth it."""
    plain = Contender.start("plain PyTorch", make_plain, model)
    plain.run(rounds * steps, timed=False)
    plain.stop()
    default = Contender.start(f"ZeRO-{stage}", make_deepspeed, model, stage)
    others = {"plain": plain, "default": default}
    chosen = list(SETTINGS[stage].items())[: 1 if quick else None]
    found = [compare(model, stage, {name: value}, others, rounds, steps) for name, value in chosen]
    best: dict[str, Any] = {}
    for one in found:
        if one["ratio"]["median"] <= WORTH:
            best |= one["settings"]
    if len(best) > 1:
        found.append(compare(model, stage, best, others, rounds, steps))
    default.stop()
    # What is worth it alone may not be together.
    fastest = min(found, key=lambda one: one["ratio"]["median"])
    return {"tried": found, "best": fastest["settings"] if best else {}}


def main() -> int:
    parser = command_line("deepspeed_settings", __doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=2, help="of each contender in a round")
    arguments = parser.parse_args()
    console = Console()
    if find_spec("deepspeed") is None:
        console.print("[yellow]SKIPPED: DeepSpeed: deepspeed is not installed")
        return 0
    machine = describe_machine()
    rounds, steps = (1, 1) if arguments.quick else (arguments.rounds, arguments.steps)
    model = QUICK if arguments.quick else Model()
    results = {}
    for stage in SETTINGS:
        swept = sweep(model, stage, rounds, steps, arguments.quick)
        results[f"zero{stage}"] = swept
        table = Table("settings", "over the defaults", "quartiles", title=f"ZeRO-{stage}")
        for one in swept["tried"]:
            ratio = one["ratio"]
            quartiles = f"{ratio['lower_quartile']:.3f} - {ratio['upper_quartile']:.3f}"
            table.add_row(str(one["settings"]), f"{ratio['median']:.3f}", quartiles)
        console.print(table)
        console.print(f"ZeRO-{stage}, best: {swept['best'] or 'the defaults'}")
    figures = {"rounds": rounds, "steps_per_round": steps, "worth": WORTH, "results": results}
    write_record(arguments, "deepspeed_settings", figures, machine=machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
