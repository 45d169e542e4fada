# Question: does an optimizer step with all of its state on NVMe take no longer than the device
#     needs for the bytes, and how does it compare with DeepSpeed's NVMe offload?
# Baseline: the bytes that a step reads and writes, at the bandwidths of `castor io-bench` on the
#     same directory in the same round: their sum where the device shares one bandwidth between
#     reading and writing, the longer of the two where it does both at once. DeepSpeed ZeRO-3 with
#     offload_optimizer on "nvme" (libaio, O_DIRECT) in a process of its own, and castor with the
#     state in memory.
# Work: optimizer.step() of the GPT-2 of benchmarks/step.py, fp32, with clipping. DeepSpeed keeps a
#     master beside the moments and writes gradients, too: 12 bytes a parameter read and written and
#     4 read; castor 8 and 8.
# Targets: at most 1.15 times the device's time; at least 1.5 times as fast as DeepSpeed.
"""Optimizer steps on NVMe: `python benchmarks/nvme.py [--directory D] [--rounds R] [--quick]`."""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from _machine import ROOT, command_line, describe_machine, spread, write_record
from _nvme_peer import make_deepspeed_nvme
from _sections import nvme_rows
from _steps import QUICK, Contender, Model, make_castor, make_plain, run_rounds, verify
from rich.console import Console
from rich.table import Table

from castor.io_bench import IoReport, measure

BAR, PEER_BAR = 1.15, 1.5
NAMES = {
    "nvme": "castor, state on NVMe",
    "unverified": "castor, state on NVMe, no checksums",
    "memory": "castor, state in memory",
    "deepspeed": "DeepSpeed ZeRO-3, state on NVMe",
}


def device_seconds(device: IoReport, read_bytes: float, written_bytes: float) -> float:
    """What the device needs for the transfers of a step."""
    reading = read_bytes / device.best("read").read_bytes_per_second
    writing = written_bytes / device.best("write").write_bytes_per_second
    return max(reading, writing) if device.full_duplex else reading + writing


def bandwidths(device: IoReport) -> dict[str, Any]:
    return {
        "read": device.best("read").bytes_per_second,
        "write": device.best("write").bytes_per_second,
        "mixed": device.best("mixed").bytes_per_second,
        "full_duplex": device.full_duplex,
        "direct": device.direct,
    }


def run(
    model: Model,
    directory: Path,
    rounds: int,
    steps: int,
    measured: Callable[[Path], IoReport],
    *,
    peer: bool,
) -> tuple[dict[str, Contender], list[IoReport]]:
    (directory / "own").mkdir()
    (directory / "unverified").mkdir()
    nvme: dict[str, Any] = {"nvme_path": str(directory / "own"), "nvme_offload_fraction": 1.0}
    unverified = nvme | {"nvme_path": str(directory / "unverified"), "nvme_verify": False}
    found = {
        "plain": Contender.start("plain PyTorch", make_plain, model),
        "nvme": Contender.start(NAMES["nvme"], make_castor, model, None, nvme),
        "unverified": Contender.start(NAMES["unverified"], make_castor, model, None, unverified),
        "memory": Contender.start(NAMES["memory"], make_castor, model, None),
    }
    if peer:
        found["deepspeed"] = Contender.start(
            NAMES["deepspeed"], make_deepspeed_nvme, model, str(directory)
        )
    devices = []
    for _ in range(rounds):
        devices.append(measured(directory))
        run_rounds(found, 1, steps)
    return found, devices


def main() -> int:
    parser = command_line("nvme", __doc__)
    parser.add_argument("--directory", type=Path, default=ROOT / "build")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2, help="of each contender in a round")
    parser.add_argument("--no-deepspeed", action="store_true", help="castor and the device alone")
    arguments = parser.parse_args()
    console = Console()
    machine = describe_machine()

    model = QUICK if arguments.quick else Model(layers=18)
    file_bytes, seconds = ("4MiB", 0.05) if arguments.quick else ("512MiB", 1.0)
    rounds, steps = (1, 1) if arguments.quick else (arguments.rounds, arguments.steps)
    peer = not arguments.no_deepspeed
    if peer and find_spec("deepspeed") is None:
        console.print(f"[yellow]SKIPPED: {NAMES['deepspeed']}: deepspeed is not installed")
        peer = False
    with tempfile.TemporaryDirectory(prefix="castor-bench-", dir=arguments.directory) as folder:
        found, devices = run(
            model,
            Path(folder),
            rounds,
            steps,
            lambda directory: measure(
                directory, file_bytes=file_bytes, blocks=["1MiB"], depths=[32], seconds=seconds
            ),
            peer=peer,
        )
        reports = {key: c.report() for key, c in found.items() if key != "plain"}
        verify(found, reports)
        for contender in found.values():
            contender.stop()

    count = rounds * steps
    per_round = {
        key: [
            statistics.median(report["update_seconds"][-count:][i : i + steps])
            for i in range(0, count, steps)
        ]
        for key, report in reports.items()
    }
    results: dict[str, Any] = {}
    for key, seconds in per_round.items():
        report = reports[key]
        results[key] = {"name": NAMES[key], "update_seconds": spread(seconds), "report": report}
        if key in ("nvme", "unverified"):
            read, written = (report[f"nvme_{way}_bytes"] / report["steps"]
                             for way in ("read", "written"))  # fmt: skip
        elif key == "deepspeed":
            read, written = report["state_bytes"] + report["gradient_bytes"], report["state_bytes"]
        else:
            continue
        floors = [device_seconds(device, read, written) for device in devices]
        results[key] |= {
            "read_bytes": read,
            "written_bytes": written,
            "device_seconds": spread(floors),
            "over_device": spread([s / f for s, f in zip(seconds, floors, strict=True)]),
        }
    verification = spread(
        [a / b for a, b in zip(per_round["nvme"], per_round["unverified"], strict=True)]
    )
    faster = None
    if "deepspeed" in per_round:
        pairs = zip(per_round["deepspeed"], per_round["nvme"], strict=True)
        faster = spread([theirs / mine for theirs, mine in pairs])

    parameters = reports["nvme"]["param_bytes"] // 4
    table = Table(title=f"optimizer.step() of {parameters / 1e6:.1f}M parameters")
    for heading in ("", "median s", "read MB", "written MB", "device s", "over device"):
        table.add_column(heading, justify="left" if not heading else "right")
    for row in nvme_rows(results):
        table.add_row(*row)
    console.print(table)
    over = results["nvme"]["over_device"]["median"]
    console.print(f"over the device: at most {BAR} {'met' if over <= BAR else 'MISSED'}")
    console.print(f"with checksums / without: {verification['median']:.3f}")
    if faster is not None:
        verdict = "met" if faster["median"] >= PEER_BAR else "MISSED"
        console.print(f"DeepSpeed / castor: {faster['median']:.2f}, at least {PEER_BAR} {verdict}")
    write_record(
        arguments,
        "nvme",
        {
            "parameters": parameters,
            "device": [bandwidths(device) for device in devices],
            "results": results,
            "with_checksums_over_without": verification,
            "deepspeed_over_castor": faster,
        },
        machine=machine,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
