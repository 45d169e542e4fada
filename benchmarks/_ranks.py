"""Contenders of several ranks: a process for each rank, which sleeps while others step."""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from _steps import WARMUP_STEPS, Report, Step, proportional_bytes


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
            pipe.send({**report(), "proportional_bytes": proportional_bytes()})
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


@dataclass(kw_only=True)
class Ranks:
    """The processes of a contender, and what they measured."""

    name: str
    processes: list[Any]
    pipes: list[Connection]
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
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        ranks = cls(name=name, processes=[], pipes=[])
        for rank in range(size):
            environment = {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
                "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
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

    @property
    def medians(self) -> list[float]:
        """Of each round."""
        return [statistics.median(steps) for steps in self.seconds]
