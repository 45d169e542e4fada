"""Assigns the ranks of `castor run` to cores of a NUMA node, beside their memory.

Each such rank starts with this file as a script: the script binds the process to its cores, and
then replaces it by the command that was asked for. It imports nothing of castor.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CORES = "CASTOR_RANK_CORES"
"""Environment variable: processors of each rank, joined by commas, and ranks by semicolons."""


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """Cores and NUMA nodes of a rank, by the operating system's numbers."""

    nodes: tuple[int, ...]
    cores: tuple[int, ...]


def places_of_ranks(nproc: int, *, root: Path = Path("/")) -> list[RankPlace]:
    """Returns the place of each rank of this machine; empty where there is nothing to choose.

    Where there are as many GPUs as ranks, each rank is beside the GPU of its number. Otherwise the
    ranks are spread over the NUMA nodes in order, several ranks to a node or several nodes to a
    rank. Only cores that this process may run on count.

    Args:
        nproc: Number of ranks on this machine.
        root: Root of the file system that describes the machine.
    """
    allowed = os.sched_getaffinity(0)
    nodes = {}
    for path in (root / "sys/devices/system/node").glob("node[0-9]*"):
        cores = sorted(allowed.intersection(_numbers((path / "cpulist").read_text())))
        if cores:
            nodes[int(path.name.removeprefix("node"))] = cores
    if len(nodes) < 2 or nproc < 2:
        return []
    of_gpus = _nodes_of_gpus(root)
    if len(of_gpus) == nproc and nodes.keys() >= set(of_gpus):
        chosen = [[node] for node in of_gpus]
    else:
        row, count = sorted(nodes), len(nodes)
        chosen = [
            row[n * count // nproc : max(n * count // nproc + 1, (n + 1) * count // nproc)]
            for n in range(nproc)
        ]
    return [
        RankPlace(nodes=tuple(own), cores=tuple(core for node in own for core in nodes[node]))
        for own in chosen
    ]


def as_environment(places: Sequence[RankPlace]) -> str:
    """Returns the value of the environment variable CORES."""
    return ";".join(",".join(map(str, place.cores)) for place in places)


def _nodes_of_gpus(root: Path) -> list[int]:
    """Returns the NUMA node of each GPU, by address; [] if CUDA_VISIBLE_DEVICES is set.

    CUDA numbers GPUs of one model in that order.
    """
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return []
    devices = sorted((root / "proc/driver/nvidia/gpus").glob("*"))
    files = [root / "sys/bus/pci/devices" / device.name / "numa_node" for device in devices]
    return [int(file.read_text()) for file in files if file.exists()]


def _numbers(ranges: str) -> set[int]:
    """Reads a list of ranges: "0-3,8" is 0, 1, 2, 3, 8."""
    found: set[int] = set()
    for part in filter(None, ranges.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


if __name__ == "__main__":
    mine = os.environ.pop(CORES).split(";")[int(os.environ["LOCAL_RANK"])]
    os.sched_setaffinity(0, {int(core) for core in mine.split(",")})
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
