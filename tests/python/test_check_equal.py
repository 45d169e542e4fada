"""The check that ranks were given the same names all that differ, and how."""

from __future__ import annotations

from typing import Any

import pytest

from castor import UsageError
from castor.runtime.rank_group import check_equal


def differ(*values: Any, **options: Any) -> str:
    with pytest.raises(UsageError) as raised:
        check_equal([{"its name": value} for value in values], **options)
    return str(raised.value)


def test_equal_values_pass() -> None:
    check_equal([{"a": [1], "b": None}] * 3)
    check_equal([])
    check_equal([{"a": 1}, {"a": 1.0}])


def test_two_ranks_are_named_with_what_each_was_given() -> None:
    assert differ(1, 2) == (
        "rank 0 and rank 1 differ in its name: 1 and 2; all ranks train one model, and are given "
        "the same"
    )
    assert differ(1, 2, remedy="give 1").endswith("differ in its name: 1 and 2; give 1")


def test_ranks_with_one_value_are_named_together() -> None:
    said = differ("a", "a", "a", "b", "a", "c")
    assert said.startswith("ranks 0-2, 4, rank 3 and rank 5 differ in its name: a, b and c;")


def test_ranks_have_their_numbers_in_the_run() -> None:
    assert differ("a", "b", numbers=[6, 9]).startswith("rank 6 and rank 9 differ in its name")


def test_of_many_values_some_are_named() -> None:
    said = differ(*range(64))
    assert said.startswith(
        "rank 0, rank 1, rank 2 and 61 others differ in its name: 0, 1, 2 and 61"
    )


def test_the_first_name_that_differs_is_told_and_one_may_be_missing() -> None:
    with pytest.raises(UsageError, match="rank 0 and rank 1 differ in b: 1 and None"):
        check_equal([{"a": 0, "b": 1, "c": 2}, {"a": 0, "c": 3}])
