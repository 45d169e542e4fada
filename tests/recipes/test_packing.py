"""Packing against a plain best-fit decreasing, and what packed rows must keep."""

import numpy as np
import pytest

from castor.recipes.data.packing import best_fit_decreasing, density, join, split


def by_hand(lengths: list[int], capacity: int) -> list[list[int]]:
    """Best-fit decreasing that looks at every row; of equally full ones the last changed wins."""
    rows = list[list[int]]()
    when = list[int]()
    for step, at in enumerate(sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))):
        rooms = [capacity - sum(lengths[i] for i in row) for row in rows]
        fitting = [i for i, room in enumerate(rooms) if room >= lengths[at]]
        if fitting:
            best = min(fitting, key=lambda i: (rooms[i], -when[i]))
            rows[best].append(at)
            when[best] = step
        else:
            rows.append([at])
            when.append(step)
    return rows


@pytest.mark.parametrize("seed", range(40))
def test_rows_are_those_of_best_fit_decreasing(seed: int) -> None:
    random = np.random.default_rng(seed)
    capacity = int(random.integers(1, 40))
    lengths = random.integers(1, capacity + 1, random.integers(0, 80)).tolist()
    rows = best_fit_decreasing(lengths, capacity)
    assert rows == by_hand(lengths, capacity)
    assert sorted(document for row in rows for document in row) == list(range(len(lengths)))
    assert all(sum(lengths[document] for document in row) <= capacity for row in rows)


def test_documents_that_no_row_holds_are_refused() -> None:
    with pytest.raises(ValueError, match="document 1 has 9 tokens; a row holds 1 to 8 tokens"):
        best_fit_decreasing([8, 9], 8)
    with pytest.raises(ValueError, match="document 0 has 0 tokens"):
        best_fit_decreasing([0], 8)


def test_positions_restart_and_first_tokens_do_not_count() -> None:
    labels, positions = join(np.arange(6), np.arange(6), np.asarray([3, 1, 2]))
    assert labels.tolist() == [-100, 1, 2, -100, -100, 5]
    assert positions.tolist() == [0, 1, 2, 0, 0, 1]


def test_density() -> None:
    assert density([3, 1, 2], 2, 4) == 0.75
    assert density([], 0, 4) == 0.0


@pytest.mark.parametrize("capacity", [2, 3, 7])
def test_pieces_of_a_document_overlap_by_the_token_that_none_of_them_predicts(
    capacity: int,
) -> None:
    lengths = np.arange(1, 6 * capacity)
    pieces = split(lengths, capacity)
    assert pieces.lengths.max() == capacity
    for document, length in enumerate(lengths.tolist()):
        own = pieces.documents == document
        begins, ends = pieces.begins[own], pieces.begins[own] + pieces.lengths[own]
        assert begins[0] == 0
        assert ends[-1] == length
        assert (begins[1:] == ends[:-1] - 1).all()
        assert (pieces.lengths[own] > 1).all() or length == 1
