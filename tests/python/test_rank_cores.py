"""Ranks of `castor run` keep to the cores of NUMA nodes."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from castor.runtime.rank_cores import as_environment, places_of_ranks

DRIVER = """
import sys
from castor import launch
from castor.config.run_options import RunOptions
from castor.runtime import rank_cores
from castor.runtime.rank_cores import RankPlace

places = [RankPlace(nodes=(n,), cores=(core,)) for n, core in enumerate(map(int, sys.argv[2:4]))]
rank_cores.places_of_ranks = lambda _: places
options = RunOptions(nproc=2, bind="unbound" not in sys.argv)
sys.exit(launch.run(sys.argv[1], sys.argv[4:], options, module=False, settings=None))
"""
SCRIPT = """
import os, sys
from pathlib import Path

said = [sorted(os.sched_getaffinity(0)), "CASTOR_RANK_CORES" in os.environ, __name__, sys.argv[1:]]
Path(__file__).with_name(os.environ["RANK"]).write_text(repr(said))
"""


def machine(root: Path, nodes: dict[int, str], gpus: dict[str, int] | None = None) -> Path:
    """What Linux says of one with these processors, and GPUs by the nodes that they are on."""
    for node, cores in nodes.items():
        path = root / f"sys/devices/system/node/node{node}"
        path.mkdir(parents=True)
        (path / "cpulist").write_text(f"{cores}\n")
    for address, node in (gpus or {}).items():
        (root / "proc/driver/nvidia/gpus" / address).mkdir(parents=True)
        path = root / "sys/bus/pci/devices" / address
        path.mkdir(parents=True)
        (path / "numa_node").write_text(f"{node}\n")
    return root


@pytest.fixture
def sixteen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processors that this process may run on."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


TWO = {0: "0-3,8-11", 1: "4-7,12-15"}
FOUR = {node: f"{4 * node}-{4 * node + 3}" for node in range(4)}


@pytest.mark.usefixtures("sixteen")
@pytest.mark.parametrize(
    ("nodes", "gpus", "nproc", "expected"),
    [
        (TWO, {}, 2, [[0], [1]]),
        (TWO, {}, 8, [[0]] * 4 + [[1]] * 4),
        (TWO, {}, 3, [[0], [0], [1]]),
        (FOUR, {}, 2, [[0, 1], [2, 3]]),
        (FOUR, {}, 3, [[0], [1], [2, 3]]),
        (TWO | {2: ""}, {}, 2, [[0], [1]]),  # memory alone
        (TWO | {2: "16-23"}, {}, 2, [[0], [1]]),  # not this process's
        (TWO, {"0000:3b:00.0": 1, "0000:af:00.0": 0}, 2, [[1], [0]]),
        (TWO, {"0000:3b:00.0": 1, "0000:af:00.0": 0}, 4, [[0], [0], [1], [1]]),
        (TWO, {"0000:3b:00.0": -1, "0000:af:00.0": -1}, 2, [[0], [1]]),  # nobody knows
        (TWO, {}, 1, []),
        ({0: "0-15"}, {}, 4, []),
        ({}, {}, 4, []),
    ],
)
def test_ranks_are_spread_over_nodes_or_beside_their_gpus(
    nodes: dict[int, str], gpus: dict[str, int], nproc: int, expected: Any, tmp_path: Path
) -> None:
    found = places_of_ranks(nproc, root=machine(tmp_path, nodes, gpus))
    assert [list(place.nodes) for place in found] == expected
    if nodes == TWO and found:
        assert found[0].cores in ((0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15))


@pytest.mark.usefixtures("sixteen")
def test_gpus_that_somebody_has_chosen_are_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = machine(tmp_path, TWO, {"0000:3b:00.0": 1, "0000:af:00.0": 0})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert [place.nodes for place in places_of_ranks(2, root=root)] == [(0,), (1,)]
    assert as_environment(places_of_ranks(2, root=root)).startswith("0,1,2,3,8,9,10,11;4,")


@pytest.mark.parametrize("bound", [True, False])
def test_a_rank_begins_on_its_cores(bound: bool, tmp_path: Path) -> None:
    first, last = min(os.sched_getaffinity(0)), max(os.sched_getaffinity(0))
    driver, script = tmp_path / "driver.py", tmp_path / "script.py"
    driver.write_text(DRIVER)
    script.write_text(SCRIPT)
    more = ["its", "own"] if bound else ["unbound"]
    command = [sys.executable, str(driver), str(script), str(first), str(last), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    for rank, core in ((0, first), (1, last)):
        cores, told, name, arguments = eval((tmp_path / str(rank)).read_text())
        assert cores == ([core] if bound else sorted(os.sched_getaffinity(0)))
        assert (told, name, arguments) == (False, "__main__", more)
