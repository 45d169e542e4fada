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
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _machine import RESULTS, ROOT, describe_machine, paired, spread
from rich.console import Console
from rich.table import Table

BUILD = ROOT / "build" / "benchmarks"
MIXES = {"read": "read", "write": "write", "mixed": "rw"}  # ours -> fio's
TARGETS = {"io_uring": 0.90, "threads": 0.75}
STREAM_BAR = 1.15


def build() -> Path:
    source = Path(__file__).resolve().parent / "cpp"
    for command in (
        ["cmake", "-S", str(source), "-B", str(BUILD)],
        ["cmake", "--build", str(BUILD), "--target", "io_engine"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return BUILD / "io_engine"


def run_json(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return dict(json.loads(done.stdout))


def castor(
    program: Path, engine: str, mix: str, file: Path, size: int, arguments: argparse.Namespace
) -> tuple[float, str]:
    """Bytes per second, both directions together, and what the engine says of itself."""
    found = run_json(
        [
            *(str(program), str(file), engine, mix, str(arguments.block << 10)),
            *(str(arguments.depth), str(size), str(arguments.seconds)),
        ]
    )
    return (found["read_bytes"] + found["written_bytes"]) / found["seconds"], found["engine"]


def fio(mix: str, file: Path, size: int, arguments: argparse.Namespace) -> float:
    """Bytes per second, both directions together."""
    found = run_json(
        [
            *("fio", "--name=peer", f"--filename={file}", f"--rw={MIXES[mix]}"),
            *(f"--bs={arguments.block}k", f"--iodepth={arguments.depth}", "--direct=1"),
            *(f"--ioengine={arguments.fio_engine}", f"--size={size}", "--time_based"),
            *(f"--runtime={arguments.seconds}", "--output-format=json", "--overwrite=1"),
            *("--fallocate=none", "--randrepeat=1", "--norandommap"),
        ]
    )
    (job,) = found["jobs"]
    return float(job["read"]["bw_bytes"] + job["write"]["bw_bytes"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=ROOT / "build", help="on the device")
    parser.add_argument("--size", type=int, default=1024, help="of the file, MiB")
    parser.add_argument("--block", type=int, default=1024, help="KiB")
    parser.add_argument("--depth", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each measurement")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument(
        "--fio-engine", default="io_uring", help="psync where io_uring is forbidden"
    )
    parser.add_argument("--output", type=Path, default=RESULTS / "io.json")
    arguments = parser.parse_args()
    console = Console()
    if shutil.which("fio") is None:
        console.print("[red]the peer is missing: apt-get install fio")
        return 1
    program = build()
    size = arguments.size << 20
    rates: dict[str, dict[str, list[float]]] = {
        mix: {name: [] for name in ("fio", *TARGETS)} for mix in MIXES
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
                names = ["fio", *TARGETS]
                for name in names[repetition % 3 :] + names[: repetition % 3]:
                    if name == "fio":
                        rates[mix][name].append(fio(mix, file, size, arguments))
                    else:
                        rate, said[name] = castor(program, name, mix, file, size, arguments)
                        rates[mix][name].append(rate)
            for name in TARGETS:
                rate, _ = castor(program, name, "stream", file, size, arguments)
                rates["stream"][name].append(rate)
            console.print(f"repetition {repetition + 1} of {arguments.repetitions}")

    table = Table("mix", "fio MB/s", *(f"{name} MB/s" for name in TARGETS), "of fio")
    compared: dict[str, dict[str, Any]] = {}
    for mix in MIXES:
        ratios = {name: paired(rates[mix][name], rates[mix]["fio"]) for name in TARGETS}
        compared[mix] = ratios
        table.add_row(
            mix,
            *(f"{spread(rates[mix][name])['median'] / 1e6:,.0f}" for name in ("fio", *TARGETS)),
            ", ".join(
                f"{ratio['median']:.2f} ({ratio['lower_quartile']:.2f} - "
                f"{ratio['upper_quartile']:.2f})"
                for ratio in ratios.values()
            ),
        )
    compared["stream_time"] = {
        name: paired(rates["mixed"][name], rates["stream"][name]) for name in TARGETS
    }
    table.add_row(
        "stream",
        "",
        *(f"{spread(rates['stream'][name])['median'] / 1e6:,.0f}" for name in TARGETS),
        "time over that of mixed: "
        + ", ".join(f"{ratio['median']:.2f}" for ratio in compared["stream_time"].values()),
    )
    console.print(table)
    met = all(compared[mix][name]["median"] >= TARGETS[name] for mix in MIXES for name in TARGETS)
    met = met and compared["stream_time"]["io_uring"]["median"] <= STREAM_BAR
    console.print("targets met" if met else "[yellow]targets missed")

    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "benchmark": "io",
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "machine": describe_machine(),
        "fio": subprocess.run(
            ["fio", "--version"], capture_output=True, text=True, check=True
        ).stdout.strip(),
        "block_bytes": arguments.block << 10,
        "depth": arguments.depth,
        "file_bytes": size,
        "seconds": arguments.seconds,
        "engines": said,
        "bytes_per_second": rates,
        "ratios": compared,
        "targets_met": met,
    }
    arguments.output.write_text(json.dumps(record, indent=2) + "\n")
    console.print(f"written to {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
