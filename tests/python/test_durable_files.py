"""What files of checkpoints hold, however the file system takes them."""

import errno
import fcntl
import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from xxhash import xxh3_128_hexdigest

from castor.checkpoint import names
from castor.checkpoint.container import ComputedTensor, memory_of, pieces, write_files
from castor.checkpoint.files import PIECE_BYTES, NewFile, read_pieces, write_behind, write_file
from castor.checkpoint.pace import Pace
from castor.checkpoint.writer import Writer
from castor.runtime.model_shards import Runs


def test_a_file_that_another_container_writes_is_not_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process is not in this one's /proc; a lock tells that somebody writes the file."""
    file = NewFile(tmp_path / "scheduler.json")
    (temporary,) = tmp_path.iterdir()
    monkeypatch.setattr(names, "_start_ticks", lambda _: None)
    assert not names.is_abandoned(temporary)
    file.discard()
    temporary.touch()
    assert names.is_abandoned(temporary)


@pytest.mark.parametrize("directory", ["", "/dev/shm"])
@pytest.mark.parametrize("how", ["whole", "short", "in no blocks"])
def test_files_larger_than_the_buffer_have_their_bytes(
    how: str, directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past the page cache and through it; where a write ends early; where blocks are larger."""
    real, direct = os.pwrite, [False]

    def write(descriptor: int, data: memoryview, offset: int) -> int:
        past = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        direct.append(past)
        if past and how == "in no blocks":
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(descriptor, data[: len(data) // 3 or 1] if how == "short" else data, offset)

    monkeypatch.setattr(os, "pwrite", write)
    whole = torch.randint(256, (2 * PIECE_BYTES + 4099,), dtype=torch.uint8).numpy().tobytes()
    with tempfile.TemporaryDirectory(dir=directory or tmp_path) as name:
        for parts in ([len(whole)], [7, PIECE_BYTES, PIECE_BYTES - 7, 4096], [PIECE_BYTES] * 2):
            view, pieces = memoryview(whole)[: sum(parts)], []
            for part in parts:
                pieces.append(view[:part])
                view = view[part:]
            entry = write_file(Path(name) / "f", pieces)
            written = (Path(name) / "f").read_bytes()
            assert written == whole[: sum(parts)]
            assert (entry.size, entry.checksum) == (len(written), xxh3_128_hexdigest(written))
    assert any(direct) or directory


def test_a_descriptor_that_stays_as_it_is_says_what_it_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither blocks past the page cache nor the way back: an error, and no endless loop."""
    set_flags = fcntl.fcntl

    def only_direct(descriptor: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and not flags & os.O_DIRECT:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        return set_flags(descriptor, command, flags)

    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(fcntl, "fcntl", only_direct)
    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(OSError, match="Invalid argument"):
        write_file(tmp_path / "f", [bytes(2**17)])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("directory", ["", "/dev/shm"])
def test_several_write_runs_of_one_file_at_once(directory: str, tmp_path: Path) -> None:
    """As ranks do: past the page cache where a block is one's own, through it elsewhere."""
    size = 2 * PIECE_BYTES + 12345
    whole = torch.randint(256, (size,), dtype=torch.uint8).numpy().tobytes()
    generator = torch.Generator().manual_seed(0)
    cuts = sorted({0, size, 4096, 8192, *torch.randint(size, (60,), generator=generator).tolist()})
    runs = list(pairwise(cuts))
    with tempfile.TemporaryDirectory(dir=directory or tmp_path) as name:
        path = Path(name, "f")
        with open(path, "xb") as file:
            file.truncate(size)

        def write(own: list[tuple[int, int]]) -> None:
            descriptor = os.open(path, os.O_WRONLY)
            with write_behind(ahead=True) as behind:
                writer = Writer(descriptor, behind)
                for start, end in own:
                    writer.seek(start)
                    writer.append(memoryview(whole)[start : (start + end) // 2])
                    writer.append(memoryview(whole)[(start + end) // 2 : end])
                writer.flush()
            os.close(descriptor)

        with ThreadPoolExecutor(3) as ranks:
            list(ranks.map(write, [runs[0::3], runs[1::3], runs[2::3]]))
        for direct in (False, True):
            read = b"".join(bytes(piece) for piece in read_pieces(path, direct=direct))
            assert read == whole
        assert b"".join(map(bytes, read_pieces(path, 4096, 9001, direct=True))) == whole[4096:9001]


@pytest.mark.parametrize("length", [1, 3000, 2**16, PIECE_BYTES + 5])
def test_a_part_lies_in_runs_evenly_apart(length: int, tmp_path: Path) -> None:
    """As columns do of a matrix that ranks divide; pieces begin and end within runs."""
    runs = Runs(first=3, length=length, stride=2 * length + 1)
    count = 3 * length // 2 + 700
    part = torch.randint(256, (count,), dtype=torch.uint8).numpy().tobytes()
    expected = bytearray(runs.first + (count // length + 1) * runs.stride)
    for at in range(count):
        expected[runs.first + at // length * runs.stride + at % length] = part[at]
    path = tmp_path / "f"
    path.write_bytes(bytes(len(expected)))
    pieces = [0, count // 3, count // 2, count]
    with open(path, "r+b") as file, open(path, "r+b") as other, write_behind(ahead=True) as behind:
        writer = Writer(file.fileno(), behind)
        for begin, end in pairwise(pieces):
            writer.append_runs(memoryview(part)[begin:end], begin, runs, other.fileno())
        writer.flush()
    assert path.read_bytes() == expected


def test_what_the_disk_refuses_of_runs_is_an_oserror(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    runs = Runs(first=0, length=2, stride=4)
    with open(tmp_path / "f", "rb") as file, write_behind(ahead=True) as behind:
        writer = Writer(file.fileno(), behind)
        with pytest.raises(OSError, match="Bad file descriptor") as raised:
            writer.append_runs(memoryview(bytes(9)), 0, runs, file.fileno())
    assert raised.value.errno == errno.EBADF


def test_the_end_of_a_process_makes_no_threads_and_files_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Python 3.12 and later have it."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    whole = torch.randint(256, (3 * PIECE_BYTES,), dtype=torch.uint8)
    write_files(tmp_path, {"f": {"a": whole}}, Pace(lambda: True))
    assert load_file(tmp_path / "f")["a"].equal(whole)


def test_a_disk_that_refuses_stops_who_fills_buffers_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", refuse)
    read: list[str] = []
    tensors = {
        f"{i:02}": ComputedTensor(
            dtype=torch.uint8,
            shape=(PIECE_BYTES,),
            compute=lambda: torch.zeros(PIECE_BYTES, dtype=torch.uint8),
            written=partial(read.append, f"{i:02}"),
        )
        for i in range(20)
    }
    with pytest.raises(OSError, match="No space left on device"):
        write_files(
            tmp_path,
            {"f": tensors, "g": {"last": torch.zeros(9)}},
            Pace(lambda: True),
        )
    assert len(read) < 10
    assert not list(tmp_path.iterdir())
    assert not [each for each in threading.enumerate() if each.name.startswith("castor save")]


def _orders(values: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "in order": values,
        "transposed": values.t(),
        "rows apart": values[::2],
        "one element": values[:1, :1].expand(3, 5),
        "of no element": values.t()[:0],
        "conjugate": torch.complex(values, values).conj(),
        "conjugate of no element": torch.complex(values, values)[:0].conj(),
        "rows longer than a piece": values.view(2, -1).t().contiguous().t(),
    }


@pytest.mark.parametrize("order", _orders(torch.zeros(2, 2)))
def test_pieces_are_the_elements_in_row_major_order(order: str) -> None:
    tensor = _orders(torch.randn(1500, 2000))[order]
    got = [bytes(piece) for piece in pieces(tensor)]
    assert all(len(piece) <= PIECE_BYTES for piece in got)
    whole = tensor.resolve_conj().contiguous()
    assert b"".join(got) == bytes(memory_of(whole))
