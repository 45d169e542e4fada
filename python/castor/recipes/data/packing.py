"""Packs documents into rows of at most max_length tokens, kept apart from each other.

Documents are taken from the longest to the shortest, and each goes into the fullest row that still
has room for it (best-fit decreasing; Johnson 1974). Position ids restart at 0 in each document, by
which attention keeps documents apart. The label of each document's first token is -100: a causal
model would predict it from the last token of the document before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from castor.recipes.data import IGNORED

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Pieces:
    """Parts of documents, each of which fits into a row."""

    documents: Integers
    """Index of the document of each piece."""
    begins: Integers
    """First token of each piece in its document."""
    lengths: Integers
    """Tokens of each piece."""

    @classmethod
    def whole(cls, lengths: Integers) -> Pieces:
        """Returns documents that are a piece each."""
        return cls(np.arange(len(lengths)), np.zeros(len(lengths), np.int64), lengths)


def split(lengths: Integers, capacity: int) -> Pieces:
    """Splits documents that are longer than a row.

    A piece begins with the last token of the piece before it, which no loss counts there: every
    token but a document's first is predicted once, as from the stream of Megatron-LM's GPTDataset.

    Args:
        lengths: Tokens of each document, at least 1.
        capacity: Tokens that a row holds, at least 2.
    """
    counts = np.maximum(-(-(lengths - 1) // (capacity - 1)), 1)
    documents = np.repeat(np.arange(len(lengths)), counts)
    numbers = np.arange(len(documents)) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = numbers * (capacity - 1)
    return Pieces(documents, begins, np.minimum(lengths[documents] - begins, capacity))


def best_fit_decreasing(lengths: npt.ArrayLike, capacity: int) -> list[list[int]]:
    """Chooses which documents share a row.

    The choice depends on the lengths alone; documents of one length are taken in their order.

    Args:
        lengths: Tokens of each document, at least 1 and at most `capacity`.
        capacity: Tokens that a row holds.

    Returns:
        The indices of each row's documents.

    Raises:
        ValueError: A document is empty, or longer than a row.
    """
    sizes = np.asarray(lengths, np.int64).reshape(-1)
    wrong = np.flatnonzero((sizes < 1) | (sizes > capacity))
    if len(wrong):
        at = int(wrong[0])
        raise ValueError(
            f"document {at} has {sizes[at]} tokens; a row holds 1 to {capacity} tokens of each"
        )
    rows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # rows by the room they have
    rooms = 0  # bit r: a row has room for r tokens
    for document in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[document])
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            row = with_room[room].pop()
            if not with_room[room]:
                rooms &= ~(1 << room)
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(document)
        if left := room - size:
            with_room[left].append(row)
            rooms |= 1 << left
    return rows


def join(
    ids: npt.NDArray[Any], labels: npt.NDArray[Any], lengths: Integers
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
    """Makes labels and position ids of documents that follow each other.

    Args:
        ids: Token ids of all documents, one after the other.
        labels: Their labels.
        lengths: Tokens of each document.

    Returns:
        The labels, with IGNORED at each document's first token, and the position ids.
    """
    begins = np.cumsum(lengths) - lengths
    kept = labels.copy()
    kept[begins] = IGNORED
    positions = np.arange(len(ids)) - np.repeat(begins, lengths)
    return kept, positions.astype(np.int32)


def density(lengths: npt.ArrayLike, num_rows: int, capacity: int) -> float:
    """Returns the share of the rows' room that holds tokens; 0 without rows."""
    return float(np.sum(lengths)) / (num_rows * capacity) if num_rows else 0.0
