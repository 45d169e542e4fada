"""What files of checkpoints hold, however the file system takes them."""

import errno
import fcntl
import os
import tempfile
from pathlib import Path

import pytest
import torch
from xxhash import xxh3_128_hexdigest

from castor.checkpoint.files import PIECE_BYTES, write_file


@pytest.mark.parametrize("directory", ["", "/dev/shm"])
@pytest.mark.parametrize("how", ["whole", "short", "in no blocks"])
def test_files_larger_than_the_buffer_have_their_bytes(
    how: str, directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past the page cache and through it; where a write ends early; where blocks are larger."""
    real, direct = os.write, [False]

    def write(descriptor: int, data: memoryview) -> int:
        past = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        direct.append(past)
        if past and how == "in no blocks":
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(descriptor, data[: len(data) // 3 or 1] if how == "short" else data)

    monkeypatch.setattr(os, "write", write)
    whole = torch.randint(256, (2 * PIECE_BYTES + 4099,), dtype=torch.uint8).numpy().tobytes()
    with tempfile.TemporaryDirectory(dir=directory or tmp_path) as name:
        for parts in ([len(whole)], [7, PIECE_BYTES, PIECE_BYTES - 7, 4096], [PIECE_BYTES] * 2):
            view, pieces = memoryview(whole)[: sum(parts)], []
            for part in parts:
                pieces.append(view[:part])
                view = view[part:]
            entry = write_file(Path(name) / "f", pieces, durable=False)
            written = (Path(name) / "f").read_bytes()
            assert written == whole[: sum(parts)]
            assert (entry.size, entry.checksum) == (len(written), xxh3_128_hexdigest(written))
    assert any(direct) or directory
