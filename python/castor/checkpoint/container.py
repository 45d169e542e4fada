"""The safetensors container: written from the tensors' own memory, checked, read through mmap.

The library's save_file copies every tensor of a file before it writes. This module needs one piece
(PIECE_BYTES) of memory beside the tensors. The library reads the files, after this module has
checked their structure.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from castor import _C
from castor.checkpoint.files import PIECE_BYTES, FileEntry, NewFile, Piece, fsync_file, write_behind
from castor.checkpoint.pace import Pace
from castor.checkpoint.writer import WriteBehind
from castor.errors import CheckpointError
from castor.lazy.files import DTYPES

# --- The bytes of tensors, a piece at a time, without copies where that is possible ---------------

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


# --- The safetensors container ------------------------------------------------------------------

_LENGTH_BYTES = 8
_LIBRARY_ORDER = (
    *("U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16"),
    *("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"),
)
_PLACE = {DTYPES[name]: place for place, name in enumerate(_LIBRARY_ORDER)}
"""The order in which the safetensors library writes types."""
_MAX_HEADER_BYTES = 100_000_000  # the library's own limit


@dataclass(frozen=True, kw_only=True)
class ComputedTensor:
    """A CPU tensor that is computed when its turn to be written comes, and dropped afterwards."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    compute: Callable[[], torch.Tensor]
    written: Callable[[], None] | None = None
    """Callback for when the tensor's bytes have been read and its values are no longer needed."""

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def element_size(self) -> int:
        """Returns the bytes of one element."""
        return self.dtype.itemsize


SavedTensor = torch.Tensor | ComputedTensor
Tensors = Mapping[str, SavedTensor]


def values_of(tensor: SavedTensor) -> torch.Tensor:
    """Returns the tensor's values on the CPU, computed if they have to be."""
    if isinstance(tensor, ComputedTensor):
        return tensor.compute()
    return tensor.detach().cpu()


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """The place of a tensor: bytes [start, end) of `path`, counted from the file's start."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def check_savable(tensors: Mapping[str, Any]) -> None:
    """Checks that safetensors can hold every entry.

    Raises:
        CheckpointError: An entry cannot be saved; the message names the first one.
    """
    for name, tensor in tensors.items():
        if isinstance(tensor, ComputedTensor):
            continue  # castor's own
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(
                f"'{name}' is a {type(tensor).__name__}, not a tensor; checkpoints hold tensors "
                "alone (no pickle): keep it as a buffer, or pass it to booster.save as extra"
            )
        if tensor.layout != torch.strided or tensor.is_meta or tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(
                f"tensor '{name}' ({tensor.dtype}, {tensor.layout}, on {tensor.device}) cannot be "
                "saved; safetensors holds dense tensors with values, of its own types"
            )
        if name == "__metadata__":
            raise CheckpointError("a tensor cannot be called '__metadata__' in safetensors")


def bytes_of(tensors: Tensors) -> int:
    """Returns the bytes of all tensors."""
    return sum(tensor.nbytes for tensor in tensors.values())


def split(
    tensors: Tensors,
    stem: str,
    max_bytes: int | None,
    memory_of: Callable[[SavedTensor], tuple[int, int] | None] = lambda _: None,
) -> dict[str, dict[str, SavedTensor]]:
    """Divides tensors over files, in their order, as Hugging Face does.

    Args:
        tensors: Tensors by name.
        stem: Beginning of the file names: "model" gives model.safetensors, or
            model-00001-of-00002.safetensors and so on.
        max_bytes: Bytes of tensors in one file; a larger tensor gets a file of its own. None: one
            file.
        memory_of: Returns (number, bytes) of the memory that a tensor shares with others. All views
            of one memory go to the file of the first, and count once, as that many bytes. Returns
            None where a tensor has memory of its own.

    Returns:
        Tensors by file name; at least one file.
    """
    shards: list[dict[str, SavedTensor]] = []
    last: dict[str, SavedTensor] = {}
    size = 0
    shard_of: dict[int, dict[str, SavedTensor]] = {}
    for name, tensor in tensors.items():
        number, needed = memory_of(tensor) or (None, tensor.nbytes)
        if number is not None and number in shard_of:
            shard_of[number][name] = tensor
            continue
        if max_bytes is not None and needed > max_bytes:
            shard = {name: tensor}
            shards.append(shard)
        else:
            if max_bytes is not None and size + needed > max_bytes:
                shards.append(last)
                last, size = {}, 0
            shard, size = last, size + needed
            shard[name] = tensor
        if number is not None:
            shard_of[number] = shard
    if last or not shards:
        shards.append(last)
    if len(shards) == 1:
        return {f"{stem}.safetensors": shards[0]}
    return {
        f"{stem}-{i:05}-of-{len(shards):05}.safetensors": shard
        for i, shard in enumerate(shards, start=1)
    }


def write_files(
    directory: Path,
    files: Mapping[str, Tensors],
    pace: Pace | None = None,
    *,
    durable: bool = True,
) -> dict[str, FileEntry]:
    """Writes safetensors files into a directory.

    The files are synced after all tensors have been read. So whoever waits until a tensor has been
    read does not wait for the sync.

    Args:
        directory: Directory to write into.
        files: Tensors by file name; see check_savable.
        pace: Pace of a thread that writes beside the training; None: the training waits.
        durable: Whether to sync the files before returning.

    Returns:
        Size and checksums of each file, by name.

    Raises:
        OSError: The disk refuses.
    """
    entries: dict[str, FileEntry] = {}
    made: list[NewFile] = []
    try:
        with write_behind(ahead=pace is not None and pace.hurried) as behind:
            for name, tensors in files.items():
                made.append(NewFile(directory / name))
                entries[name] = _fill(made[-1], tensors, behind, pace)
                behind.do(made[-1].finish)
    except BaseException:
        for file in made:
            file.discard()
        raise
    for name in files if durable else ():
        fsync_file(directory / name)
    return entries


def _fill(file: NewFile, tensors: Tensors, behind: WriteBehind, pace: Pace | None) -> FileEntry:
    """Reads the tensors of one file and gives their bytes to `behind`, with checksums."""
    ordered = _ordered(tensors)
    checksums: dict[str, str] = {}

    def contents() -> Iterator[Piece]:
        yield _header(ordered), ()
        for name, tensor in ordered:
            checksum = _C.Checksum()
            for piece in pieces(tensor if isinstance(tensor, torch.Tensor) else tensor.compute()):
                yield piece, (checksum,)
                if pace is not None:
                    pace.rest()
            checksums[name] = checksum.hexdigest()
            if isinstance(tensor, ComputedTensor) and tensor.written is not None:
                tensor.written()

    size, checksum = file.fill(contents(), behind)
    return FileEntry(size=size, checksum=checksum, tensors=checksums)


def in_library_order(tensors: Tensors) -> dict[str, SavedTensor]:
    """Orders the tensors of a file as the safetensors library does: by dtype, then by name."""
    return dict(sorted(tensors.items(), key=lambda item: (_PLACE[item[1].dtype], item[0])))


def layout_of(tensors: Tensors) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """Returns the header of the file that holds these tensors, and each tensor's place in it.

    A place is (start, end) in bytes from the beginning of the file; places are in file order.
    """
    ordered = _ordered(tensors)
    header = _header(ordered)
    places, end = {}, len(header)
    for name, tensor in ordered:
        places[name] = (end, end + tensor.nbytes)
        end += tensor.nbytes
    return header, places


def _ordered(tensors: Tensors) -> list[tuple[str, SavedTensor]]:
    """Orders tensors by element size, widest first, so that each is aligned to its dtype."""
    return sorted(tensors.items(), key=lambda item: -item[1].element_size())


def _header(ordered: list[tuple[str, SavedTensor]]) -> bytes:
    document: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in ordered:
        document[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(document, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Reads the header of a safetensors file, and checks that its structure is sound.

    Raises:
        CheckpointError: The file is missing or cut short, or its header contradicts its length.
            The message names the file, and the tensor where there is one.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
                raise CheckpointError(
                    f"{path} is no safetensors file, or was cut short: it has {size} bytes, its "
                    f"header claims {length}"
                )
            document = json.loads(file.read(length))
        if not isinstance(document, dict):
            raise ValueError("the header is no JSON object")
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} has a damaged header: {error}") from error
    document.pop("__metadata__", None)
    base = _LENGTH_BYTES + length
    stored = {name: _stored(path, name, entry, base) for name, entry in document.items()}
    _check_extent(path, stored, base, size)
    return stored


def _stored(path: Path, name: str, entry: Any, base: int) -> StoredTensor:
    try:
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        start, end = entry["data_offsets"]
        whole = all(type(number) is int and number >= 0 for number in (*shape, start, end))
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole:
        raise CheckpointError(f"{path} describes tensor '{name}' by {entry!r}; it is damaged")
    if dtype not in DTYPES:
        raise CheckpointError(f"tensor '{name}' of {path} has type {dtype!r}, unknown to castor")
    if end - start != math.prod(shape) * DTYPES[dtype].itemsize:
        raise CheckpointError(
            f"{path} is damaged: tensor '{name}' of shape {shape} and type {dtype} has "
            f"{end - start} bytes"
        )
    return StoredTensor(
        path=path, dtype=DTYPES[dtype], shape=shape, start=base + start, end=base + end
    )


def _check_extent(path: Path, stored: dict[str, StoredTensor], base: int, size: int) -> None:
    """Checks that tensors follow each other without gaps and end where the file does."""
    end = base
    for name, tensor in sorted(stored.items(), key=lambda item: (item[1].start, item[1].end)):
        if tensor.start != end:
            raise CheckpointError(
                f"{path} is damaged: tensor '{name}' begins at byte {tensor.start}, not {end}"
            )
        end = tensor.end
        if end > size:
            raise CheckpointError(
                f"{path} was cut short: tensor '{name}' ends at byte {end}, the file at {size}"
            )
    if end != size:
        raise CheckpointError(f"{path} is damaged: its tensors end at byte {end}, it at {size}")


def read_headers(paths: list[Path]) -> dict[str, StoredTensor]:
    """Reads the headers of several files as one.

    Raises:
        CheckpointError: A header is not sound (see read_header), or a tensor is in two files.
    """
    stored: dict[str, StoredTensor] = {}
    for path in paths:
        for name, tensor in read_header(path).items():
            if name in stored:
                raise CheckpointError(f"tensor '{name}' is in {stored[name].path} and in {path}")
            stored[name] = tensor
    return stored
