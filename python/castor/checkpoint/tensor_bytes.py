"""The bytes of tensors, a piece at a time, without copies where the memory is in order already."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator

import torch

from castor.checkpoint.files import PIECE_BYTES
from castor.lazy.files import DTYPES

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""Names of types in the safetensors format."""


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Returns the memory of a contiguous CPU tensor, without numpy; the caller keeps it alive."""
    if tensor.nbytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yields the elements of a tensor in row-major order, as pieces of PIECE_BYTES at most.

    Contiguous CPU tensors are not copied; others are, one piece at a time. A piece is valid until
    the next one is asked for.
    """
    tensor = tensor.detach()
    on_host = tensor.device.type == "cpu" and not tensor.is_conj() and not tensor.is_neg()
    if on_host and tensor.is_contiguous():
        memory = memory_of(tensor)
        for start in range(0, len(memory), PIECE_BYTES):
            yield memory[start : start + PIECE_BYTES]
        return
    if tensor.nbytes == 0:
        return
    # Not from malloc: its heap would grow by several such buffers, and fragmentation would keep it.
    scratch = torch.frombuffer(mmap.mmap(-1, min(tensor.nbytes, PIECE_BYTES)), dtype=torch.uint8)
    for part in _parts(tensor):
        copy = scratch[: part.nbytes].view(part.dtype).view(part.shape)
        yield memory_of(copy.copy_(part))


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields views of PIECE_BYTES at most, in row-major order."""
    if tensor.nbytes <= PIECE_BYTES:
        yield tensor
    elif (row_bytes := tensor.nbytes // tensor.shape[0]) > PIECE_BYTES:
        for row in tensor:
            yield from _parts(row)
    else:
        yield from tensor.split(PIECE_BYTES // row_bytes)
