# Question: how near do castor's CPU copy engines come to memcpy, by the size of a copy, and does an
#     emulated link keep its rate?
# Baseline: memcpy of the same pieces; on one thread for the asynchronous engine, which has one a
#     direction, on every core for the synchronous engine and for both directions at once.
# Method: benchmarks/cpp/copy_engines.cc copies a buffer far larger than the caches in pieces of
#     each size, contenders in rotating order; ratios are taken within a repetition.
# Targets: from 1 MiB a copy (chunks are that large but in toy models), each engine with copies in
#     its queue >= 0.9 of its baseline, and a link of 2 GB/s within 5% of its rate. One by one, the
#     asynchronous engine adds two thread switches to each copy: the latency, which has no target.
"""castor's copy engines against memcpy: `python benchmarks/copy_engines.py [--quick]`."""

from __future__ import annotations

import sys
from typing import Any

from _cpp import build, run
from _machine import command_line, describe_machine, paired, spread, write_record
from rich.console import Console
from rich.table import Table

KIB, MIB = 1 << 10, 1 << 20
PIECES = (4 * KIB, 64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
BUFFER, LINK_RATE, LINK_FROM = 256 * MIB, 2_000_000_000, 16 * MIB
NAMES = {
    "memcpy": "memcpy, 1 thread",
    "memcpy_striped": "memcpy, every core",
    "torch": "synchronous engine (torch's copy)",
    "async_in_turn": "asynchronous engine, one by one",
    "async_queued": "asynchronous engine, queued",
    "async_both_ways": "asynchronous engine, both ways",
    "link": f"link of {LINK_RATE / 1e9:g} GB/s, queued",
}
BASELINES = {
    "torch": "memcpy_striped",
    "async_queued": "memcpy",
    "async_both_ways": "memcpy_striped",
}
TARGET, TARGET_FROM = 0.9, MIB
LINK_TOLERANCE = 0.05


def size_name(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


def summarise(found: dict[str, Any]) -> dict[str, Any]:
    """Of one piece size: seconds and bytes/s of each contender, and the ratios to the baselines."""
    seconds: dict[str, list[float]] = found["seconds"]
    ratios = {
        f"{name} / {baseline}": paired(seconds[baseline], seconds[name])
        for name, baseline in BASELINES.items()
    }
    if "link" in seconds:
        ideal = found["bytes"] / found["link_bytes_per_second"]
        ratios["link / its rate"] = spread([ideal / value for value in seconds["link"]])
    result: dict[str, Any] = {key: value for key, value in found.items() if key != "seconds"}
    result["seconds"] = {name: spread(values) for name, values in seconds.items()}
    result["bytes_per_second"] = {
        name: found["bytes"] / values["median"] for name, values in result["seconds"].items()
    }
    result["ratios"] = ratios
    pieces = found["bytes"] // found["piece_bytes"]
    result["async_latency_us"] = spread(
        [
            1e6 * (engine - plain) / pieces
            for engine, plain in zip(seconds["async_in_turn"], seconds["memcpy"], strict=True)
        ]
    )
    result["met"] = {
        name: abs(ratio["median"] - 1) <= LINK_TOLERANCE
        if name.startswith("link")
        else ratio["median"] >= TARGET
        for name, ratio in ratios.items()
        if found["piece_bytes"] >= TARGET_FROM
    }
    return result


def main() -> int:
    parser = command_line("copy_engines", __doc__)
    parser.add_argument("--repetitions", type=int, default=7)
    arguments = parser.parse_args()
    console = Console()
    machine = describe_machine()
    program = build("copy_engines")

    buffer, repetitions = BUFFER, arguments.repetitions
    if arguments.quick:
        buffer, repetitions = PIECES[-1], 1
    results = []
    for piece in PIECES:
        rate = LINK_RATE if piece >= LINK_FROM else 0
        results.append(summarise(run(program, buffer, piece, repetitions, rate)))

    table = Table(title=f"GB/s, {size_name(buffer)} in pieces, {repetitions} repetitions")
    table.add_column("")
    for result in results:
        table.add_column(size_name(result["piece_bytes"]), justify="right")
    for key, name in NAMES.items():
        rates = [result["bytes_per_second"].get(key) for result in results]
        table.add_row(name, *(f"{rate / 1e9:.2f}" if rate else "" for rate in rates))
    latencies = [result["async_latency_us"]["median"] for result in results]
    table.add_row("us added to a copy, one by one", *(f"{value:.1f}" for value in latencies))
    console.print(table)
    for result in results:
        for name, met in result["met"].items():
            if not met:
                ratio = result["ratios"][name]["median"]
                size = size_name(result["piece_bytes"])
                console.print(f"[red]missed: {name} at {size}: {ratio:.2f}")
    figures = {
        "repetitions": repetitions,
        "names": NAMES,
        "targets": {
            "of_the_baseline": TARGET,
            "from_bytes": TARGET_FROM,
            "link_within": LINK_TOLERANCE,
        },
        "results": results,
    }
    write_record(arguments, "copy_engines", figures, machine=machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
