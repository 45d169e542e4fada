"""Ranks that wait for one another say so, whatever the others do meanwhile."""

import re
from pathlib import Path

import pytest

import wait_cases
from rank_processes import run, succeeded
from wait_cases import PATIENCE, TIMEOUT

WAITED = rf"has waited {PATIENCE:g} s there for"
OF_ALL = (
    "makes process groups",
    "ends a save after step 1",
    "reads the optimizer state of parameter '.*' after step 1",
    "ends backward pass 1 of step 2",
    r"calls optimizer\.step\(\) after 1 backward passes, for step 2",
)
"""Where all ranks come, one of them late."""


def assert_said(output: str, place: str, awaited: str, last: str = "") -> None:
    """A rank has."""
    met = f"Last, all of them met where a rank {last}" if last else ""
    told = rf"RuntimeWarning: rank \d of \d {place}, and {WAITED} {awaited}; it goes on.*{met}"
    assert re.search(rf"^\w+\.py: {told}", output, re.M), (output, told)


@pytest.mark.parametrize(
    ("link", "awaited"),
    [
        ("auto", r"rank 1 \(process \d+\)"),
        pytest.param("group", "rank 1", marks=pytest.mark.whole),
    ],
)
def test_a_rank_that_waits_says_where_for_whom_and_where_all_were_last(
    link: str, awaited: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CASTOR_RANK_LINK", link)
    first, _ = succeeded(run(wait_cases.comes_late, 2, tmp_path))
    assert_said(first, OF_ALL[0], "another rank")
    for place in OF_ALL[1:]:
        assert_said(first, place, awaited)
    assert_said(first, OF_ALL[4], awaited, OF_ALL[3])


def test_ranks_that_share_no_memory_know_that_another_is_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CASTOR_RANK_LINK", "group")
    first, _ = succeeded(run(wait_cases.comes_late_to_a_step, 2, tmp_path))
    backward, step = OF_ALL[-2:]
    assert_said(first, backward, "rank 1")
    assert_said(first, step, "rank 1", backward)


def test_ranks_of_several_machines_name_who_is_missing(tmp_path: Path) -> None:
    outputs = succeeded(run(wait_cases.comes_late_to_a_step, 4, tmp_path, nodes=2))
    backward, step = OF_ALL[-2:]
    for rank, awaited in (
        (0, r"rank 1 \(process \d+\)"),  # of its machine, which waits for the last rank
        (1, "rank 3"),
        (2, r"rank 3 \(process \d+\)"),
    ):
        assert_said(outputs[rank], backward, awaited)
        assert_said(outputs[rank], step, awaited, backward)


def test_a_hook_that_reads_gradients_waits_aloud(tmp_path: Path) -> None:
    first, _ = succeeded(run(wait_cases.reads_gradients_in_backward, 2, tmp_path))
    assert first.startswith("True")
    assert_said(first, "is in a backward pass that reads the mean of gradients", r"rank 1 \(.*\)")


def test_nobody_is_missing_where_all_have_come_to_a_save(tmp_path: Path) -> None:
    assert succeeded(run(wait_cases.saves_slowly, 2, tmp_path)) == ["", ""]


def test_a_wait_ends_at_the_timeout_of_the_process_group(tmp_path: Path) -> None:
    first, last = (one.output for one in run(wait_cases.never_comes, 2, tmp_path))
    waited = r"rank 1 \(process \d+\)"
    assert_said(first, "ends backward pass 1 of step 2", waited, r"calls optimizer\.step")
    ended = rf"^Error: rank 0 of 2 lost the others: {waited} has not come for {TIMEOUT} s, "
    assert re.search(ended, first, re.M), first
    assert "wait_cases.py: RuntimeWarning" in first, "the line is the script's"
    assert last.strip() == "the barrier has ended as well"


def test_ranks_with_parts_of_layers_say_it(tmp_path: Path) -> None:
    first, _ = succeeded(run(wait_cases.divided, 2, tmp_path))
    awaited = r"rank 1 \(process \d+\)"
    assert_said(first, "is at the check that all were given the same: the inputs of.*", awaited)
    assert_said(first, "sums the outputs of tensor-parallel layers", awaited)
    assert_said(first, r"is at what ranks tell each other between passes \(a step.*", awaited)


def test_ranks_with_stages_say_it_and_do_not_take_computing_for_waiting(tmp_path: Path) -> None:
    first, last = succeeded(run(wait_cases.stages, 2, tmp_path))
    before, slow, called = re.split("^(?:slow|called):$", first, flags=re.M)
    awaited = r"rank 1 \(process \d+\)"
    assert_said(before, "is at the check that all were given the same.*", awaited)
    for output in (slow, called):
        assert_said(output, "is in a pass through all stages", "a rank with another stage")
    assert "has waited" not in last
