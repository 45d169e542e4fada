"""`castor run`: a script on several ranks."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

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
if "waits" in sys.argv:
    Path(f"process{rank}").write_text(str(os.getpid()))
    distributed.barrier()
    print("all wait")
    time.sleep(600)
if "fails" in sys.argv and rank == 1 and attempt == 0:
    raise ValueError("[what] went wrong on rank 1")
if "is-killed" in sys.argv and rank == 1:
    os.kill(os.getpid(), 9)
if "fails-first" in sys.argv and rank == 0:
    sys.exit(3)
"""


def castor_run(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (directory / "script.py").write_text(SCRIPT)
    return subprocess.run(
        [sys.executable, "-m", "castor", "run", *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"TMPDIR": str(directory)},
    )


def test_ranks_run_a_script_with_its_own_arguments(tmp_path: Path) -> None:
    done = castor_run(tmp_path, "--nproc", "2", "script.py", "--nproc", "7", "-m")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "rank 0 of 2 ['--nproc', '7', '-m'] True\n"
    assert list(tmp_path.glob("castor-run-*")) == []


def test_a_module_runs_and_the_other_ranks_outputs_are_kept_where_asked(tmp_path: Path) -> None:
    done = castor_run(tmp_path, "--nproc", "2", "--log-dir", "logs", "-m", "script", "own")
    assert done.returncode == 0, done.stderr
    (log,) = tmp_path.glob("logs/*/attempt_0/1/stdout.log")
    assert log.read_text() == "rank 1 of 2 ['own'] True\n"


def test_a_failed_rank_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    done = castor_run(tmp_path, "--nproc", "2", "script.py", "fails")
    assert done.returncode == 1
    assert "rank 1 (process " in done.stderr
    assert "failed with exit status 1" in done.stderr
    assert "ValueError: [what] went wrong on rank 1" in done.stderr


@pytest.mark.parametrize(
    ("argument", "status", "message"),
    [("is-killed", 137, "was ended by SIGKILL"), ("fails-first", 3, "exit status 3")],
)
def test_the_exit_status_is_that_of_the_rank_that_failed(
    argument: str, status: int, message: str, tmp_path: Path
) -> None:
    done = castor_run(tmp_path, "--nproc", "2", "script.py", argument)
    assert done.returncode == status
    assert message in done.stderr


def test_ranks_begin_again_as_often_as_asked(tmp_path: Path) -> None:
    done = castor_run(tmp_path, "--nproc", "2", "--max-restarts", "1", "script.py", "fails")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["rank 0 of 2 ['fails'] True"] * 2


def test_a_signal_ends_all_ranks_and_is_the_exit_status(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, "-m", "castor", "run", "--nproc", "2", "script.py", "waits"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stderr is not None
        while launcher.stdout.readline() not in ("all wait\n", ""):
            pass
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(timeout=120) == 128 + signal.SIGTERM
        said = launcher.stderr.read()
    assert said.endswith("castor run: SIGTERM: all ranks have been ended\n")
    assert "Traceback" not in said
    assert list(tmp_path.glob("castor-run-*")) == []
    for rank in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"process{rank}").read_text()), 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nproc", "0", "script.py"], "--nproc is 0; give 1 or more"),
        (["--max-restarts", "-1", "script.py"], "--max-restarts is -1; give 0 or more"),
        (["missing.py"], "there is no file missing.py"),
        (["--nodes", "2", "script.py"], "--nodes 2 needs --rendezvous HOST:PORT"),
    ],
)
def test_what_does_not_make_sense_is_named(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    done = castor_run(tmp_path, *arguments)
    assert done.returncode == 1
    assert message in done.stderr
