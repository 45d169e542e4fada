"""Token files of Megatron-LM: PREFIX.bin holds token ids, PREFIX.idx where sequences begin."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from castor.checkpoint.files import write_file

_MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")
_VERSION = 1
_DTYPES: dict[int, type[np.generic]] = {
    1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64, 7: np.float32,
    8: np.uint16,
}  # fmt: skip


def paths(prefix: str | Path) -> tuple[Path, Path]:
    """Returns the .bin and the .idx file of a prefix; either file's own name serves as well."""
    stem = str(prefix)
    stem = stem[:-4] if stem.endswith((".bin", ".idx")) else stem
    return Path(f"{stem}.bin"), Path(f"{stem}.idx")


class TokenFile:
    """Reads one pair of files through memory maps; nothing is loaded until it is asked for.

    Attributes:
        lengths: Tokens of each sequence, int32.
        documents: Index of the first sequence of each document, and the number of sequences at the
            end, int64.
        dtype: Type of the stored token ids.
    """

    def __init__(self, prefix: str | Path) -> None:
        """Opens and checks the files.

        Raises:
            FileNotFoundError: One of the two files is not there.
            ValueError: A file is truncated, or no token file; the message has the numbers.
        """
        self._bin, index = paths(prefix)
        size, num_bytes = index.stat().st_size, self._bin.stat().st_size
        with index.open("rb") as file:
            head = file.read(_HEAD.size)
        if head[: len(_MAGIC)] != _MAGIC[: len(head)] or not head:
            raise ValueError(
                f"{index} is no index of Megatron-LM: it begins with {head[:9]!r} instead of "
                f"{_MAGIC!r}"
            )
        if len(head) < _HEAD.size:
            raise ValueError(
                f"{index} is truncated: it has {len(head)} of the head's {_HEAD.size} bytes"
            )
        _, version, code, num_sequences, num_documents = _HEAD.unpack(head)
        if version != _VERSION:
            raise ValueError(f"{index} has version {version}; only version {_VERSION} can be read")
        if code not in _DTYPES or not np.issubdtype(_DTYPES[code], np.integer):
            kind = np.dtype(_DTYPES[code]).name if code in _DTYPES else "unknown"
            raise ValueError(f"{index} has type code {code} ({kind}), which is none of token ids")
        needed = _HEAD.size + 12 * num_sequences + 8 * num_documents
        if size != needed:
            what = "is truncated" if size < needed else "is longer than its head says"
            raise ValueError(
                f"{index} {what}: {num_sequences} sequences and {num_documents} document indices "
                f"take {needed} bytes, and the file has {size}"
            )
        self.dtype = np.dtype(_DTYPES[code])
        places = np.memmap(index, np.uint8, "r")
        ends = np.cumsum([_HEAD.size, 4 * num_sequences, 8 * num_sequences])
        self.lengths: npt.NDArray[np.int32] = places[ends[0] : ends[1]].view(np.int32)
        self._pointers = places[ends[1] : ends[2]].view(np.int64)
        self.documents: npt.NDArray[np.int64] = places[ends[2] :].view(np.int64)
        self._check(index, num_bytes)
        self._tokens: npt.NDArray[Any] = (
            np.memmap(self._bin, self.dtype, "r", shape=(num_bytes // self.dtype.itemsize,))
            if num_bytes
            else np.zeros(0, self.dtype)
        )

    def _check(self, index: Path, num_bytes: int) -> None:
        """Checks that lengths, pointers and documents fit each other and the .bin file."""
        width = self.dtype.itemsize
        lengths = self.lengths.astype(np.int64)
        if (lengths < 0).any():
            at = int(np.argmax(lengths < 0))
            raise ValueError(f"{index}: sequence {at} has {lengths[at]} tokens")
        expected = np.concatenate(([0], np.cumsum(lengths)))
        wrong = np.flatnonzero(self._pointers != expected[:-1] * width)
        if len(wrong):
            at = int(wrong[0])
            raise ValueError(
                f"{index}: sequence {at} begins at byte {self._pointers[at]}, and the lengths "
                f"before it say {expected[at] * width}"
            )
        if num_bytes != expected[-1] * width:
            what = "is truncated" if num_bytes < expected[-1] * width else "is too long"
            raise ValueError(
                f"{self._bin} {what}: {expected[-1]} tokens of {self.dtype.name} take "
                f"{expected[-1] * width} bytes, and the file has {num_bytes}"
            )
        borders = self.documents
        ordered = len(borders) > 0 and borders[0] == 0 and borders[-1] == len(lengths)
        if not ordered or (np.diff(borders) < 0).any():
            raise ValueError(
                f"{index}: the document indices do not rise from 0 to the number of sequences, "
                f"{len(lengths)}"
            )

    def __len__(self) -> int:
        """Returns the number of documents."""
        return len(self.documents) - 1

    def document(self, index: int) -> npt.NDArray[Any]:
        """Returns the token ids of one document, a view of the file: all its sequences in order.

        Raises:
            IndexError: There is no such document.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {self._bin}, which has {len(self)}")
        first, last = self.documents[index : index + 2]
        if first == last:
            return self._tokens[:0]
        begin = int(self._pointers[first]) // self.dtype.itemsize
        return self._tokens[begin : begin + int(self.lengths[first:last].sum(dtype=np.int64))]


def smallest_dtype(vocab_size: int) -> type[np.integer[Any]]:
    """Returns the type that Megatron-LM takes for a vocabulary: uint16 below 65,500, else int32."""
    return np.uint16 if vocab_size < 65500 else np.int32


def write(
    prefix: str | Path,
    documents: Iterable[Iterable[npt.ArrayLike]],
    dtype: type[np.integer[Any]] = np.int32,
) -> None:
    """Writes a pair of files; each appears when it is complete, the index last.

    Args:
        prefix: Path without .bin and .idx.
        documents: Each document's sequences, each of which is an array of token ids.
        dtype: Type that the files store.

    Raises:
        ValueError: A token id does not fit the type, or the type is none of Megatron-LM's.
    """
    code = next((code for code, known in _DTYPES.items() if known is dtype), None)
    if code is None or not issubclass(dtype, np.integer):
        raise ValueError(f"Megatron-LM's files hold no token ids of type {np.dtype(dtype).name}")
    limits = np.iinfo(dtype)
    lengths, borders = list[int](), [0]
    data, index = paths(prefix)

    def in_bytes() -> Iterator[bytes]:
        for document in documents:
            for sequence in document:
                tokens = np.asarray(sequence)
                if tokens.size and not limits.min <= tokens.min() <= tokens.max() <= limits.max:
                    raise ValueError(
                        f"document {len(borders) - 1} for {data} has token ids {tokens.min()} to "
                        f"{tokens.max()}, which {limits.dtype} does not hold"
                    )
                lengths.append(tokens.size)
                yield tokens.astype(dtype).tobytes()
            borders.append(len(lengths))
        # A reader looks for the index: while it is not there, no new .bin belongs to an old one.
        index.unlink(missing_ok=True)

    write_file(data, in_bytes())
    sizes = np.asarray(lengths, np.int32)
    pointers = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)[:-1]))[: len(sizes)]
    write_file(
        index,
        [
            _HEAD.pack(_MAGIC, _VERSION, code, len(sizes), len(borders)),
            sizes.tobytes(),
            (pointers * np.dtype(dtype).itemsize).astype(np.int64).tobytes(),
            np.asarray(borders, np.int64).tobytes(),
        ],
    )
