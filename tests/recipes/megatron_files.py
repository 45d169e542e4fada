"""Writes token files as Megatron-LM does."""

import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

_CODES = {np.uint8: 1, np.int8: 2, np.int16: 3, np.int32: 4, np.int64: 5, np.uint16: 8}


def write(
    prefix: Path, documents: Iterable[Iterable[npt.ArrayLike]], dtype: type[np.integer] = np.int32
) -> None:
    """Writes PREFIX.bin and PREFIX.idx of documents, each of which has some sequences of ids."""
    sequences, borders = list[npt.NDArray[np.integer]](), [0]
    for document in documents:
        sequences += [np.asarray(one, dtype) for one in document]
        borders.append(len(sequences))
    lengths = np.asarray([len(one) for one in sequences], np.int32)
    begins = (np.cumsum(lengths, dtype=np.int64) - lengths) * np.dtype(dtype).itemsize
    head = struct.pack("<9sQBQQ", b"MMIDIDX", 1, _CODES[dtype], len(sequences), len(borders))
    index = head + lengths.tobytes() + begins.tobytes() + np.asarray(borders, np.int64).tobytes()
    prefix.with_suffix(".bin").write_bytes(b"".join(one.tobytes() for one in sequences))
    prefix.with_suffix(".idx").write_bytes(index)
