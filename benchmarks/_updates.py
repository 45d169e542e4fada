"""Contenders that update one long parameter: their turns, their table, their part of a record."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from _machine import paired, spread
from rich.table import Table

import castor._C

# The OpenMP and TBB threads of the one before spin for a while after their work: nobody shall start
# on a core that is still taken.
_SETTLE_SECONDS = 0.05
_UNTIMED = 2  # they touch the pages


@dataclass(kw_only=True)
class Update:
    """One timed thing."""

    name: str
    bytes_per_param: float
    """That the algorithm must move, each once."""
    step: Callable[[], object]
    seconds: list[float] = field(default_factory=list)
    calls: int = 0

    def run(self, *, timed: bool) -> None:
        """One step on the clock, kept if `timed`."""
        time.sleep(_SETTLE_SECONDS)
        start = time.perf_counter()
        self.step()
        elapsed = time.perf_counter() - start
        self.calls += 1
        if timed:
            self.seconds.append(elapsed)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of how much is measured, how often."""
    parser.add_argument("--numel", type=int, default=64 << 20, help="parameters (default 64 Mi)")
    parser.add_argument("--repetitions", type=int, default=11)


def values(numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and gradients, the same in each run."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(numel, generator=generator), torch.randn(numel, generator=generator)


def take_turns(contenders: Sequence[Update], numel: int, repetitions: int) -> list[float]:
    """Times all; returns the in-place bandwidth of each repetition, in bytes per second."""
    bandwidth: list[float] = []
    for repetition in range(-_UNTIMED, repetitions):
        time.sleep(_SETTLE_SECONDS)
        rate = castor._C.in_place_bandwidth(numel, 1)
        if repetition >= 0:
            bandwidth.append(rate)
        first = repetition % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            contender.run(timed=repetition >= 0)
    return bandwidth


def fractions(
    found: Mapping[str, Update], keys: Sequence[str], bandwidth: Sequence[float], numel: int
) -> dict[str, Any]:
    """Of the in-place bandwidth, what the bytes of each come to."""
    inverse = [1 / rate for rate in bandwidth]
    return {
        f"{key}: fraction of in-place bandwidth": paired(
            inverse, [s / (found[key].bytes_per_param * numel) for s in found[key].seconds]
        )
        for key in keys
    }


def summary(
    found: Mapping[str, Update],
    bandwidth: Sequence[float],
    numel: int,
    title: str,
    errors: Mapping[str, float] | None = None,
) -> tuple[Table, dict[str, Any]]:
    """A table of all, and what a record holds of them.

    Args:
        found: Timed.
        bandwidth: See take_turns.
        numel: Parameters.
        title: Of the table.
        errors: Relative ones of the results, by key.
    """
    table = Table(title=title)
    for heading in ("", "median ms", "min", "max", "GB/s", *(["error"] if errors else [])):
        table.add_column(heading, justify="left" if not heading else "right")
    results: dict[str, Any] = {}
    for key, update in found.items():
        seconds = spread(update.seconds)
        rate = update.bytes_per_param * numel / seconds["median"]
        results[key] = {
            "name": update.name,
            "bytes_per_param": update.bytes_per_param,
            "seconds": seconds,
            "bytes_per_second": rate,
        }
        milliseconds = (f"{1e3 * seconds[which]:.1f}" for which in ("median", "min", "max"))
        row = [update.name, *milliseconds, f"{rate / 1e9:.1f}"]
        if errors:
            results[key]["relative_error"] = errors[key]
            row.append(f"{errors[key]:.1e}")
        table.add_row(*row)
    stream = spread(bandwidth)
    table.add_row(r"in-place a\[i] += 1", "", "", "", f"{stream['median'] / 1e9:.1f}")
    figures = {
        "numel": numel,
        "repetitions": len(bandwidth),
        "in_place_bytes_per_second": stream,
        "results": results,
    }
    return table, figures
