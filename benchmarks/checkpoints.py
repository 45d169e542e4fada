# Question: how long does a save keep training waiting, at once and with use_async=True?
# Baseline: the step of the same run while nothing is saved, and the save at once.
# Work: booster.save of the 42.5M GPT-2 of benchmarks/step.py with its AdamW states, 510 MB in fp32,
#     room for all of it in memory, overlap="none": the update waits in the step that follows.
# Method: in each round, in turn: a save at once; eight times a step, a save beside the training,
#     the step behind its call, and a wait; a save beside the training and the steps that follow
#     until it is on the disk. Between two of these is a step. The stall is the call and what the
#     step behind it takes beyond the one before; of all steps until the save is over, what they
#     take beyond as many of those before. The first save, which also pays for the memory of the
#     copies, is told alone: later ones find it again. What was written at one moment both ways is
#     compared byte by byte, after the timing. The processor seconds of a save at once are what
#     one beside the training takes in all, spread over steps. Then the same of two ranks with a
#     thread each, which write one checkpoint together: in each round a step that waits for the
#     save before, two without one, of whose median it is told, one behind the call, one more. And
#     of steps over eight times as many tokens: what a save takes depends on bytes alone.
# Met: the call and what the next step takes beyond a step come to less than 5% of a step.
"""Stalls of saves: `python benchmarks/checkpoints.py [--rounds R] [--quick] [--directory D]`."""

from __future__ import annotations

import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from _machine import command_line, describe_machine, paired, spread, write_record
from _steps import LR, QUICK, WARMUP_STEPS, Model, Report, Step
from rich.console import Console
from rich.table import Table

TARGET = 0.05
STEPS_OF_A_ROUND, SAVING = 5, 3
"""Of ranks, and which of them begins with a save."""
LONGER = 8
"""Times the tokens of a step."""


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Run:
    """A boosted model and its step."""

    def __init__(self, model: Model, overlap: str) -> None:
        import torch

        from castor import Booster, GeminiPlugin

        self.shape, self.model = model, model.build()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR)
        plugin = GeminiPlugin(
            device="cpu", device_memory="4GiB", precision="fp32", max_norm=1.0, overlap=overlap
        )
        self.booster = Booster(plugin=plugin)
        self.booster.boost(self.model, self.optimizer)
        self._batches = 0

    def step(self) -> float:
        """One training step; its loss."""
        loss = self.model(**self.shape.batch(self._batches)).loss
        self._batches += 1
        self.booster.backward(loss, self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def save(self, directory: Path, *, use_async: bool) -> Path:
        """Writes the run as it is."""
        parts = self.model, self.optimizer
        return self.booster.save(directory, *parts, keep=1, use_async=use_async)


def make_rank(rank: int, model: Model, directory: str) -> tuple[Step, Report]:
    """Steps of which one in STEPS_OF_A_ROUND begins with a save beside the training."""
    run = Run(model, "none")

    def step(i: int) -> float:
        turn = i % STEPS_OF_A_ROUND
        if turn == 0:
            run.booster.wait_for_saves()
        elif turn == SAVING:
            run.save(Path(directory), use_async=True)
        return run.step()

    return step, dict


def measure_ranks(model: Model, directory: Path, num_rounds: int) -> dict[str, Any]:
    """Of two ranks: seconds of steps, and what a save beside them adds."""
    from _ranks import Ranks  # of each of whose processes the threads are one

    ranks = Ranks.start("two ranks", 2, make_rank, model, str(directory))
    ranks.run(STEPS_OF_A_ROUND - WARMUP_STEPS, timed=False)
    for _ in range(num_rounds):
        ranks.run(STEPS_OF_A_ROUND, timed=True)
    ranks.stop()
    steps = [statistics.median(of[1:SAVING]) for of in ranks.seconds]
    stalls = [of[SAVING] - step for of, step in zip(ranks.seconds, steps, strict=True)]
    return {
        "step_seconds": spread(steps),
        "stall_of_next_step": {"seconds": spread(stalls), "steps": paired(stalls, steps)},
    }


def under_way(path: Path) -> bool:
    """Whether a save is not over: its directory appears at its end."""
    return not path.exists()


def measure_save(run: Run, directory: Path) -> dict[str, float]:
    """One save beside the training, which is waited for behind the next step."""
    step = seconds(run.step)
    call = seconds(lambda: run.save(directory, use_async=True))
    next_step = seconds(run.step)
    run.booster.wait_for_saves()
    run.step()
    return {
        "step": step,
        "call": call,
        "next_step": next_step,
        "stall_of_next_step": call + next_step - step,
    }


def measure_round(run: Run, directory: Path, num_saves: int) -> dict[str, Any]:
    used = time.process_time()
    at_once = seconds(lambda: run.save(directory, use_async=False))
    used = time.process_time() - used
    run.step()
    saves = [measure_save(run, directory) for _ in range(num_saves)]
    step = spread([one["step"] for one in saves])["median"]
    paths: list[Path] = []
    start = time.perf_counter()
    paths.append(run.save(directory, use_async=True))
    steps_beside = 0
    while under_way(paths[0]):
        run.step()
        steps_beside += 1
    beside = time.perf_counter() - start
    run.booster.wait_for_saves()
    run.step()
    return {
        "step": step,
        "save_at_once": at_once,
        "processor_at_once": used,
        "saves": saves,
        "steps_beside": steps_beside,
        "beside": beside,
        "stall_of_all": beside - steps_beside * step,
    }


def spread_of(kind: str, saves: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One figure of saves or rounds: in seconds, and in steps of the same one."""
    values = [one[kind] for one in saves]
    return {"seconds": spread(values), "steps": paired(values, [one["step"] for one in saves])}


def measure_longer(run: Run, directory: Path, num_saves: int) -> dict[str, Any]:
    """Of steps with LONGER times the tokens: seconds, and what a save beside them adds."""
    run.shape = dataclasses.replace(run.shape, sequence=LONGER * run.shape.sequence)
    for _ in range(WARMUP_STEPS):
        run.step()
    saves = [measure_save(run, directory) for _ in range(num_saves)]
    return {
        "tokens": run.shape.tokens,
        "step_seconds": spread([one["step"] for one in saves]),
        "stall_of_next_step": spread_of("stall_of_next_step", saves),
    }


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def verify(run: Run, directory: Path) -> None:
    """Both ways write the same bytes of one moment, whatever comes next."""
    run.save(directory / "at once", use_async=False)
    run.save(directory / "beside", use_async=True)
    run.step()
    run.booster.wait_for_saves()
    if contents(directory / "at once") != contents(directory / "beside"):
        raise SystemExit("a save beside the training differs from one at once")


def main() -> int:
    parser = command_line("checkpoints", __doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--saves", type=int, default=8, help="beside the training, in a round")
    parser.add_argument("--overlap", default="none", choices=("none", "forward"))
    parser.add_argument("--directory", type=Path, help="of the disk; by default a temporary one")
    arguments = parser.parse_args()
    machine = describe_machine()

    run = Run(QUICK if arguments.quick else Model(), arguments.overlap)
    num_rounds, num_saves = (1, 1) if arguments.quick else (arguments.rounds, arguments.saves)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        directory = Path(name)
        for _ in range(WARMUP_STEPS):
            run.step()
        first = measure_save(run, directory / "run")
        rounds = [measure_round(run, directory / "run", num_saves) for _ in range(num_rounds)]
        verify(run, directory)
        of_ranks = measure_ranks(run.shape, directory / "of two", 2 * num_rounds)
        longer = measure_longer(run, directory / "longer", num_rounds)
    saves = [save for one in rounds for save in one["saves"]]
    steps = [save["step"] for save in saves]
    figures = {
        "first_save": spread_of("stall_of_next_step", [first]),
        **{kind: spread_of(kind, rounds) for kind in ("save_at_once", "processor_at_once")},
        **{kind: spread_of(kind, saves) for kind in ("call", "next_step", "stall_of_next_step")},
        "stall_of_all": spread_of("stall_of_all", rounds),
    }
    met = figures["stall_of_next_step"]["steps"]["median"] < TARGET

    num_params = sum(p.numel() for p in run.model.parameters())
    table = Table(
        title=f"Saves of GPT-2 {num_params / 1e6:.1f}M, a step of {spread(steps)['median']:.3f} s"
    )
    for heading in ("", "median s", "of a step"):
        table.add_column(heading, justify="left" if not heading else "right")
    for kind, figure in figures.items():
        ratio = figure["steps"]["median"]
        table.add_row(
            kind.replace("_", " "), f"{figure['seconds']['median']:.3f}", f"{100 * ratio:.1f}%"
        )
    console = Console()
    console.print(table)
    console.print(
        f"call and next step over a step: less than {TARGET:.0%} {'met' if met else 'MISSED'}"
    )
    others = {"two ranks": of_ranks, f"steps of {longer['tokens']} tokens": longer}
    for name, figures_of in others.items():
        stall = figures_of["stall_of_next_step"]["steps"]["median"]
        console.print(f"of {name}: {stall:.1%} {'met' if stall < TARGET else 'MISSED'}")
    record = {
        "first_save": first,
        "rounds": rounds,
        "layers": run.shape.layers,
        "num_params": num_params,
        "overlap": arguments.overlap,
        "step_seconds": spread(steps),
        "target": TARGET,
        "met": met,
        "results": figures,
        "two_ranks": of_ranks,
        "longer_steps": longer,
    }
    write_record(arguments, "checkpoints", record, machine=machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
