# Question: is this build of castor slower than another one, of an earlier commit say?
# Baseline: the other build, `pip install --no-deps --no-build-isolation --target SITE .` in its
#     tree.
# Model: step.py's GPT-2 with room for everything and at tight(0.35), and hooks.py's chain of 10,000
#     modules, forward and backward. A process for each build and model, in turn.
# Ratios are of this build over the other within each round.
"""This build of castor against another: `python benchmarks/builds.py --other SITE`."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _machine import command_line, describe_machine, paired, write_record
from _steps import QUICK, Contender, Model, Report, Step, make_castor, run_rounds, tight
from rich.console import Console
from rich.table import Table

TIGHT_SHARE = 0.35
MODULES, QUICK_MODULES = 10_000, 100
BAR = 1.03


def from_site(
    site: str | None, make: Callable[..., tuple[Step, Report]], *arguments: Any
) -> tuple[Step, Report]:
    """What `make` makes, in a process that takes castor from `site`."""
    if site is not None:
        sys.path.insert(0, site)
    import castor

    if site is not None and Path(site).resolve() not in Path(castor.__file__).resolve().parents:
        raise RuntimeError(f"castor came from {castor.__file__}, not from {site}")
    return make(*arguments)


def make_chain(modules: int) -> tuple[Step, Report]:
    """hooks.py's chain; its report has "seconds" of forward and backward, by CPU time."""
    import torch
    from hooks import WIDTH
    from hooks import Contender as Chain

    chain = Chain(modules, boosted=True)
    x = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(1))

    def step(_: int) -> float:
        chain.run(x, time.process_time, timed=True)
        return chain.losses[-1]

    def report() -> dict[str, Any]:
        return {"seconds": [a + b for a, b in zip(chain.forward, chain.backward, strict=True)]}

    return step, report


def main() -> int:
    parser = command_line("builds", __doc__)
    parser.add_argument("--other", type=Path, required=True, help="where the other is installed")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3, help="of each contender in a round")
    arguments = parser.parse_args()
    if not (arguments.other / "castor").is_dir():
        parser.error(f"{arguments.other} holds no castor: pip install --target puts it there")
    machine = describe_machine()
    model = QUICK if arguments.quick else Model()
    modules = QUICK_MODULES if arguments.quick else MODULES
    rounds, steps = (1, 1) if arguments.quick else (arguments.rounds, arguments.steps)
    sites = {"this": None, "other": str(arguments.other.resolve())}

    found = {}
    for build, site in sites.items():
        name = f"{build} build, room for everything"
        found[build, "ample"] = Contender.start(name, from_site, site, make_castor, model, None)
    budget = tight(found["this", "ample"].report(), TIGHT_SHARE)
    for build, site in sites.items():
        name = f"{build} build, tight({TIGHT_SHARE})"
        found[build, "tight"] = Contender.start(name, from_site, site, make_castor, model, budget)
        found[build, "hooks"] = Contender.start(
            f"{build} build, {modules} modules", from_site, site, make_chain, modules
        )
    run_rounds(found, rounds, steps)

    table = Table(title=f"{rounds} rounds of {steps} steps")
    for heading in ("", "this s", "other s", "this / other", "quartiles", f"at most {BAR}"):
        table.add_column(heading, justify="left" if not heading else "right")
    results = {}
    for what in ("ample", "tight", "hooks"):
        this, other = (_medians(found[build, what], rounds, steps) for build in sites)
        ratio = paired(this, other)
        results[what] = {"this": this, "other": other, "ratio": ratio}
        table.add_row(
            found["this", what].name.partition(", ")[2],
            f"{statistics.median(this):.3f}",
            f"{statistics.median(other):.3f}",
            f"{ratio['median']:.3f}",
            f"{ratio['lower_quartile']:.3f} - {ratio['upper_quartile']:.3f}",
            "met" if ratio["median"] <= BAR else "[red]missed",
        )
    for contender in found.values():
        contender.stop()
    Console().print(table)
    write_record(arguments, "builds", results, machine=machine)
    return 0


def _medians(contender: Contender, rounds: int, steps: int) -> list[float]:
    """Of each round, in seconds of a step, or of the chain's forward and backward."""
    own = contender.report().get("seconds")
    if own is None:
        return contender.medians
    timed = own[-rounds * steps :]
    return [statistics.median(timed[i : i + steps]) for i in range(0, len(timed), steps)]


if __name__ == "__main__":
    sys.exit(main())
