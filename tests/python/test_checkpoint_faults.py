"""Disks that refuse, processes that died, memory while saving: what was there stays whole."""

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

import castor
from castor.checkpoint import files, names, reading, staging
from castor.checkpoint.files import PIECE_BYTES
from helpers import Boosted, boost, plugin
from zoo import tower, tower_batch

BOOSTER = castor.Booster(plugin=plugin())


def filled(value: float) -> nn.Module:
    model = tower(depth=2)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)
    return model


def value_in(directory: Path) -> float:
    """The value that all weights of a saved model have; loading verifies it."""
    model = filled(-1.0)
    BOOSTER.load_model(model, directory)
    (value,) = {float(v) for param in model.parameters() for v in param.detach().unique()}
    return value


def only(directory: Path, *expected: str) -> bool:
    return sorted(path.name for path in directory.iterdir()) == sorted(expected)


# --- a disk that refuses ------------------------------------------------------------------------


@contextmanager
def failing(call: str, n: int, number: int) -> Iterator[list[int]]:
    """The n-th call of os.<call>, and all after it, fail as on a broken or full disk."""
    count, real = [0], getattr(os, call)

    def broken(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        if count[0] >= n:
            raise OSError(number, os.strerror(number))
        return real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, call, broken)
        yield count


@pytest.mark.parametrize(
    ("call", "number"),
    [("pwrite", errno.ENOSPC), ("fsync", errno.EIO), ("rename", errno.EROFS)],
)
def test_failure_at_any_call_leaves_the_previous_model(
    call: str, number: int, tmp_path: Path
) -> None:
    directory = tmp_path / "m"
    BOOSTER.save_model(filled(1.0), directory, size_per_shard="2KB")
    for n in range(1, 1000):
        raised: castor.IoError | None = None
        with failing(call, n, number) as count:
            try:
                BOOSTER.save_model(filled(2.0), directory, size_per_shard="2KB")
            except castor.IoError as error:
                raised = error
        assert only(tmp_path, "m")
        if raised is None:
            break
        assert (raised.errno, raised.filename) == (number, str(directory))
        assert "bytes are needed" in str(raised)
        assert value_in(directory) == 1.0
    assert value_in(directory) == 2.0
    assert n == count[0] + 1 > 5


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(
        os, "pwrite", lambda fd, data, at: real(fd, data[: max(1, len(data) // 3)], at)
    )
    BOOSTER.save_model(filled(4.0), tmp_path / "m")
    assert value_in(tmp_path / "m") == 4.0


def test_room_is_checked_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    boosted = boost(tower())
    monkeypatch.setattr(files, "free_bytes", lambda directory: 1000)
    saves: list[Callable[[], object]] = [
        lambda: BOOSTER.save_model(boosted.model, tmp_path / "m"),
        lambda: BOOSTER.save_optimizer(boosted.optimizer, tmp_path / "o"),
        lambda: BOOSTER.save(tmp_path, boosted.model, boosted.optimizer),
    ]
    for save in saves:
        with pytest.raises(castor.IoError, match=r"\d{6,} bytes are needed, 1000 bytes are free"):
            save()
    assert only(tmp_path)


def test_file_size_limit_is_an_io_error(tmp_path: Path) -> None:
    BOOSTER.save_model(filled(1.0), tmp_path / "m")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    model = tower(width=256)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, hard))
    try:
        with pytest.raises(castor.IoError, match="bytes are needed") as raised:
            BOOSTER.save_model(model, tmp_path / "m")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert raised.value.errno == errno.EFBIG
    assert value_in(tmp_path / "m") == 1.0
    assert only(tmp_path, "m")


def test_full_file_system_is_an_io_error(tmp_path: Path) -> None:
    """A real one, where this process may mount; elsewhere os.pwrite fails in the test above."""
    mounted = tmp_path / "small"
    mounted.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(mounted)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this process may not mount a tmpfs")
    try:
        BOOSTER.save_model(filled(1.0), mounted / "m")
        with pytest.raises(castor.IoError) as raised:
            BOOSTER.save_model(tower(width=512), mounted / "m")
        assert raised.value.errno == errno.ENOSPC
        with pytest.MonkeyPatch.context() as patch:  # someone else fills it meanwhile
            patch.setattr(files, "free_bytes", lambda directory: 2**40)
            with pytest.raises(castor.IoError, match="No space left"):
                BOOSTER.save_model(tower(width=512), mounted / "m")
        assert value_in(mounted / "m") == 1.0
        assert only(mounted, "m")
        with pytest.raises(castor.CheckpointError, match="mount point"):
            BOOSTER.save_model(filled(1.0), mounted)
    finally:
        subprocess.run(["umount", str(mounted)], check=True)


def test_missing_parent_and_file_in_the_way(tmp_path: Path) -> None:
    with pytest.raises(castor.IoError, match=r"no/m: No such file.*create the parent"):
        BOOSTER.save_model(filled(1.0), tmp_path / "no" / "m")
    with pytest.raises(castor.IoError, match="create the parent"):
        BOOSTER.save(tmp_path / "no" / "run", filled(1.0), step=1)
    with pytest.raises(castor.IoError, match="create the parent"):
        BOOSTER.save_lr_scheduler(
            torch.optim.lr_scheduler.StepLR(AdamW([nn.Parameter(torch.ones(1))]), 1),
            tmp_path / "no" / "lr.json",
        )
    (tmp_path / "file").write_text("")
    with pytest.raises(castor.CheckpointError, match="is a file"):
        BOOSTER.save_model(filled(1.0), tmp_path / "file")
    assert only(tmp_path, "file")


def test_read_only_directory_is_an_io_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(castor.IoError, match=r"Read-only file system.*may write"):
        BOOSTER.save_model(filled(1.0), tmp_path / "m")


def test_everything_is_synced_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    BOOSTER.save_model(filled(1.0), tmp_path / "m")
    events: list[tuple[str, str]] = []
    sync, rename, exchange = os.fsync, os.rename, staging.exchange

    def plain(path: str | Path) -> str:
        """The name without that of the process."""
        return str(path).split(f"-{os.getpid()}-")[0].removeprefix(str(tmp_path))

    def traced_sync(descriptor: int) -> None:
        sync(descriptor)
        events.append(("sync", plain(os.readlink(f"/proc/self/fd/{descriptor}"))))

    def traced_rename(source: Path, destination: Path) -> None:
        rename(source, destination)
        events.append(("rename", plain(Path(source).name)))

    def traced_exchange(a: Path, b: Path) -> bool:
        events.append(("exchange", plain(b)))
        return exchange(a, b)

    monkeypatch.setattr(os, "fsync", traced_sync)
    monkeypatch.setattr(os, "rename", traced_rename)
    monkeypatch.setattr(staging, "exchange", traced_exchange)
    BOOSTER.save_model(filled(2.0), tmp_path / "m")
    staged = "/.tmp-castor-m"
    assert events == [
        ("rename", ".tmp-castor-model.safetensors"),
        ("sync", staged),  # the file in it: its path holds the process too
        ("sync", staged),
        ("rename", ".tmp-castor-castor-manifest.json"),
        ("sync", staged),  # the directory itself
        ("exchange", "/m"),
        ("sync", ""),
    ]


# --- processes that died ------------------------------------------------------------------------


def waiting_process() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


def left_by(pid: int, kind: str, name: str) -> str:
    return f".{kind}-castor-{name}-{pid}-{names._start_ticks(pid)}-0"


def test_leftovers_of_dead_processes_are_removed_and_others_stay(tmp_path: Path) -> None:
    with waiting_process() as process:
        live = left_by(process.pid, "tmp", "m")
        (tmp_path / live).mkdir()
        (tmp_path / live / "model.safetensors").write_text("half")
        (tmp_path / left_by(process.pid, "tmp", "lr.json")).write_text("half")
        (tmp_path / ".tmp-mine").mkdir()
        reused = f".tmp-castor-m-{process.pid}-1-0"  # that process number, started at another time
        (tmp_path / reused).mkdir()
        BOOSTER.save_model(filled(1.0), tmp_path / "m")
        assert (tmp_path / live).exists()
        assert not (tmp_path / reused).exists()
        process.communicate(b"\n")
    BOOSTER.save_model(filled(2.0), tmp_path / "m")
    assert only(tmp_path, "m", ".tmp-mine")


def test_locked_directory_of_an_unseen_process_stays(tmp_path: Path) -> None:
    leftover = tmp_path / ".tmp-castor-m-999999999-1-0"  # as if of another container
    leftover.mkdir()
    lock = names.lock_directory(leftover)
    BOOSTER.save_model(filled(1.0), tmp_path / "m")
    assert leftover.exists()
    os.close(lock)
    BOOSTER.save_model(filled(1.0), tmp_path / "m")
    assert only(tmp_path, "m")


@pytest.fixture
def _no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "exchange", lambda a, b: False)


@pytest.mark.usefixtures("_no_exchange")
def test_two_renames_do_where_directories_cannot_be_exchanged(tmp_path: Path) -> None:
    for value in (1.0, 2.0, 3.0):
        BOOSTER.save_model(filled(value), tmp_path / "m")
        assert value_in(tmp_path / "m") == value
        assert only(tmp_path, "m")
    for n in (1, 2, 3, 4):  # two files, two directories; bringing the old one back fails too
        with failing("rename", n, errno.EIO), pytest.raises(castor.IoError):
            BOOSTER.save_model(filled(4.0), tmp_path / "m")
        assert value_in(tmp_path / "m") == 3.0
        assert only(tmp_path, "m")


@pytest.mark.parametrize("by", ["load", "save"])
def test_kill_between_the_two_renames_is_repaired(by: str, tmp_path: Path) -> None:
    BOOSTER.save_model(filled(1.0), tmp_path / "m")
    BOOSTER.save_optimizer(boost(tower()).optimizer, tmp_path / "o")
    displaced = tmp_path / ".old-castor-m-999999999-1-0"
    os.rename(tmp_path / "m", displaced)
    (tmp_path / ".tmp-castor-m-999999999-1-1").mkdir()
    BOOSTER.save_optimizer(boost(tower()).optimizer, tmp_path / "o")  # deletes no only copy
    assert displaced.exists()
    if by == "save":
        with failing("pwrite", 1, errno.ENOSPC), pytest.raises(castor.IoError):
            BOOSTER.save_model(filled(2.0), tmp_path / "m")
    assert value_in(tmp_path / "m") == 1.0
    assert only(tmp_path, "m", "o")


def test_run_displaced_by_a_dead_process_is_found(tmp_path: Path) -> None:
    step = BOOSTER.save(tmp_path / "run", filled(1.0), step=3)
    os.rename(step, tmp_path / "run" / ".old-castor-step-00000003-999999999-1-0")
    assert BOOSTER.latest(tmp_path / "run") == step


# --- memory -------------------------------------------------------------------------------------


def peak_extra_bytes(action: Callable[[], object]) -> int:
    """How far the resident memory of this process rises above where it was."""

    def resident(field: str) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024
        raise AssertionError(field)

    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = resident("VmRSS")
    action()
    return resident("VmHWM") - before


@pytest.mark.cpu_device("the process's memory is measured, and the simulated GPU's is in it")
def test_saving_needs_two_pieces_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wide(nn.Module):
        """Half of it in the order of the file, half transposed: those have to be copied."""

        def __init__(self) -> None:
            super().__init__()
            self.straight = nn.Linear(4096, 3000)
            self.turned = nn.Parameter(torch.randn(3000, 4096).t())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.straight(x) @ self.turned.t()[:, :3].float().to(x.dtype)[:3000]).sum()

    model = Wide()
    boosted = boost(model, precision="bf16", optim_state_format="fp32")  # others join the master
    boosted.step(boosted.model(torch.randn(2, 4096)))
    BOOSTER.save(tmp_path / "run", tower(), step=1)  # imports and caches are not the point
    size = sum(param.nbytes for param in model.parameters())
    assert size > 48_000_000
    for save in (
        lambda: BOOSTER.save_model(model, tmp_path / "m"),
        lambda: BOOSTER.save_optimizer(boosted.optimizer, tmp_path / "o"),
        lambda: BOOSTER.save(tmp_path / "run", model, boosted.optimizer),
    ):
        assert peak_extra_bytes(save) <= 2 * PIECE_BYTES + 2**20
    stored = sum(path.stat().st_size for path in (tmp_path / "run" / "step-00000001").rglob("*"))
    assert stored > 7 * size  # the weights, and master and two moments of twice their width
    # Beside the training it is that, and what torch and malloc keep for one more thread; copies too
    # where memory is left.
    assert peak_extra_bytes(lambda: save_beside(boosted, tmp_path / "run")) <= stored + 2**26
    monkeypatch.setattr(reading, "_PART_OF_MEMORY", 2**62)
    assert peak_extra_bytes(lambda: save_beside(boosted, tmp_path / "run")) <= 2**26 < stored / 5


def save_beside(boosted: Boosted, directory: Path) -> None:
    BOOSTER.save(directory, boosted.model, boosted.optimizer, use_async=True)
    BOOSTER.wait_for_saves()


def test_loading_needs_no_second_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def anonymous() -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return int(line.split()[1]) * 1024
        raise AssertionError

    boosted = boost(tower(width=1500, depth=10), precision="bf16", optim_state_format="fp32")
    moments = sum(2 * 4 * param.numel() for param in boosted.model.parameters())
    boosted.step(boosted.model(**tower_batch(0, width=1500)))
    BOOSTER.save(tmp_path / "run", boosted.model, boosted.optimizer)
    peaks = []
    real = torch.Tensor.copy_

    def watched(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = real(self, *args, **kwargs)
        peaks.append(anonymous())
        return result

    def growth() -> int:
        peaks.clear()
        before = anonymous()
        BOOSTER.load(tmp_path / "run", boosted.model, boosted.optimizer)
        assert len(peaks) >= 2 * 22  # the moments; weights and masters are taken over in C++
        return max(peaks) - before

    BOOSTER.load(tmp_path / "run", boosted.model, boosted.optimizer)
    monkeypatch.setattr(torch.Tensor, "copy_", watched)
    # malloc's heap may grow by itself, once; a copy would be there every time. A parameter's two
    # moments may be: on a simulated GPU they are read into memory, which malloc may give back.
    assert min(growth(), growth()) <= 2 * 1500**2 * 4 + 2**20 < moments / 9
