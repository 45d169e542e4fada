"""Ranks of two machines as far as the system tells: each has a network and process numbers of its
own, and nothing else says where a rank is."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import namespaced_machine
import node_cases
import rank_cases
from rank_processes import Rank, finish, nursery, succeeded

NODES, RANKS_OF_NODE = 2, 2
PORT = 29500  # of the first machine, whose network nobody else is in


def _address(node: int) -> str:
    return f"10.213.0.{node + 1}"


@pytest.fixture
def machines() -> Iterator[list[str]]:
    """Names of two network namespaces, with a cable between them."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("namespaces need root and iproute2")
    names = [f"castor-{os.getpid()}-{node}" for node in range(NODES)]
    made = []
    try:
        for name in names:
            if subprocess.run(["ip", "netns", "add", name], check=False).returncode != 0:
                pytest.skip("this system makes no network namespaces")
            made.append(name)
        ends = ["cable", "netns", names[0], "type", "veth", "peer", "cable", "netns", names[1]]
        subprocess.run(["ip", "link", "add", *ends], check=True)
        for node, name in enumerate(names):
            for command in (
                ["addr", "add", f"{_address(node)}/24", "dev", "cable"],
                ["link", "set", "cable", "up"],
                ["link", "set", "lo", "up"],
            ):
                subprocess.run(["ip", "-n", name, *command], check=True)
        yield names
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=True)


def test_ranks_of_two_machines_share_what_each_has_and_compute_as_one_process(
    machines: list[str], tmp_path: Path
) -> None:
    environment = os.environ | {
        "MASTER_ADDR": _address(0), "MASTER_PORT": str(PORT),
        "WORLD_SIZE": str(NODES * RANKS_OF_NODE), "LOCAL_WORLD_SIZE": str(RANKS_OF_NODE),
        "GLOO_SOCKET_IFNAME": "cable", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    environment.pop("CASTOR_RANK_LINK", None)
    script = namespaced_machine.__file__
    running = [
        Rank(nursery(node)[0], environment | {"NODE": str(node)}, tmp_path, script, name,
             str(tmp_path))
        for node, name in enumerate(machines)
    ]  # fmt: skip
    succeeded(finish(running))
    expected, _, _ = rank_cases.train(
        rank_cases.EXACT["tight"], range(NODES * RANKS_OF_NODE), steps=node_cases.STEPS
    )
    for rank in range(NODES * RANKS_OF_NODE):
        weights, _, report = torch.load(tmp_path / f"tight.{rank}.pt")
        assert all(map(torch.equal, weights, expected))
        assert report["rank_link"].startswith(
            "gloo between 2 machines, and memory that the 2 ranks"
        )
        assert report["rank_shared_bytes"] > 0 < report["rank_crossed_bytes"]
