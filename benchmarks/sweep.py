# Question: what does a step cost as the budget shrinks, and how do time and memory grow with the
#     model while the budget stays?
# Baseline: plain PyTorch of the same model, in turn, losses compared.
# Budgets: the 42.5M GPT-2 of benchmarks/step.py at tight(0.2) to tight(1.0) and without a limit;
#     tight(x) is the non-model peak of the run without a limit and x * parameter bytes.
# Sizes: the same GPT-2 with 4 to 32 layers (17M to 105M parameters), with gradient checkpointing
#     for small activations, all in the budget that is tight(0.2) for the largest.
# Method: as benchmarks/step.py; the sizes one after another.
"""Steps over budgets and model sizes: `python benchmarks/sweep.py [--rounds R] [--quick]`."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import Any

from _machine import command_line, describe_machine, paired, spread, write_record
from _steps import QUICK, Contender, Model, make_castor, make_plain, run_rounds, tight, verify
from rich.console import Console
from rich.table import Table

SHARES, SMALLEST_SHARE = (0.2, 0.35, 0.5, 0.75, 1.0), 0.2
LAYERS, QUICK_LAYERS = (4, 8, 16, 32), (1, 2)
STATE_BYTES = 16  # of a parameter in fp32: itself, gradient, exp_avg, exp_avg_sq


def finish(found: dict[str, Contender], rounds: int, steps: int) -> dict[str, dict[str, Any]]:
    """Runs the contenders, verifies them and ends them: of each, seconds, ratio and memory."""
    run_rounds(found, rounds, steps)
    reports = {key: contender.report() for key, contender in found.items()}
    differences = verify(found, reports)
    results = {}
    for key, contender in found.items():
        contender.stop()
        results[key] = {
            "name": contender.name,
            "seconds": spread([s for steps in contender.seconds for s in steps]),
            "over_plain": paired(contender.medians, found["plain"].medians),
            "largest_relative_loss_difference": differences[key],
            "report": reports[key],
        }
    return results


def over_budgets(
    model: Model, shares: tuple[float, ...], rounds: int, steps: int
) -> dict[str, Any]:
    """Runs castor at each share and without a limit, and plain PyTorch."""
    found = {"plain": Contender.start("plain PyTorch", make_plain, model)}
    ample = Contender.start("castor, no limit", make_castor, model, None)
    figures = ample.report()
    for share in shares:
        budget = tight(figures, share)
        name = f"castor, tight({share}) = {budget / 2**20:.0f} MiB"
        found[str(share)] = Contender.start(name, make_castor, model, budget)
    found["ample"] = ample
    return finish(found, rounds, steps)


def over_sizes(models: list[Model], rounds: int, console: Console) -> dict[str, Any]:
    """Runs castor and plain PyTorch of each model, the largest last, castor in the same budget."""
    largest = Contender.start("castor, no limit", make_castor, models[-1], None)
    budget = tight(largest.report(), SMALLEST_SHARE)
    largest.stop()
    sizes = []
    for model in models:
        console.print(f"{model.layers} layers in {budget / 2**20:.0f} MiB")
        found = {
            "plain": Contender.start("plain PyTorch", make_plain, model),
            "castor": Contender.start("castor", make_castor, model, budget),
        }
        results = finish(found, rounds, 1)
        report = results["castor"]["report"]
        sizes.append(
            {
                "layers": model.layers,
                "num_params": report["param_bytes"] // 4,
                # What the plain run holds at once where castor has its two tiers.
                "plain_bytes": STATE_BYTES * report["param_bytes"] // 4
                + report["peak_nonmodel_bytes"],
                "results": results,
            }
        )
    return {"budget_bytes": budget, "sizes": sizes, "exponent": exponents(sizes)}


def exponents(sizes: list[dict[str, Any]]) -> dict[str, float]:
    """Power of the number of parameters by which a figure grows from the first size to the last."""
    first, last = sizes[0], sizes[-1]
    growth = math.log(last["num_params"] / first["num_params"])

    def power(of_first: float, of_last: float) -> float:
        return math.log(of_last / of_first) / growth

    def of(key: str, *path: str) -> float:
        ends: list[Any] = [first["results"][key], last["results"][key]]
        for part in path:
            ends = [end[part] for end in ends]
        return power(*ends)

    return {
        "castor_seconds": of("castor", "seconds", "median"),
        "plain_seconds": of("plain", "seconds", "median"),
        "castor_device_bytes": of("castor", "report", "peak_device_bytes"),
        "castor_host_bytes": of("castor", "report", "host_bytes"),
        "plain_bytes": power(first["plain_bytes"], last["plain_bytes"]),
    }


def budget_table(results: dict[str, Any], layers: int) -> Table:
    table = Table(title=f"GPT-2 of {layers} layers by device budget")
    for heading in (
        "",
        "median s",
        "over plain",
        "peak MiB",
        "demand fetches/step",
        "h2d MiB/step",
    ):
        table.add_column(heading, justify="left" if not heading else "right")
    for result in results.values():
        report = result["report"]
        row = [f"{result['seconds']['median']:.3f}", f"{result['over_plain']['median']:.3f}"]
        if "steps" in report:
            row += [
                f"{report['peak_device_bytes'] / 2**20:.0f}",
                f"{report['demand_fetches'] / report['steps']:.1f}",
                f"{report['h2d_bytes'] / report['steps'] / 2**20:.0f}",
            ]
        table.add_row(result["name"], *row)
    return table


def size_table(sized: dict[str, Any]) -> Table:
    table = Table(title=f"by model size, budget {sized['budget_bytes'] / 2**20:.0f} MiB")
    headings = ("parameters", "castor s", "plain s", "ratio", "device MiB", "host MiB", "plain MiB")
    for heading in headings:
        table.add_column(heading, justify="right")
    for size in sized["sizes"]:
        castor, plain = size["results"]["castor"], size["results"]["plain"]
        table.add_row(
            f"{size['num_params'] / 1e6:.1f} M",
            f"{castor['seconds']['median']:.3f}",
            f"{plain['seconds']['median']:.3f}",
            f"{castor['over_plain']['median']:.3f}",
            f"{castor['report']['peak_device_bytes'] / 2**20:.0f}",
            f"{castor['report']['host_bytes'] / 2**20:.0f}",
            f"{size['plain_bytes'] / 2**20:.0f}",
        )
    return table


def main() -> int:
    parser = command_line("sweep", __doc__)
    parser.add_argument("--rounds", type=int, default=2, help="of budgets and of sizes")
    parser.add_argument("--steps", type=int, default=2, help="of each budget in a round")
    arguments = parser.parse_args()
    console = Console()
    machine = describe_machine()

    model = QUICK if arguments.quick else Model()
    rounds, steps = (1, 1) if arguments.quick else (arguments.rounds, arguments.steps)
    shares = SHARES[1:2] if arguments.quick else SHARES
    budgets = over_budgets(model, shares, rounds, steps)
    console.print(budget_table(budgets, model.layers))
    layers = QUICK_LAYERS if arguments.quick else LAYERS
    models = [replace(model, layers=count, checkpointing=True) for count in layers]
    sizes = over_sizes(models, rounds, console)
    console.print(size_table(sizes))
    for name, power in sizes["exponent"].items():
        console.print(f"{name} grows as parameters ** {power:.2f}")

    figures = {
        "rounds": rounds,
        "steps_per_round": steps,
        "layers": model.layers,
        "budgets": budgets,
        "sizes": sizes,
    }
    write_record(arguments, "sweep", figures, machine=machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
