"""Contenders of several ranks: a process for each, which sleeps while others step, and results."""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from _machine import paired, spread
from _memory import huge_page_bytes, proportional_bytes
from _steps import (
    COMPARED_STEPS,
    TOLERANCE,
    WARMUP_STEPS,
    Report,
    Step,
    processes,
    run_rounds,
    worst_difference,
)
from rich.console import Console
from rich.table import Table

os.environ["OMP_NUM_THREADS"] = "1"  # of each rank; read when torch is imported


def work(make: Callable[..., tuple[Step, Report]], arguments: tuple[Any, ...], rank: int,
         environment: dict[str, str], pipe: Connection) -> None:  # fmt: skip
    """A rank: answers each (first step, count) with [(seconds, CPU seconds, loss), ...]."""
    os.environ.update(environment)
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    step, report = make(rank, *arguments)
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        if order == "report":
            memory = {
                "proportional_bytes": proportional_bytes(),
                "huge_page_bytes": huge_page_bytes(),
            }
            pipe.send(report() | memory)
            continue
        done = []
        for i in range(order[0], order[0] + order[1]):
            distributed.barrier()
            start, cpu = time.perf_counter(), time.process_time()
            loss = step(i)
            done.append((time.perf_counter() - start, time.process_time() - cpu, loss))
        pipe.send(done)
    distributed.destroy_process_group()


def loopback_bytes() -> int:
    """Sent since the machine started."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == "lo":
            return int(figures.split()[8])
    return 0


def held_port() -> socket.socket:
    """Bound to a port at which a rank can listen, and which nobody else is given meanwhile."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the rank's will be
    holder.bind(("127.0.0.1", 0))
    return holder


@dataclass(kw_only=True)
class Ranks:
    """The processes of a contender, and what they measured."""

    name: str
    processes: list[Any]
    pipes: list[Connection]
    held_port: socket.socket
    """Of where they meet."""
    seconds: list[list[float]] = field(default_factory=list)
    """Of each round, of each step; the slowest rank's."""
    cpu_seconds: list[float] = field(default_factory=list)
    """Of each step, of all ranks."""
    sent_bytes: list[float] = field(default_factory=list)
    """Of each round, a step."""
    losses: list[float] = field(default_factory=list)
    """Of each step, the ranks' mean."""

    @classmethod
    def start(cls, name: str, size: int, make: Callable[..., Any], *arguments: Any) -> Ranks:
        """Starts the processes, waits until their model is made, and runs the untimed steps."""
        context = processes()
        ranks = cls(name=name, processes=[], pipes=[], held_port=held_port())
        for rank in range(size):
            environment = {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
                "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(ranks.port),
            }  # fmt: skip
            mine, theirs = context.Pipe()
            process = context.Process(
                target=work, args=(make, arguments, rank, environment, theirs), daemon=True
            )
            process.start()
            theirs.close()
            ranks.processes.append(process)
            ranks.pipes.append(mine)
        ranks.receive()
        ranks.run(WARMUP_STEPS, timed=False)
        return ranks

    def receive(self) -> list[Any]:
        """Each rank's next answer."""
        try:
            return [pipe.recv() for pipe in self.pipes]
        except EOFError:
            raise RuntimeError(f"{self.name}: a rank has ended; see above") from None

    def run(self, steps: int, *, timed: bool) -> None:
        """The next `steps` steps, while every other contender sleeps."""
        before = loopback_bytes()
        for pipe in self.pipes:
            pipe.send((len(self.losses), steps))
        of_steps = list(zip(*self.receive(), strict=True))
        sent = loopback_bytes() - before
        self.losses += [statistics.mean(loss for *_, loss in step) for step in of_steps]
        if timed:
            self.seconds.append([max(seconds for seconds, *_ in step) for step in of_steps])
            self.cpu_seconds += [sum(cpu for _, cpu, _ in step) for step in of_steps]
            self.sent_bytes.append(sent / steps)

    def report(self) -> list[dict[str, Any]]:
        """Of each rank: its part of resident memory, and what castor's report says so far."""
        for pipe in self.pipes:
            pipe.send("report")
        return self.receive()

    def stop(self) -> None:
        """Lets the processes end."""
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(30)
        for left in Path("/dev/shm").glob(f"deepspeed_*_{self.port}_*"):
            left.unlink()  # DeepSpeed does not, and each is 69 MB
        self.held_port.close()

    @property
    def port(self) -> int:
        """At which they meet."""
        port: int = self.held_port.getsockname()[1]
        return port

    @property
    def medians(self) -> list[float]:
        """Of each round."""
        return [statistics.median(steps) for steps in self.seconds]


def verify(found: Mapping[str, Ranks], reference: str) -> dict[str, float]:
    """The losses of everyone's first steps are the reference's.

    Returns:
        The largest relative difference of each.

    Raises:
        RuntimeError: Losses differ by more than TOLERANCE.
    """
    expected = found[reference].losses[:COMPARED_STEPS]
    differences = {
        key: worst_difference(ranks.losses[:COMPARED_STEPS], expected)
        for key, ranks in found.items()
    }
    for key, difference in differences.items():
        if not difference <= TOLERANCE:
            raise RuntimeError(
                f"{found[key].name}: losses differ from those of {found[reference].name} by "
                f"{difference:.1e}"
            )
    return differences


def measure(
    found: Mapping[str, Ranks],
    rounds: int,
    steps: int,
    *,
    bars: Mapping[str, float | None],
    reference: str,
    title: str,
    console: Console,
) -> dict[str, Any]:
    """Runs the contenders in turn, ends them and compares them: their part of a record.

    Args:
        found: The contenders.
        rounds: In each of which every contender has its turn.
        steps: Of a turn.
        bars: See compare.
        reference: See verify.
        title: See finish.
        console: Where all goes.
    """
    run_rounds(found, rounds, steps)
    contenders = finish(found, reference=reference, title=title, console=console)
    return {"contenders": contenders, "ratios": compare(found, bars, console)}


def finish(
    found: Mapping[str, Ranks], *, reference: str, title: str, console: Console
) -> dict[str, dict[str, Any]]:
    """Ends all contenders; shows, and returns, what each measured.

    Args:
        found: The contenders, after their last round.
        reference: See verify.
        title: Of the table.
        console: Where it goes.
    """
    reports = {key: ranks.report() for key, ranks in found.items()}
    for ranks in found.values():
        ranks.stop()
    differences = verify(found, reference)
    table = Table(title=title)
    for heading in ("", "median s", "quartiles", "CPU s", "loopback MiB", "resident MiB, all"):
        table.add_column(heading, justify="left" if not heading else "right")
    results = {}
    for key, ranks in found.items():
        seconds = spread([s for steps in ranks.seconds for s in steps])
        results[key] = {
            "name": ranks.name,
            "seconds": seconds,
            "round_medians": ranks.medians,
            "cpu_seconds": statistics.median(ranks.cpu_seconds),
            "loopback_bytes": statistics.median(ranks.sent_bytes),
            "resident_bytes": sum(report["proportional_bytes"] for report in reports[key]),
            "huge_page_bytes": sum(report["huge_page_bytes"] for report in reports[key]),
            "largest_relative_loss_difference": differences[key],
        }
        table.add_row(
            ranks.name,
            f"{seconds['median']:.3f}",
            f"{seconds['lower_quartile']:.3f} - {seconds['upper_quartile']:.3f}",
            f"{results[key]['cpu_seconds']:.2f}",
            f"{results[key]['loopback_bytes'] / 2**20:.0f}",
            f"{results[key]['resident_bytes'] / 2**20:.0f}",
        )
    console.print(table)
    return results


def compare(
    found: Mapping[str, Ranks], bars: Mapping[str, float | None], console: Console
) -> dict[str, dict[str, Any]]:
    """Shows, and returns, ratios of times within a round, of contenders that are there.

    Args:
        found: The contenders.
        bars: "numerator / denominator": the largest ratio that meets the target; None: there is no
            target.
        console: Where they go.
    """
    ratios: dict[str, dict[str, Any]] = {}
    for name, bar in bars.items():
        numerator, denominator = name.split(" / ")
        if numerator not in found or denominator not in found:
            continue
        ratio: dict[str, Any] = paired(found[numerator].medians, found[denominator].medians)
        verdict = ""
        if bar is not None:
            ratio |= {"bar": f"<= {bar}", "met": ratio["median"] <= bar}
            verdict = f" (<= {bar}) {'met' if ratio['met'] else 'MISSED'}"
        ratios[name] = ratio
        console.print(f"{name}: {ratio['median']:.2f}{verdict}")
    return ratios
