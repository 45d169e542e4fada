"""More than one rank is refused by name: castor does not synchronise models yet."""

import subprocess
import sys
from pathlib import Path

import pytest

from helpers import boost, go_on
from zoo import tower

RANK = """
import sys

import torch
from torch import distributed, nn

import castor

rank, file = int(sys.argv[1]), sys.argv[2]
distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
model = nn.Linear(4, 4)
kind, memory = type(model), model.weight.data_ptr()
plugin = castor.GeminiPlugin(device="cpu", device_memory="1MiB", host_memory="1MiB")
booster = castor.Booster(plugin)
try:
    booster.boost(model, torch.optim.AdamW(model.parameters()))
except NotImplementedError as error:
    print(error)
assert model.weight.data_ptr() == memory and not model._forward_pre_hooks
distributed.barrier()
distributed.destroy_process_group()
"""


def test_two_ranks_of_a_process_group_are_refused(tmp_path: Path) -> None:
    arguments = [
        [sys.executable, "-c", RANK, str(rank), str(tmp_path / "group")] for rank in (0, 1)
    ]
    ranks = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command in arguments
    ]
    for rank in ranks:
        output, errors = rank.communicate(timeout=120)
        assert rank.returncode == 0, errors
        assert "several ranks" in output
        assert "the process group has 2" in output


def test_torchrun_is_refused_before_a_group_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(NotImplementedError, match=r"WORLD_SIZE=2 and RANK=1 are set.*one process"):
        boost(tower())
    monkeypatch.setenv("WORLD_SIZE", "1")
    go_on(boost(tower()), steps=1)


def test_a_world_size_without_a_rank_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")  # a user's own
    go_on(boost(tower()), steps=1)


def test_a_group_of_one_is_one_process(tmp_path: Path) -> None:
    from torch import distributed

    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1
    )
    try:
        go_on(boost(tower()), steps=1)
    finally:
        distributed.destroy_process_group()
