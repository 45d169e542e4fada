"""Ranks that srun and Ray Train have started: `make integration`, where these are installed."""

import ast
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import launch_cases
from rank_processes import held_port

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_train.py"


def test_ranks_of_srun_share_the_machine(tmp_path: Path) -> None:
    """Tasks are ranks as soon as they are told torch's names; how many a node has, Slurm tells."""
    if shutil.which("srun") is None or subprocess.run(["sinfo"], check=False).returncode != 0:
        pytest.skip("no Slurm that runs")
    with held_port("") as holder:
        address = socket.gethostbyname(socket.gethostname())
        environment = {"MASTER_ADDR": address, "MASTER_PORT": str(holder.getsockname()[1])}
        ranks = 'RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS exec "$@"'
        command = ["srun", "--ntasks", "2", "--overcommit", "--label", "bash", "-c", ranks, "bash"]
        done = subprocess.run(
            [*command, sys.executable, launch_cases.__file__, "told_no_more", str(tmp_path)],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        said = re.findall(rf"^{rank}: (.*)$", done.stdout, re.MULTILINE)
        launch_cases.assert_shares(rank, said)


def test_workers_of_ray_train_as_ranks_and_go_on_when_one_is_killed(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    found = []
    for name in ("whole", "killed"):
        directory = tmp_path / name
        process = subprocess.Popen(
            [sys.executable, str(EXAMPLE), str(directory)],
            env=os.environ | {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if name == "killed":
            while not any((directory / "gpt").glob("checkpoint_*")):
                assert process.poll() is None
                time.sleep(0.01)
            os.kill(_workers()[-1], signal.SIGKILL)
        said, _ = process.communicate(timeout=600)
        assert process.returncode == 0, said
        found.append(ast.literal_eval(re.findall(r"^{'loss'.*}$", said, re.MULTILINE)[-1]))
    whole, killed = found
    assert whole == killed
    assert (whole["epoch"], whole["ranks"]) == (3, 2)
    assert "share" in whole["link"]
    assert whole["loss"] < 4
    assert whole["peak_device_bytes"] <= 16 << 20


def _workers() -> list[int]:
    """Processes that Ray Train has started to train in."""
    return [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if path.read_bytes().startswith(b"ray::RayTrainWorker")
    ]
