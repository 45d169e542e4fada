# Question: do castor's I/O engines get out of a device what it gives, and does a pass of an
#     optimizer step (read, checksum, write, all at once) keep it?
# Baseline: fio on the same file, with the same mix, block size, depth and O_DIRECT, sequential,
#     in turn with the engines within each repetition. The file is written once before.
#     "stream" has no peer in fio: it is compared with the mixed bandwidth of the same engine.
# Targets: io_uring >= 0.90 of fio's io_uring, threads >= 0.75, for read, write and mixed; the
#     stream within 1.15 times the time of its bytes at the mixed bandwidth.
"""I/O engines against fio: `python benchmarks/io.py [--directory D] [--seconds S]`."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _cpp import build, run
from _machine import ROOT, command_line, describe_machine, paired, spread, write_record
from rich.console import Console
from rich.table import Table

MIXES = {"read": "read", "write": "write", "mixed": "rw"}  # ours -> fio's
TARGETS = {"io_uring": 0.90, "threads": 0.75}
STREAM_BAR = 1.15


def castor(
    program: Path, engine: str, mix: str, file: Path, size: int, arguments: argparse.Namespace
) -> tuple[float, str]:
    """Bytes per second, both directions together, and what the engine says of itself."""
    settings = (arguments.block << 10, arguments.depth, size, arguments.seconds)
    found = run(program, file, engine, mix, *settings)
    return (found["read_bytes"] + found["written_bytes"]) / found["seconds"], found["engine"]


def fio(mix: str, file: Path, size: int, arguments: argparse.Namespace) -> float:
    """Bytes per second, both directions together."""
    found = run(
        *(
            *("fio", "--name=peer", f"--filename={file}", f"--rw={MIXES[mix]}"),
            *(f"--bs={arguments.block}k", f"--iodepth={arguments.depth}", "--direct=1"),
            *(f"--ioengine={arguments.fio_engine}", f"--size={size}", "--time_based"),
            *(f"--runtime={arguments.seconds}", "--output-format=json", "--overwrite=1"),
            *("--fallocate=none", "--randrepeat=1", "--norandommap"),
        )
    )
    (job,) = found["jobs"]
    return float(job["read"]["bw_bytes"] + job["write"]["bw_bytes"])


def version_of_fio() -> str:
    done = subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def table(rates: dict[str, dict[str, list[float]]], compared: dict[str, dict[str, Any]]) -> Table:
    """MB/s of each, and how the engines stand to fio."""
    found = Table("mix", *(f"{name} MB/s" for name in ("fio", *TARGETS)), "of fio")
    for mix in (*MIXES, "stream"):
        ratios = compared.get("stream_time" if mix == "stream" else mix, {})
        found.add_row(
            mix,
            *(
                f"{spread(rates[mix][name])['median'] / 1e6:,.0f}" if name in rates[mix] else ""
                for name in ("fio", *TARGETS)
            ),
            ("time over that of mixed: " if mix == "stream" else "")
            + ", ".join(
                f"{ratio['median']:.2f} ({ratio['lower_quartile']:.2f} - "
                f"{ratio['upper_quartile']:.2f})"
                for ratio in ratios.values()
            ),
        )
    return found


def main() -> int:
    parser = command_line("io", __doc__)
    parser.add_argument("--directory", type=Path, default=ROOT / "build", help="on the device")
    parser.add_argument("--size", type=int, default=1024, help="of the file, MiB")
    parser.add_argument("--block", type=int, default=1024, help="KiB")
    parser.add_argument("--depth", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each measurement")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument(
        "--fio-engine", default="io_uring", help="psync where io_uring is forbidden"
    )
    arguments = parser.parse_args()
    console = Console()
    machine = describe_machine()
    if arguments.quick:
        arguments.size, arguments.seconds, arguments.repetitions = 64, 0.05, 1
    contenders = ["fio", *TARGETS]
    if shutil.which("fio") is None:
        if not arguments.quick:
            console.print("[red]the peer is missing: apt-get install fio")
            return 1
        console.print("[yellow]SKIPPED: fio: it is not installed")
        contenders.remove("fio")
    program = build("io_engine")
    size = arguments.size << 20
    rates: dict[str, dict[str, list[float]]] = {
        mix: {name: [] for name in contenders} for mix in MIXES
    }
    rates["stream"] = {name: [] for name in TARGETS}
    said: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="castor-io-", dir=arguments.directory) as directory:
        file = Path(directory) / "file"
        with file.open("wb") as stream:
            block = bytes(range(256)) * 4096
            for _ in range(size // len(block)):
                stream.write(block)
        subprocess.run(["sync", str(file)], check=True)
        for repetition in range(arguments.repetitions):
            for mix in MIXES:
                # Who comes first changes, so that a drift of the device favours nobody.
                first = repetition % len(contenders)
                for name in contenders[first:] + contenders[:first]:
                    if name == "fio":
                        rates[mix][name].append(fio(mix, file, size, arguments))
                    else:
                        rate, said[name] = castor(program, name, mix, file, size, arguments)
                        rates[mix][name].append(rate)
            for name in TARGETS:
                rate, _ = castor(program, name, "stream", file, size, arguments)
                rates["stream"][name].append(rate)
            console.print(f"repetition {repetition + 1} of {arguments.repetitions}")

    compared: dict[str, dict[str, Any]] = {
        mix: {name: paired(rates[mix][name], rates[mix]["fio"]) for name in TARGETS}
        for mix in MIXES
        if "fio" in contenders
    }
    compared["stream_time"] = {
        name: paired(rates["mixed"][name], rates["stream"][name]) for name in TARGETS
    }
    console.print(table(rates, compared))
    met = all(
        compared[mix][name]["median"] >= TARGETS[name]
        for mix in MIXES
        if mix in compared
        for name in TARGETS
    )
    met = met and compared["stream_time"]["io_uring"]["median"] <= STREAM_BAR
    console.print("targets met" if met else "[yellow]targets missed")
    figures = {
        "fio": version_of_fio() if "fio" in contenders else None,
        "block_bytes": arguments.block << 10,
        "depth": arguments.depth,
        "file_bytes": size,
        "seconds": arguments.seconds,
        "engines": said,
        "bytes_per_second": rates,
        "ratios": compared,
        "targets_met": met,
    }
    write_record(arguments, "io", figures, machine=machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
