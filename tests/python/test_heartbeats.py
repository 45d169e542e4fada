"""Ranks that share no memory notice one that is killed or stopped, and name it."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

import heartbeat_cases
import rank_cases
import simulated_gpu
from rank_processes import Outcome, Scenario, finish, run, start, succeeded

SECONDS = 60
IN_MODULE = r"last heard in the forward of module 'layers\.2'"


def _outcomes_without(
    scenario: Scenario, size: int, directory: Path, *, victim: int, nodes: int = 1
) -> list[Outcome]:
    """Outcomes of the ranks but the victim; all have ended in time."""
    ranks = start(scenario, size, directory, nodes=nodes)
    others = [rank for number, rank in enumerate(ranks) if number != victim]
    try:
        for rank in others:
            rank.wait(SECONDS + 30)  # imports and the first step are in it
        since = time.time() - float((directory / "lost").read_text())
    finally:
        if not ranks[victim].over():
            os.kill(ranks[victim].pid, signal.SIGKILL)
        outcomes = finish(ranks)
    assert since < SECONDS
    del outcomes[victim]
    return outcomes


def _host() -> str:
    return re.escape(os.uname().nodename)


def _assert_checkpoint_loads(directory: Path) -> None:
    booster, model, optimizer = rank_cases.boost(rank_cases.TOWER)
    assert booster.load(directory / "run", model, optimizer).step == 1


@pytest.mark.parametrize(
    ("size", "victim", "how", "stage"),
    [
        (2, 1, "killed", 1), (2, 1, "stopped", 1), (2, 0, "stopped", 1),
        (4, 2, "killed", 1), (4, 2, "stopped", 1),
        pytest.param(2, 1, "stopped", 3, marks=pytest.mark.whole),
    ],
)  # fmt: skip
def test_ranks_without_shared_memory_name_the_lost_one(
    size: int, victim: int, how: str, stage: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in (("CASTOR_RANK_LINK", "group"), ("VICTIM", str(victim)), ("HOW", how)):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("ZERO_STAGE", str(stage))
    named = rf"lost the others: rank {victim} \(process \d+\).*, on host {_host()}, {IN_MODULE}"
    for outcome in _outcomes_without(heartbeat_cases.one_is_lost, size, tmp_path, victim=victim):
        assert outcome.code != 0
        assert re.search(named, outcome.errors), outcome.errors
    monkeypatch.delenv("CASTOR_RANK_LINK")
    _assert_checkpoint_loads(tmp_path)


def test_ranks_of_two_machines_end_when_one_of_them_stops(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The one beside it sees it in shared memory; the others hear of it."""
    for name, value in (("VICTIM", "3"), ("HOW", "stopped")):
        monkeypatch.setenv(name, value)
    outcomes = _outcomes_without(heartbeat_cases.one_is_lost, 4, tmp_path, victim=3, nodes=2)
    for outcome in outcomes:
        assert outcome.code != 0
        assert re.search(rf"rank 3 \(process \d+\).*{IN_MODULE}", outcome.errors), outcome.errors
    _assert_checkpoint_loads(tmp_path)


@pytest.mark.parametrize("seed", simulated_gpu.SEEDS[:1])
def test_a_collective_of_devices_ends_without_shared_memory(
    seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    simulated_gpu.require()
    monkeypatch.setenv("CASTOR_TEST_DEVICE", f"simgpu:{seed}")
    for name, value in (("CASTOR_RANK_LINK", "group"), ("HOW", "stopped")):
        monkeypatch.setenv(name, value)
    (outcome,) = _outcomes_without(
        heartbeat_cases.one_is_lost_beside_devices, 2, tmp_path, victim=1
    )
    assert re.search(
        rf"lost the others: rank 1 \(process \d+\) has not been heard for 3 s.* on host {_host()}",
        outcome.output,
    ), outcome


@pytest.mark.parametrize("link", ["group", "auto"])
def test_a_rank_that_ends_well_is_not_lost(
    link: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CASTOR_RANK_LINK", link)
    outputs = succeeded(run(heartbeat_cases.ends_well, 2, tmp_path))
    assert [output.split()[0] for output in outputs] == ["1", "1"]
