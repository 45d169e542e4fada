# Question: what bounds the update on the host, cores or memory, and what do copies to and from the
#     device leave of it?
# Baseline: the in-place stream `a[i] += 1` in castor's own threads on every core, in bytes per
#     second; an update that memory bounds comes near it.
# Work: fp32 Adam over 64M parameters, 28 bytes each (read g; read and write w, m, v), on 1, 2, 4,
#     ... cores; copies of 256 MiB to the device and back, of pinned memory where the device is a
#     GPU, each alone and both at once; Adam on every core while both kinds of copies go on.
# Cores bound Adam where its rate grows with them to the last; memory does where it stops growing.
# On the CPU device copies are host work of one thread each: they take cores as well as memory.
"""Limits of the host: `python benchmarks/host_limits.py [--params N] [--repetitions R]`."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from _machine import command_line, describe_machine, write_record
from rich.console import Console
from rich.table import Table

import castor
import castor._C

COPY_BYTES = 256 << 20
ADAM_BYTES = 28


class Copies:
    """Copies in one direction, again and again, between pinned host memory and the device.

    Args:
        device: A GPU, or the CPU, where both ends are host memory.
        to_device: Direction.
    """

    def __init__(self, device: torch.device, *, to_device: bool) -> None:
        gpu = device.type == "cuda"
        host = torch.ones(COPY_BYTES, dtype=torch.uint8, pin_memory=gpu)
        other = torch.ones(COPY_BYTES, dtype=torch.uint8, device=device)
        self._source, self._target = (host, other) if to_device else (other, host)
        self._stream = torch.cuda.Stream(device) if gpu else None
        self._stop = threading.Event()
        self._seconds: list[float] = []

    def _copy(self) -> None:
        start = time.perf_counter()
        with torch.cuda.stream(self._stream):  # None: no stream
            self._target.copy_(self._source, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
        self._seconds.append(time.perf_counter() - start)

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Copies on a thread of its own meanwhile."""
        self._copy()
        self._seconds.clear()
        self._stop.clear()
        thread = threading.Thread(target=self._until_stopped)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()

    def _until_stopped(self) -> None:
        while True:
            self._copy()
            if self._stop.is_set():
                return

    @property
    def rate(self) -> float:
        """Bytes per second of the copies since it was asked to go on, each byte counted once."""
        return COPY_BYTES / statistics.median(self._seconds)


def cores_to_try(count: int) -> list[int]:
    """1, 2, 4, ... and all."""
    tried = [1 << power for power in range(count.bit_length()) if 1 << power < count]
    return [*tried, count]


def measure(params: int, repetitions: int, device: torch.device) -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0))

    def adam(num_threads: int = 0) -> float:
        return castor._C.adam_bandwidth(params, repetitions, num_threads=num_threads)

    h2d, d2h = (Copies(device, to_device=to_device) for to_device in (True, False))
    alone = {}
    for name, copies in (("h2d", h2d), ("d2h", d2h)):
        with copies.going_on():
            time.sleep(1.0)
        alone[name] = copies.rate
    with h2d.going_on(), d2h.going_on():
        time.sleep(1.0)
    both = {"h2d": h2d.rate, "d2h": d2h.rate}
    with h2d.going_on(), d2h.going_on():
        adam_beside = adam()
    return {
        "dram": castor._C.in_place_bandwidth(4 * params, repetitions),
        "adam": {count: adam(count) for count in cores_to_try(cores)},
        "copies_alone": alone,
        "copies_both": both,
        "adam_beside_copies": adam_beside,
        "copies_beside_adam": {"h2d": h2d.rate, "d2h": d2h.rate},
    }


def show(figures: dict[str, Any], console: Console) -> None:
    table = Table("", "GB/s", "M parameters/s", "of DRAM")

    def row(name: str, rate: float, *, updates: bool) -> None:
        params = f"{rate / ADAM_BYTES / 1e6:,.0f}" if updates else ""
        share = f"{rate / figures['dram']:.2f}" if updates else ""
        table.add_row(name, f"{rate / 1e9:.1f}", params, share)

    row("in-place stream, every core", figures["dram"], updates=False)
    for count, rate in figures["adam"].items():
        row(f"Adam on {count} {'core' if count == 1 else 'cores'}", rate, updates=True)
    for name, rate in figures["copies_alone"].items():
        row(f"{name} alone", rate, updates=False)
    for name, rate in figures["copies_both"].items():
        row(f"{name} beside the other", rate, updates=False)
    row("Adam on every core, beside both", figures["adam_beside_copies"], updates=True)
    for name, rate in figures["copies_beside_adam"].items():
        row(f"{name} beside the other and Adam", rate, updates=False)
    console.print(table)


def main() -> None:
    parser = command_line("host_limits", __doc__)
    parser.add_argument("--params", type=int, default=64 << 20, help="that Adam updates")
    parser.add_argument("--repetitions", type=int, default=7)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.params, arguments.repetitions = 1 << 20, 1
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    machine = describe_machine()
    figures = measure(arguments.params, arguments.repetitions, device)
    show(figures, Console())
    write_record(
        arguments,
        "host_limits",
        {"device": str(device), "params": arguments.params, **figures},
        machine=machine,
    )


if __name__ == "__main__":
    main()
