"""The bytes of tensors, a piece at a time, without copies where the memory is already in order."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch

from castor.checkpoint.files import PIECE_BYTES
from castor.lazy.files import DTYPES

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""What the safetensors format calls them."""


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, which the caller keeps alive. Needs no numpy."""
    if tensor.nbytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The elements of a tensor in row-major order, as bytes.

    Contiguous CPU tensors are read where they lie; others are copied, at most PIECE_BYTES at a
    time. A piece is valid until the next one is asked for.
    """
    tensor = tensor.detach()
    on_host = tensor.device.type == "cpu" and not tensor.is_conj() and not tensor.is_neg()
    if on_host and tensor.is_contiguous():
        memory = memory_of(tensor)
        for start in range(0, len(memory), PIECE_BYTES):
            yield memory[start : start + PIECE_BYTES]
    elif tensor.nbytes <= PIECE_BYTES:
        copy = tensor.resolve_conj().resolve_neg().cpu().contiguous()
        yield memory_of(copy)
    else:
        row_bytes = tensor.nbytes // tensor.shape[0]
        if row_bytes > PIECE_BYTES:
            for row in tensor:
                yield from pieces(row)
        else:
            for rows in tensor.split(PIECE_BYTES // row_bytes):
                yield from pieces(rows)
