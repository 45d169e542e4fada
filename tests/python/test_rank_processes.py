"""Ranks that tests start end with the tests, however these end."""

import os
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

import rank_processes

STARTS_ONE = """
import sys
from pathlib import Path
import rank_processes, test_rank_processes
rank, = rank_processes.start(test_rank_processes.sleeps, 1, Path(sys.argv[1]))
print(rank.pid, flush=True)
input()
"""


def sleeps(_: Path) -> None:
    """A rank that nothing ends but a signal."""
    time.sleep(600)


def test_ranks_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STARTS_ONE, str(tmp_path)],
        cwd=Path(__file__).parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout
        rank = os.pidfd_open(int(process.stdout.readline()))
        process.kill()
    over, _, _ = select.select([rank], [], [], 30)
    os.close(rank)
    assert over


def test_ranks_are_killed_where_waiting_for_them_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = rank_processes.start(sleeps, 2, tmp_path)
    wait = rank_processes.Rank.wait

    def interrupted(rank: rank_processes.Rank, timeout: float | None = None) -> int:
        if timeout:
            raise KeyboardInterrupt
        return wait(rank, timeout)

    monkeypatch.setattr(rank_processes.Rank, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rank_processes.finish(ranks)
    assert [wait(rank, 0) for rank in ranks] == [-9, -9]


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
