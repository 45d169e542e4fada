"""Saves that go on beside the training: the bytes of the moment, whatever happens meanwhile."""

import errno
import mmap
import os
import subprocess
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from torch import nn
from torch.optim import AdamW, RMSprop

import castor
from castor import _C
from castor.checkpoint import background, files, reading
from castor.checkpoint.pace import Pace
from helpers import FORMATS_AND_OVERLAPS, Boosted, boost, copies, equal, plugin
from rank_processes import run_python
from stored_tower import WIDTH, wide
from zoo import CASES, tower, tower_batch

BOOSTER = castor.Booster(plugin=plugin())


class Disk:
    """os.pwrite of the threads that save: waits while it is stopped."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.reached = threading.Event()
        self.writes = 0
        self._write = os.pwrite

    def write(self, descriptor: int, data: Any, offset: int) -> int:
        if threading.current_thread().name.startswith("castor save"):
            self.writes += 1
            self.reached.set()
            assert self.goes_on.wait(60)
        return self._write(descriptor, data, offset)


@contextmanager
def stopped_disk(*, memory: bool = False) -> Iterator[Disk]:
    """Nothing is written by a save beside the training before `goes_on` is set.

    `memory`: there is some for copies of chunks.
    """
    disk = Disk()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", disk.write)
        patch.setattr(files, "PIECE_BYTES", mmap.PAGESIZE)
        if not memory:
            patch.setattr(reading, "_PART_OF_MEMORY", 2**62)
        try:
            yield disk
        finally:
            disk.goes_on.set()
            BOOSTER.wait_for_saves()


def saving() -> bool:
    """Whether a save is under way."""
    return any(thread.name == "castor save" for thread in threading.enumerate())


def contents(directory: Path) -> dict[str, bytes]:
    """Every byte in a directory."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def waits(work: Callable[[], Any], disk: Disk) -> None:
    """`work` returns when the disk goes on, not before."""
    done: list[bool] = []

    def run() -> None:
        work()
        done.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    disk.goes_on.set()
    thread.join(60)
    assert done == [True]


def forward(boosted: Boosted, seed: int, **size: int) -> torch.Tensor:
    loss: torch.Tensor = boosted.model(**tower_batch(seed, **size))
    return loss


def step(boosted: Boosted, seed: int, **size: int) -> float:
    return boosted.step(forward(boosted, seed, **size))


def run_script(script: str, directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, of that directory, where its file is, and more."""
    file = directory / "script.py"
    file.write_text(textwrap.dedent(script))
    return run_python(file, directory, *arguments, timeout=120)


# --- the bytes of the moment ----------------------------------------------------------------------


IN_BACKWARD = {
    "overlap": "backward",
    "enable_gradient_accumulation": False,
    "max_norm": 0.0,
    "nonfinite": "ignore",
}


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize(("precision", "state_format", "overlap"), FORMATS_AND_OVERLAPS)
def test_what_is_written_while_training_goes_on_is_the_moment_of_the_call(
    precision: str, state_format: str, overlap: str, memory: bool, tmp_path: Path
) -> None:
    """Updates wait for the disk where no memory is left for copies, and nowhere else."""
    settings: dict[str, Any] = IN_BACKWARD if overlap == "backward" else {"overlap": overlap}

    def start() -> Boosted:
        boosted = boost(
            tower(),
            precision=precision,
            optim_state_format=state_format,
            chunk_bytes=4096,
            **settings,
            initial_scale=2.0**8,
        )
        for seed in range(2):
            step(boosted, seed)
        return boosted

    undisturbed = start()
    expected = [step(undisturbed, seed) for seed in range(2, 6)]

    boosted = start()
    booster, model, optimizer = boosted
    booster.save(tmp_path / "at once", model, optimizer)
    losses: list[float] = []

    def two_steps(loss: torch.Tensor) -> None:
        losses.append(boosted.step(loss))
        losses.append(step(boosted, 3))

    with stopped_disk(memory=memory) as disk:
        path = booster.save(tmp_path / "beside", model, optimizer, use_async=True)
        assert not path.exists()
        loss = forward(boosted, 2)  # waits for nothing
        if memory:
            assert disk.reached.wait(60)
            two_steps(loss)
            assert not path.exists()
        else:
            waits(lambda: two_steps(loss), disk)
    losses += [step(boosted, seed) for seed in (4, 5)]
    assert losses == expected
    assert booster.latest(tmp_path / "beside") == path
    assert contents(tmp_path / "beside") == contents(tmp_path / "at once")


def test_memory_that_the_kernel_refuses_is_done_without(tmp_path: Path) -> None:
    script = """
        import resource, sys
        from pathlib import Path
        import torch
        import castor

        model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(16)))
        optimizer = torch.optim.AdamW(model.parameters())
        plugin = castor.GeminiPlugin(device="cpu", device_memory="1GiB", chunk_bytes=2**26)
        booster = castor.Booster(plugin=plugin)
        booster.boost(model, optimizer)
        def step():
            booster.backward(model(torch.ones(2, 1024)).square().mean(), optimizer)
            optimizer.step()

        step()
        path = Path(sys.argv[1])
        booster.save(path / "at once", model, optimizer)
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + 150 * 2**20, -1))
        booster.save(path / "beside", model, optimizer, use_async=True)
        step()
        booster.wait_for_saves()
    """
    done = run_script(script, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert contents(tmp_path / "beside") == contents(tmp_path / "at once")


@pytest.mark.parametrize("name", ["gpt2", "t5", "mixtral", "vit"])
def test_models_of_transformers_with_their_configs(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    boosted = boost(case.model(), overlap="forward")
    batch = case.batch(0)
    boosted.step(case.loss(boosted.model(**batch), batch))
    booster, model, optimizer = boosted
    booster.save_model(model, tmp_path / "at once", size_per_shard="20KB")
    booster.save_optimizer(optimizer, tmp_path / "optimizer at once", size_per_shard="20KB")
    booster.save_model(model, tmp_path / "beside", size_per_shard="20KB", use_async=True)
    boosted.step(case.loss(model(**batch), batch))
    booster.wait_for_saves()
    assert contents(tmp_path / "beside") == contents(tmp_path / "at once")

    booster.save_optimizer(optimizer, tmp_path / "optimizer at once", size_per_shard="20KB")
    booster.save_optimizer(
        optimizer, tmp_path / "optimizer beside", size_per_shard="20KB", use_async=True
    )
    boosted.step(case.loss(model(**batch), batch))
    booster.wait_for_saves()
    at_once, beside = (contents(tmp_path / f"optimizer {how}") for how in ("at once", "beside"))
    assert beside == at_once


class Normed(nn.Module):
    """A tower's layer and a buffer that every forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(self.linear(x))
        return normed.square().mean()


def test_buffers_and_step_counts_are_those_of_the_call(tmp_path: Path) -> None:
    boosted = boost(Normed(), overlap="forward")
    booster, model, optimizer = boosted
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    boosted.step(model(x))
    booster.save(tmp_path / "at once", model, optimizer)
    with stopped_disk() as disk:
        booster.save(tmp_path / "beside", model, optimizer, use_async=True)
        loss = model(x)
        assert int(model.norm.num_batches_tracked) == 2
        booster.backward(loss, optimizer)
        optimizer.step()  # counts; the update itself waits
        assert {int(entry["step"]) for entry in optimizer.state.values()} == {2}
        disk.goes_on.set()
    assert contents(tmp_path / "beside") == contents(tmp_path / "at once")


@pytest.mark.parametrize("state_format", ["fp32", "split_int8"])
@pytest.mark.parametrize("overlap", ["none", "forward"])
def test_what_lies_on_nvme_is_held(overlap: str, state_format: str, tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    settings = {} if state_format == "fp32" else {"precision": "bf16"}
    settings |= {"optim_state_format": state_format, "overlap": overlap}
    settings |= {"nvme_offload_fraction": 1.0}
    boosted = wide(tmp_path / "nvme", **settings)
    booster, model, optimizer = boosted
    step(boosted, 0, width=WIDTH)
    booster.save(tmp_path / "at once", model, optimizer)
    with stopped_disk() as disk:
        booster.save(tmp_path / "beside", model, optimizer, use_async=True)
        loss = forward(boosted, 1, width=WIDTH)

        def steps() -> None:
            boosted.step(loss)
            step(boosted, 2, width=WIDTH)

        waits(steps, disk)
    booster.wait_for_saves()
    assert contents(tmp_path / "beside") == contents(tmp_path / "at once")


# --- who else writes ------------------------------------------------------------------------------


def add_in_place(boosted: Boosted) -> None:
    with torch.no_grad():
        boosted.model.layers[0].weight.add_(1.0)


def write_through_data(boosted: Boosted) -> None:
    boosted.model.layers[0].weight.data.mul_(3.0)


def write_through_an_alias(boosted: Boosted) -> None:
    boosted.model.layers[0].weight.detach()[0].fill_(7.0)


def write_a_list(boosted: Boosted) -> None:
    torch._foreach_mul_([param.data for param in boosted.model.parameters()], 2.0)


def write_moments(boosted: Boosted) -> None:
    boosted.optimizer.state[boosted.model.layers[0].weight]["exp_avg"].fill_(5.0)


def load_a_state_dict(boosted: Boosted) -> None:
    weights = {key: torch.ones_like(value) for key, value in boosted.model.state_dict().items()}
    boosted.model.load_state_dict(weights)


def load_states(boosted: Boosted) -> None:
    state = boosted.optimizer.state_dict()
    for entry in state["state"].values():
        entry["exp_avg"] = torch.ones_like(entry["exp_avg"])
    boosted.optimizer.load_state_dict(state)


@pytest.mark.parametrize(
    "edit",
    [
        add_in_place,
        write_through_data,
        write_through_an_alias,
        write_a_list,
        write_moments,
        load_a_state_dict,
        load_states,
    ],
)
@pytest.mark.parametrize("memory", ["1GiB", "24KiB"])
def test_an_edit_waits_is_not_in_the_file_and_not_lost(
    edit: Callable[[Boosted], None], memory: str, tmp_path: Path
) -> None:
    def start() -> Boosted:
        boosted = boost(tower(), memory=memory, chunk_bytes=4096, placement_policy="cpu")
        step(boosted, 0)
        return boosted

    expected, boosted = start(), start()
    edit(expected)
    boosted.booster.save(tmp_path / "at once", boosted.model, boosted.optimizer)
    with stopped_disk() as disk:
        boosted.booster.save(tmp_path / "beside", boosted.model, boosted.optimizer, use_async=True)
        waits(lambda: edit(boosted), disk)
    boosted.booster.wait_for_saves()
    assert contents(tmp_path / "beside") == contents(tmp_path / "at once")
    assert [step(boosted, seed) for seed in (1, 2)] == [step(expected, seed) for seed in (1, 2)]
    for mine, theirs in zip(
        copies(boosted.model.parameters()), copies(expected.model.parameters()), strict=True
    ):
        assert equal(mine, theirs)


def test_an_edit_of_what_is_copied_waits_for_nothing(tmp_path: Path) -> None:
    boosted = boost(tower(), chunk_bytes=4096)
    step(boosted, 0)
    lent = boosted.model.layers[-1].weight.detach().numpy()
    booster, model, optimizer = boosted
    booster.save(tmp_path / "at once", model, optimizer)
    with stopped_disk(memory=True):
        path = booster.save(tmp_path / "beside", model, optimizer, use_async=True)
        lent[:] = 9.0
        add_in_place(boosted)
        write_moments(boosted)
        load_a_state_dict(boosted)
        assert not path.exists()
    assert contents(tmp_path / "beside") == contents(tmp_path / "at once")
    assert all(bool((param == 1.0).all()) for param in model.parameters())


def test_reading_waits_for_nothing(tmp_path: Path) -> None:
    boosted = boost(tower(), overlap="forward")
    step(boosted, 0)
    before = [param.detach().clone() for param in boosted.model.parameters()]
    with stopped_disk() as disk:
        boosted.booster.save_model(boosted.model, tmp_path / "m", use_async=True)
        assert disk.reached.wait(60)
        with torch.no_grad():
            forward(boosted, 1)
        state = boosted.model.state_dict()
        assert all(equal(a, b) for a, b in zip(state.values(), before, strict=True))
        assert saving()


def test_what_was_lent_out_before_is_written_before_the_call_returns(tmp_path: Path) -> None:
    """Nothing holds back who writes through memory that it has known before."""
    boosted = boost(tower(), chunk_bytes=4096)
    step(boosted, 0)
    boosted.booster.save_model(boosted.model, tmp_path / "at once")
    lent = boosted.model.layers[-1].weight.detach().numpy()

    def save() -> None:
        boosted.booster.save_model(boosted.model, tmp_path / "beside", use_async=True)
        lent[:] = 9.0

    with stopped_disk() as disk:
        waits(save, disk)
    boosted.booster.wait_for_saves()
    assert contents(tmp_path / "beside") == contents(tmp_path / "at once")
    assert bool((boosted.model.layers[-1].weight == 9.0).all())


# --- how fast it goes -----------------------------------------------------------------------------


def compute(seconds: float) -> None:
    """Uses a core for so long."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def rest_behind(pace: Pace, seconds: float) -> float:
    """Seconds that a thread rests when it has used a core for so long."""
    rested: list[float] = []

    def work() -> None:
        pace.begin()
        compute(seconds)
        start = time.monotonic()
        pace.rest()
        rested.append(time.monotonic() - start)
        pace.end()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return rested[0]


def test_a_save_uses_a_fortieth_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    pace = Pace(lambda: False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert rest_behind(pace, 0.02) >= 19 * 0.02
    assert rest_behind(pace, 0.0) < 1.0  # by what it has used since
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(40)))
    assert rest_behind(pace, 0.2) < 2.0  # of 3.8 on two


def test_a_save_works_on_an_idle_thread_until_it_is_waited_for() -> None:
    before = threads_that_take_idle_cores()
    found: list[int] = []

    def work() -> None:
        pace, checksum = Pace(lambda: False), _C.Checksum()
        pace.begin()
        checksum.update(bytes(2**20))
        found.append(threads_that_take_idle_cores() - before)
        pace.hurry()
        pace.rest()
        checksum.update(bytes(2**20))
        found.append(threads_that_take_idle_cores() - before)
        pace.end()
        assert checksum.hexdigest() == xxhash.xxh3_128_hexdigest(bytes(2**21))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [1, 0]


def threads_that_take_idle_cores() -> int:
    threads = [int(path.name) for path in Path("/proc/self/task").iterdir()]
    return sum(os.sched_getscheduler(thread) == os.SCHED_IDLE for thread in threads)


@pytest.mark.parametrize("why", ["held", "awaited", "awaited while it rests"])
def test_a_save_that_is_waited_for_does_not_rest(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    pace = Pace(lambda: why == "held")
    if why == "awaited":
        pace.hurry()
    elif why == "awaited while it rests":
        threading.Timer(0.2, pace.hurry).start()
    assert rest_behind(pace, 0.1) < 3.9 / 2


# --- one at a time, and nothing lost --------------------------------------------------------------


def test_the_next_call_waits(tmp_path: Path) -> None:
    boosted = boost(tower())
    booster, model, optimizer = boosted
    step(boosted, 0)
    for call in (
        lambda: booster.save_model(model, tmp_path / "n"),
        lambda: booster.save_optimizer(optimizer, tmp_path / "o", use_async=True),
        lambda: booster.latest(tmp_path),
        lambda: booster.load(tmp_path, model, optimizer),
        lambda: booster.load_model(model, tmp_path / "step-00000001" / "model"),
        booster.wait_for_saves,
    ):
        with stopped_disk() as disk:
            booster.save(tmp_path, model, optimizer, use_async=True)
            waits(call, disk)
    booster.wait_for_saves()


class FullDisk:
    """os.pwrite of the thread that saves finds no room."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        real = os.pwrite

        def write(descriptor: int, data: Any, offset: int) -> int:
            if threading.current_thread().name.startswith("castor save"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(descriptor, data, offset)

        patch.setattr(os, "pwrite", write)


@pytest.mark.parametrize(
    "call",
    [
        lambda booster, model, path: booster.wait_for_saves(),
        lambda booster, model, path: booster.save_model(model, path / "other"),
        lambda booster, model, path: booster.latest(path),
        lambda booster, model, path: booster.load_model(model, path / "m"),
    ],
)
def test_what_stops_a_save_is_raised_by_the_next_call(
    call: Callable[[castor.Booster, nn.Module, Path], Any], tmp_path: Path
) -> None:
    boosted = boost(tower())
    booster, model, _ = boosted
    booster.save_model(model, tmp_path / "m")
    before = contents(tmp_path)
    step(boosted, 0)
    with pytest.MonkeyPatch.context() as patch:
        FullDisk(patch)
        booster.save_model(model, tmp_path / "m", use_async=True)
        step(boosted, 1)  # goes on
        with pytest.raises(castor.IoError, match="No space left") as raised:
            call(booster, model, tmp_path)
    assert raised.value.filename == str(tmp_path / "m")
    assert contents(tmp_path) == before
    booster.wait_for_saves()  # once
    booster.save_model(model, tmp_path / "m", use_async=True)
    booster.wait_for_saves()
    assert contents(tmp_path) != before


def test_an_error_of_another_kind_names_the_path(tmp_path: Path) -> None:
    boosted = boost(tower())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("castor.checkpoint.model.seal_part", lambda *_: 1 // 0)
        boosted.booster.save_model(boosted.model, tmp_path / "m", use_async=True)
        with pytest.raises(castor.Error, match="m was not written: ZeroDivisionError"):
            boosted.booster.wait_for_saves()
    assert not list(tmp_path.iterdir())


def test_what_can_be_checked_at_once_is_raised_by_the_call(tmp_path: Path) -> None:
    boosted = boost(tower())
    with pytest.raises(castor.IoError, match="create the parent directory first"):
        boosted.booster.save_model(boosted.model, tmp_path / "no" / "m", use_async=True)
    with pytest.raises(castor.CheckpointError, match="a checkpoint cannot hold"):
        boosted.booster.save(
            tmp_path / "run", boosted.model, boosted.optimizer, extra=object(), use_async=True
        )
    assert not saving()
    step(boosted, 0)  # nothing is held


def test_what_castor_does_not_hold_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(castor.UsageError, match="of a Tower that is not in chunks"):
        BOOSTER.save_model(tower(), tmp_path / "m", use_async=True)
    plain = tower()
    with pytest.raises(castor.UsageError, match="of a AdamW whose states are not castor's"):
        BOOSTER.save_optimizer(
            AdamW(plain.parameters()), tmp_path / "o", model=plain, use_async=True
        )
    model = tower()
    boosted = boost(model, optimizer=RMSprop(model.parameters(), lr=0.1))
    with pytest.raises(castor.UsageError, match="of a RMSprop whose states are not castor's"):
        boosted.booster.save(tmp_path / "run", model, boosted.optimizer, use_async=True)
    boosted.booster.save_model(model, tmp_path / "m", use_async=True)  # its weights are
    step(boosted, 0)
    boosted.booster.wait_for_saves()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]


def test_a_save_after_half_a_step_is_refused(tmp_path: Path) -> None:
    boosted = boost(tower(), **IN_BACKWARD)
    boosted.booster.backward(forward(boosted, 0), boosted.optimizer)
    with pytest.raises(castor.UsageError, match="the weights are read after a backward"):
        boosted.booster.save_model(boosted.model, tmp_path / "m", use_async=True)
    boosted.optimizer.step()
    boosted.booster.save_model(boosted.model, tmp_path / "m", use_async=True)
    boosted.booster.wait_for_saves()


# --- processes ------------------------------------------------------------------------------------

SCRIPT = """
    import os, sys, threading, time
    from pathlib import Path
    import torch
    import castor
    from castor.checkpoint import pace

    pace._PART_OF_CORES = 1e-9  # it would take years if the end of the process were not seen
    model = torch.nn.Linear(8, 8)
    booster = castor.Booster(plugin=castor.GeminiPlugin(device="cpu", device_memory="1MiB"))
    booster.boost(model)
    real = os.pwrite

    def write(descriptor, data, offset):
        if threading.current_thread().name.startswith("castor save"):
            if sys.argv[2] == "full":
                raise OSError(28, "No space left on device")
            time.sleep(0.2)
        return real(descriptor, data, offset)

    os.pwrite = write
    booster.save_model(model, Path(sys.argv[1]) / "m", use_async=True)
"""


@pytest.mark.parametrize("disk", ["slow", "full"])
def test_the_end_of_a_process_waits_and_says_what_was_lost(disk: str, tmp_path: Path) -> None:
    done = run_script(SCRIPT, tmp_path, disk)
    if disk == "slow":
        assert (done.returncode, done.stderr) == (0, "")
        BOOSTER.load_model(nn.Linear(8, 8), tmp_path / "m")
    else:
        assert f"cannot write {tmp_path / 'm'}: No space left on device" in done.stderr
        assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


def test_a_forked_child_knows_nothing_of_the_save(tmp_path: Path) -> None:
    boosted = boost(tower(width=64))
    step(boosted, 0, width=64)
    with stopped_disk() as disk:
        boosted.booster.save_model(boosted.model, tmp_path / "m", use_async=True)
        assert disk.reached.wait(60)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                background.wait()
                with torch.no_grad():
                    boosted.model.layers[0].weight.add_(1.0)
            except castor.UsageError:
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert saving()
