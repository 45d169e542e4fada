"""How many ranks a process finds on its machine, by what has started it."""

import subprocess
import sys
from pathlib import Path

import pytest

import launch_cases
from castor.runtime.ranks import launched_size, rank_of_node, ranks_of_node
from rank_processes import run, run_python, succeeded

TORCH = {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_NUM_TASKS": "8",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (1, 0, 1)),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, (1, 0, 1)),  # of somebody else's
        (TORCH, (8, 0, 1)),
        (TORCH | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, (8, 1, 4)),
        (TORCH | {"MASTER_ADDR": "localhost"}, (8, 5, 8)),
        (TORCH | {"MASTER_ADDR": "127.0.0.1"}, (8, 5, 8)),
        (TORCH | SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, (8, 1, 4)),
        (TORCH | SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4,3,1"}, (8, 1, 3)),
        (TORCH | SLURM | {"SLURM_STEP_TASKS_PER_NODE": "8"}, (8, 0, 1)),  # no second node
        # A task a node, each of which has started its ranks.
        (TORCH | SLURM | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
                          "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}, (8, 3, 4)),
        (TORCH | {"OMPI_COMM_WORLD_LOCAL_RANK": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, (8, 2, 4)),
    ],
)  # fmt: skip
def test_what_a_launcher_has_told(
    environment: dict[str, str], expected: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*TORCH, *SLURM, "SLURM_STEP_TASKS_PER_NODE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (launched_size(), rank_of_node(), ranks_of_node()) == expected


def test_torchs_environment_is_all_that_castor_needs(tmp_path: Path) -> None:
    """As PyTorchJob sets it, and scripts do; budgets are a rank's part of the machine."""
    for rank, output in enumerate(succeeded(run(launch_cases.told_no_more, 2, tmp_path))):
        launch_cases.assert_shares(rank, output.splitlines())


def test_ranks_of_a_machine_that_were_told_of_none_warn(tmp_path: Path) -> None:
    """Each had a budget of all memory."""
    for output in succeeded(run(launch_cases.elsewhere, 2, tmp_path)):
        assert "2 ranks are on this machine" in output
        assert "Set LOCAL_WORLD_SIZE=2, and LOCAL_RANK from 0 to 1" in output


def test_processes_that_a_script_has_spawned_share_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in TORCH:
        monkeypatch.delenv(name, raising=False)
    done = run_python(launch_cases.__file__, "spawn", tmp_path, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        launch_cases.assert_shares(rank, (tmp_path / f"{rank}.txt").read_text().splitlines())


def test_a_forked_child_ends_where_its_parent_has_a_process_group(tmp_path: Path) -> None:
    """It waited for threads of the group, which it does not have."""
    command = [sys.executable, launch_cases.__file__, "forks", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.returncode) == ("0\n", 0), done.stderr
