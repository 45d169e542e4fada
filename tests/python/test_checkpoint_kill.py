"""Fifty kills -9 while saving: every restart finds a whole checkpoint and goes on bitwise."""

import json
from pathlib import Path

import pytest

import grids
from rank_processes import run_python

SCRIPT = Path(__file__).with_name("dying_run.py")
LIVES = 50 if grids.WHOLE else 12


@pytest.mark.slow
@pytest.mark.parametrize(
    "what", ["run", "beside", pytest.param("nvme", marks=pytest.mark.whole), "weights", "model"]
)
def test_every_restart_finds_a_whole_checkpoint(what: str, tmp_path: Path) -> None:
    done = run_python(SCRIPT, what, str(LIVES), "1", tmp_path, timeout=600)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert counts["starts"] == LIVES + 1
    assert counts["saved"] > LIVES // 2, "the seed has most lives wait for one save or two"
    # Of the last life alone; the ones before were cleaned up.
    assert counts["left"] <= 1
