"""Fifty kills -9 while saving: every restart finds a whole checkpoint and goes on bitwise."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import grids

SCRIPT = Path(__file__).with_name("dying_run.py")
LIVES = 50 if grids.WHOLE else 12


@pytest.mark.slow
@pytest.mark.parametrize("what", ["run", "beside", "nvme", "weights", "model"])
def test_every_restart_finds_a_whole_checkpoint(what: str, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), what, str(LIVES), "1", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert counts["starts"] == LIVES + 1
    assert counts["saved"] + counts["killed_after"] >= LIVES // 5
    # Of the last life alone; the ones before were cleaned up.
    assert counts["left"] <= 1
