"""`castor run`: a script on several ranks."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from rank_processes import Rank, nursery, run_python

SCRIPT = """
import os
import sys
import time
from pathlib import Path

import torch
from torch import distributed

import castor

castor.launch_from_torch()
rank = distributed.get_rank()
total = torch.ones(1)
distributed.all_reduce(total)
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("rank", rank, "of", int(total), sys.argv[1:], "OMP_NUM_THREADS" in os.environ)
if "fails" in sys.argv and rank == 1 and attempt == 0:
    raise ValueError("[what] went wrong on rank 1")
"""
# What the launcher makes of ranks, which need not import torch for it.
ENDS = """
import os
import sys
import time
from pathlib import Path

rank = int(os.environ["RANK"])
print("rank", rank, "of", os.environ["WORLD_SIZE"], sys.argv[1:])
if "waits" in sys.argv:
    Path(f"process{rank}.new").write_text(str(os.getpid()))
    Path(f"process{rank}.new").rename(f"process{rank}")
    time.sleep(600)
if "fails" in sys.argv and rank == 1:
    raise ValueError("[what] went wrong on rank 1")
if "is-killed" in sys.argv and rank == 1:
    os.kill(os.getpid(), 9)
if "fails-first" in sys.argv and rank == 0:
    sys.exit(3)
"""


@pytest.fixture(autouse=True)
def _where_the_scripts_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "ends.py").write_text(ENDS)


def castor_run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "castor", "run", *arguments, TMPDIR=str(Path.cwd()))


@pytest.mark.smoke
def test_ranks_run_a_script_with_its_own_arguments(tmp_path: Path) -> None:
    done = castor_run("--nproc", "2", "script.py", "--nproc", "7", "-m")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "rank 0 of 2 ['--nproc', '7', '-m'] True\n"
    assert list(tmp_path.glob("castor-run-*")) == []


def test_a_module_runs_and_the_other_ranks_outputs_are_kept_where_asked(tmp_path: Path) -> None:
    done = castor_run("--nproc", "2", "--log-dir", "logs", "-m", "ends", "own")
    assert done.returncode == 0, done.stderr
    (log,) = tmp_path.glob("logs/*/attempt_0/1/stdout.log")
    assert log.read_text() == "rank 1 of 2 ['own']\n"


@pytest.mark.smoke
def test_a_failed_rank_is_named_with_the_end_of_its_log() -> None:
    done = castor_run("--nproc", "2", "ends.py", "fails")
    assert done.returncode == 1
    assert "rank 1 (process " in done.stderr
    assert "failed with exit status 1" in done.stderr
    assert "ValueError: [what] went wrong on rank 1" in done.stderr


@pytest.mark.parametrize(
    ("argument", "status", "message"),
    [("is-killed", 137, "was ended by SIGKILL"), ("fails-first", 3, "exit status 3")],
)
def test_the_exit_status_is_that_of_the_rank_that_failed(
    argument: str, status: int, message: str
) -> None:
    done = castor_run("--nproc", "2", "ends.py", argument)
    assert done.returncode == status
    assert message in done.stderr


def test_ranks_begin_again_as_often_as_asked() -> None:
    done = castor_run("--nproc", "2", "--max-restarts", "1", "script.py", "fails")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["rank 0 of 2 ['fails'] True"] * 2


def test_a_signal_ends_all_ranks_and_is_the_exit_status(tmp_path: Path) -> None:
    arguments = ("-m", "castor", "run", "--nproc", "2", "ends.py", "waits")
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    launcher = Rank(nursery(0)[0], environment, tmp_path, *arguments)
    files = [tmp_path / f"process{rank}" for rank in range(2)]
    while not all(file.exists() for file in files):
        assert not launcher.over(), launcher.outcome()
        time.sleep(0.05)
    os.kill(launcher.pid, signal.SIGTERM)
    assert launcher.wait(timeout=120) == 128 + signal.SIGTERM
    said = launcher.outcome().errors
    assert said.endswith("castor run: SIGTERM: all ranks have been ended\n")
    assert "Traceback" not in said
    assert list(tmp_path.glob("castor-run-*")) == []
    for file in files:
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nproc", "0", "script.py"], "--nproc is 0; give 1 or more"),
        (["--max-restarts", "-1", "script.py"], "--max-restarts is -1; give 0 or more"),
        (["missing.py"], "there is no file missing.py"),
        (["--nodes", "2", "script.py"], "--nodes 2 needs --rendezvous HOST:PORT"),
    ],
)
def test_what_does_not_make_sense_is_named(arguments: list[str], message: str) -> None:
    done = castor_run(*arguments)
    assert done.returncode == 1
    assert message in done.stderr
