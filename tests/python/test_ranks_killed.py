"""Ranks that are killed while they save: all begin again from the last whole checkpoint.

CASTOR_KILLS=50 kills so many.
"""

import os
import random
import time
from pathlib import Path

import torch

from rank_cases import saves_each_step
from rank_processes import Rank, finish, start, succeeded


def test_killed_while_saving_any_number_of_ranks_goes_on_bitwise(tmp_path: Path) -> None:
    chance = random.Random(int(os.environ.get("CASTOR_KILLS_SEED", "1")))
    (tmp_path / "expected").mkdir()
    succeeded(finish(start(saves_each_step, 1, tmp_path / "expected")))
    expected = torch.load(tmp_path / "expected" / "weights.0.pt")
    left = int(os.environ.get("CASTOR_KILLS", "3"))
    while left > 0:
        directory = tmp_path / str(left)
        directory.mkdir()
        whole = False
        while not whole:
            size = chance.choice((1, 2))
            ranks = start(saves_each_step, size, directory)
            victim = chance.randrange(size)
            whole = left == 0 or not killed_in_a_save(ranks[victim], directory, chance)
            killed = time.monotonic()
            outcomes = finish(ranks)
            if whole:
                succeeded(outcomes)
                continue
            left -= 1
            assert time.monotonic() - killed < 60
            assert outcomes[victim].code == -9
            assert all(outcome.code != 0 for outcome in outcomes)
        for rank in range(size):
            found = torch.load(directory / f"weights.{rank}.pt")
            assert all(map(torch.equal, found, expected))


def begun_saves(directory: Path) -> set[str]:
    return {path.name for path in directory.glob("run/.*")}


def killed_in_a_save(rank: Rank, directory: Path, chance: random.Random) -> bool:
    """Kills it in one of the saves to come; False: it has ended before."""
    saves_before = chance.randrange(4)
    seen = begun_saves(directory)  # what those before it have left
    while not rank.over():
        staged = begun_saves(directory)
        if staged - seen:
            seen |= staged
            saves_before -= 1
            if saves_before < 0:
                time.sleep(chance.uniform(0, 0.03))
                rank.kill()
                return rank.wait() == -9
        time.sleep(0.001)
    return False
