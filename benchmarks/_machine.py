"""What every benchmark records of its surroundings, and how it sums up repetitions."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

# Everyone's memory on huge pages, as castor's chunks are, where the kernel gives them to who asks:
# on small ones a process is up to a fifth slower than the next, by which pages it got. Torch reads
# this at its first allocation, which no script makes before it imports this module.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
QUICK_RESULTS = ROOT / "build" / "bench" / "quick"
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
# Of what is measured: the results of the benchmark before are no change of it.
_CHANGES = ("git", "-C", str(ROOT), "status", "--porcelain", "--", ".", ":!benchmarks/results")
_PACKAGES = ("torch", "transformers", "deepspeed", "castor-torch")


def describe_machine() -> dict[str, Any]:
    """CPU, kernel, file system, versions and commit, for the JSON of a benchmark."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average_1min": os.getloadavg()[0],
        "kernel": platform.release(),
        "transparent_huge_pages": _chosen(_HUGE_PAGES / "enabled"),
        "shared_huge_pages": _chosen(_HUGE_PAGES / "shmem_enabled"),
        "torch_asks_for_huge_pages": os.environ["THP_MEM_ALLOC_ENABLE"] == "1",
        "file_system": _output("stat", "--file-system", "--format=%T", str(ROOT)),
        "python": platform.python_version(),
        "versions": {name: _installed(name) for name in _PACKAGES},
        "commit": _output("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "uncommitted_changes": bool(_output(*_CHANGES)),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _chosen(setting: Path) -> str | None:
    """What a setting of the kernel is, of the words it may be; None where there is none."""
    found = re.search(r"\[(.*)\]", setting.read_text()) if setting.exists() else None
    return found.group(1) if found else None


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no git, say
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def command_line(benchmark: str, description: str | None) -> argparse.ArgumentParser:
    """A parser with the arguments that every benchmark takes: --quick and --output."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="tiny and once, to try the script")
    parser.add_argument(
        "--output",
        type=Path,
        help=f"default: benchmarks/results/{benchmark}.json, build/bench/quick with --quick",
    )
    return parser


def output_of(arguments: argparse.Namespace, benchmark: str) -> Path:
    """Where the figures go; a quick run leaves those of `make bench` alone."""
    given: Path | None = arguments.output
    return given or (QUICK_RESULTS if arguments.quick else RESULTS) / f"{benchmark}.json"


def spread(values: list[float]) -> dict[str, float]:
    """Median, quartiles and extremes."""
    quartiles = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "lower_quartile": quartiles[0],
        "upper_quartile": quartiles[2],
    }


def paired(numerator: list[float], denominator: list[float]) -> dict[str, float]:
    """Spread of the ratio within each repetition, so that slow spells of the machine cancel."""
    return spread([a / b for a, b in zip(numerator, denominator, strict=True)])


def write_record(
    arguments: argparse.Namespace,
    benchmark: str,
    figures: Mapping[str, Any],
    *,
    machine: Mapping[str, Any],
    indent: int | None = 2,
) -> None:
    """Writes a benchmark's JSON with the command that made it, and says where.

    Args:
        arguments: Of command_line; output_of says where the file goes. Folders are made.
        benchmark: The script's name without its suffix; the page finds its section by it.
        figures: What was measured; may not hold the keys benchmark, command and machine.
        machine: describe_machine(), taken before the run: its load is then that of other work.
        indent: Of the JSON; None for long lists of numbers.
    """
    surroundings = {
        "benchmark": benchmark,
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "machine": dict(machine),
    }
    if taken := surroundings.keys() & figures.keys():
        raise ValueError(f"{benchmark}: figures may not be called {', '.join(sorted(taken))}")
    path = output_of(arguments, benchmark)
    path.parent.mkdir(parents=True, exist_ok=True)
    record = surroundings | dict(figures)
    path.write_text(json.dumps(record, indent=indent) + "\n", encoding="utf-8")
    print(f"written to {path}")
