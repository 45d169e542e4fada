"""AsyncLoader: the plain loader's batches, ahead of time."""

import gc
import os
import random
import threading
import traceback
import weakref
from collections import UserDict, namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

import castor
from accelerator import Accelerator
from castor import AsyncLoader
from castor.checkpoint.documents import decode, encode
from helpers import boost, plugin
from rank_processes import run_python
from test_forks import in_child
from zoo import VOCABULARY, gpt2, tower

THREAD = "castor-async-loader"
DEPTHS = [0, 1, 2, 7]


def on_cpu(loader: Any, **options: Any) -> AsyncLoader:
    return AsyncLoader(loader, device="cpu", **options)


def threads() -> int:
    return sum(thread.name == THREAD for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    yield
    if threads():
        gc.collect()  # a failed test's frames
    assert threads() == 0


class Numbers(Dataset[torch.Tensor]):
    """Counts what has been read; some samples raise."""

    def __init__(self, size: int = 20, *, broken: tuple[int, ...] = ()) -> None:
        self.size, self.broken = size, broken
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in self.broken:
            raise LookupError(f"sample {index} is broken")
        self.read.append(index)
        return torch.tensor(index)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(20)


class Gate(Dataset[torch.Tensor]):
    """Lets so many samples be read."""

    def __init__(self) -> None:
        self.open = threading.Semaphore(0)
        self.asked = threading.Semaphore(0)

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        self.asked.release()
        assert self.open.acquire(timeout=60)
        return torch.tensor(index)


# --- order, depth and ends ----------------------------------------------------------------------


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("size", [0, 1, 4, 8, 20])
def test_batches_are_the_loaders(depth: int, size: int) -> None:
    plain = DataLoader(Numbers(size), batch_size=4)
    loader = on_cpu(DataLoader(Numbers(size), batch_size=4), depth=depth)
    for _ in range(2):
        assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in plain]
    assert len(loader) == len(plain)


def test_an_ended_iterator_stays_at_its_end() -> None:
    batches = iter(on_cpu([1, 2]))
    assert list(batches) == [1, 2]
    assert list(batches) == []


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_so_many_batches_are_read_ahead_and_no_more(depth: int) -> None:
    data = Gate()
    data.open.release(2)
    batches = iter(on_cpu(DataLoader(data, batch_size=None), depth=depth))
    next(batches)
    data.open.release(18)
    for _ in range(1 + depth):
        assert data.asked.acquire(timeout=60)
    assert not data.asked.acquire(timeout=0.1)
    next(batches)
    assert data.asked.acquire(timeout=60)
    assert not data.asked.acquire(timeout=0.1)


def test_batches_are_read_while_the_loop_works() -> None:
    data = Gate()
    data.open.release(2)
    batches = iter(on_cpu(DataLoader(data, batch_size=None), depth=2))
    next(batches)  # the first and the second have been read
    for _ in range(3):
        assert data.asked.acquire(timeout=60)  # the third is being read, and nobody has asked
    data.open.release(18)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_break_leaves_no_thread_and_loses_no_batch(depth: int) -> None:
    loader = on_cpu(DataLoader(Numbers(), batch_size=2), depth=depth)
    for stop in (1, 2, 5):
        for i, _ in enumerate(loader):
            if i + 1 == stop:
                break
        assert threads() == 0
        assert [batch.tolist() for batch in loader] == [[2 * i, 2 * i + 1] for i in range(10)]


@pytest.mark.parametrize("depth", DEPTHS)
def test_an_iterator_goes_on_with_what_had_been_read_ahead(depth: int) -> None:
    loader = on_cpu(iter(range(20)), depth=depth)
    taken = []
    for stop in (1, 4, 20):
        for i, number in enumerate(loader):
            taken.append(number)
            if i + 1 == stop:
                break
        assert threads() == 0
    assert taken == list(range(20))
    assert list(loader) == []


def test_what_a_dropped_iteration_had_read_is_freed() -> None:
    class Held:
        pass

    held: list[Any] = []

    def collate(_: Any) -> Held:
        made = Held()
        held.append(weakref.ref(made))
        return made

    loader = on_cpu(DataLoader(Numbers(), batch_size=2, collate_fn=collate), depth=4)
    next(iter(loader))
    assert len(held) >= 2
    assert [one() for one in held] == [None] * len(held)


def test_a_second_iteration_ends_the_first() -> None:
    loader = on_cpu(DataLoader(Numbers(), batch_size=2))
    first = iter(loader)
    next(first)
    second = iter(loader)
    assert threads() == 0
    with pytest.raises(castor.UsageError, match="this iteration of an AsyncLoader has been ended"):
        next(first)
    assert next(second).tolist() == [0, 1]


def test_the_loader_may_go_before_its_iteration() -> None:
    assert [batch.tolist() for batch in on_cpu(DataLoader(Numbers(4), batch_size=2))] == [
        [0, 1],
        [2, 3],
    ]


def test_workers_end_with_the_iteration() -> None:
    loader = on_cpu(DataLoader(Numbers(), batch_size=2, num_workers=2))
    batches: Any = iter(loader)
    next(batches)
    workers = batches._reading._read.source._batches._workers
    del batches
    for worker in workers:
        worker.join(timeout=60)
    assert all(not worker.is_alive() for worker in workers)


def test_a_process_may_end_in_the_middle(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import itertools, castor\n"
        "batches = iter(castor.AsyncLoader(list(range(9)), device='cpu', depth=1))\n"
        "print(next(batches))\n"
    )
    done = run_python("-W", "error", script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


def test_a_forked_child_has_iterations_of_its_own() -> None:
    loader = on_cpu(DataLoader(Numbers(), batch_size=2))
    batches = iter(loader)
    next(batches)
    one_shot = on_cpu(iter(range(5)))
    begun = iter(one_shot)
    next(begun)
    said = in_child(lambda: next(batches))
    assert said.startswith(
        f"UsageError: this iteration of an AsyncLoader is of process {os.getpid()}"
    )
    assert in_child(lambda: next(iter(loader)).tolist()) == "[0, 1]"

    def dropped() -> list[int]:
        nonlocal batches
        batches = iter(())
        gc.collect()
        return list(on_cpu([1]))

    assert in_child(dropped) == "[1]"
    assert next(batches).tolist() == [2, 3]
    assert list(begun) == [1, 2, 3, 4]


# --- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("broken", [0, 2, 9, 19])
def test_an_error_comes_at_its_batch_with_its_traceback(depth: int, broken: int) -> None:
    batches = iter(on_cpu(DataLoader(Numbers(broken=(broken,)), batch_size=2), depth=depth))
    for i in range(10):
        if i == broken // 2:
            with pytest.raises(LookupError, match=f"sample {broken} is broken") as error:
                next(batches)
            frames = traceback.extract_tb(error.value.__traceback__)
            assert (frames[-1].filename, frames[-1].name) == (__file__, "__getitem__")
        else:
            assert next(batches).tolist() == [2 * i, 2 * i + 1]  # as the plain loader goes on
    with pytest.raises(StopIteration):
        next(batches)


def test_a_loop_that_fails_leaves_no_thread() -> None:
    loader = on_cpu(DataLoader(Numbers(broken=(6,)), batch_size=2))
    with pytest.raises(LookupError):
        for _ in loader:
            pass
    assert threads() == 0


def test_an_interrupt_while_the_loop_waits_ends_the_thread() -> None:
    data = Gate()
    data.open.release(3)
    batches: Any = iter(on_cpu(DataLoader(data, batch_size=None), depth=1))
    for _ in range(3):
        next(batches)
    changed = batches._reading._changed
    wait = changed.wait

    def interrupted() -> None:
        if threading.current_thread() is threading.main_thread():
            data.open.release(17)
            raise KeyboardInterrupt
        wait()

    changed.wait = interrupted
    with pytest.raises(KeyboardInterrupt):
        next(batches)  # the fourth is under way
    assert threads() == 0


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"depth": -1}, ValueError, "depth is -1; give 0 or more"),
        ({"depth": 1.5}, TypeError, "depth is 1.5; give a number of batches"),
        ({"depth": True}, TypeError, "depth is True"),
        ({"buckets": []}, ValueError, r"buckets is \[\]; give lengths"),
        ({"buckets": [8, 8]}, ValueError, "each larger than the one before"),
        ({"buckets": [0, 8]}, ValueError, "each larger than the one before"),
        ({"buckets": [8, 4.0]}, TypeError, "buckets has 4.0"),
        ({"buckets": 8}, TypeError, "buckets is 8"),
        ({"buckets": "8"}, TypeError, "buckets is '8'"),
        ({"pad_values": {"x": 0}}, ValueError, "give both"),
        ({"buckets": [8], "pad_values": [0]}, TypeError, "pad_values is a list"),
        ({"buckets": [8], "pad_values": {0: 0}}, TypeError, "pad_values has 0: 0"),
        ({"buckets": [8], "pad_values": {"x": "0"}}, TypeError, "pad_values has 'x': '0'"),
    ],
)
def test_bad_options_are_named(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        on_cpu([1], **options)


def test_what_is_no_loader_is_refused() -> None:
    for bad in (3, "text", {"a": 1}):
        with pytest.raises(TypeError, match=f"loader is a {type(bad).__name__}"):
            on_cpu(bad)
    with pytest.raises(TypeError, match="an AsyncLoader already"):
        on_cpu(on_cpu([1]))
    with pytest.raises(NotImplementedError, match="device='meta' is not supported"):
        AsyncLoader([1], device="meta")


# --- random numbers -----------------------------------------------------------------------------


class Drawing(Numbers):
    def __init__(self, draw: Callable[[], Any]) -> None:
        super().__init__()
        self.draw = draw

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), float(self.draw())])


def mixed_with_dropout(loader: Any) -> list[Any]:
    """Two epochs, with draws of the training between the batches."""
    torch.manual_seed(3)
    return [
        (batch.tolist(), torch.rand(2).tolist(), torch.randint(99, ()).item())
        for _ in range(2)
        for batch in loader
    ]


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("workers", [0, 2])
def test_random_numbers_are_the_plain_loaders(depth: int, workers: int) -> None:
    data: Any = Drawing(lambda: torch.rand(())) if workers else Numbers()
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "num_workers": workers}
    expected = mixed_with_dropout(DataLoader(data, **options))
    assert mixed_with_dropout(on_cpu(DataLoader(data, **options), depth=depth)) == expected


def test_without_a_thread_data_may_draw_what_it_likes() -> None:
    def build() -> Any:
        return DataLoader(Drawing(lambda: torch.rand(())), batch_size=4, shuffle=True)

    assert mixed_with_dropout(on_cpu(build(), depth=0)) == mixed_with_dropout(build())


@pytest.mark.parametrize(
    ("draw", "of"),
    [
        (lambda: torch.rand(()), "torch's global generator"),
        (random.random, "Python's random"),
        (np.random.rand, "numpy's global generator"),
    ],
)
def test_data_that_would_race_with_dropout_is_refused(draw: Callable[[], Any], of: str) -> None:
    loader = on_cpu(DataLoader(Drawing(draw), batch_size=2))
    with pytest.raises(castor.UsageError, match=f"of the DataLoader draws from {of}.*depth=0"):
        next(iter(loader))


def test_data_with_a_generator_of_its_own_may_draw() -> None:
    generator = torch.Generator()
    draw = lambda: torch.rand((), generator=generator)  # noqa: E731
    taken = []
    for wrap in (lambda loader: loader, on_cpu):
        generator.manual_seed(5)
        taken.append([b.tolist() for b in wrap(DataLoader(Drawing(draw), batch_size=2))])
    assert taken[0] == taken[1]


# --- position -----------------------------------------------------------------------------------

LOADERS: dict[str, Callable[[], Any]] = {
    "in order": lambda: DataLoader(Numbers(), batch_size=2),
    "shuffled": lambda: DataLoader(Numbers(), batch_size=2, shuffle=True),
    "own generator": lambda: DataLoader(
        Numbers(), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(1)
    ),
    "stream": lambda: DataLoader(Stream(), batch_size=2),
    "workers": lambda: DataLoader(Numbers(), batch_size=2, shuffle=True, num_workers=1),
}


def begun(loader: Any, count: int) -> tuple[list[Any], Any]:
    """(the first batches of endless epochs with draws in between, how it goes on)."""

    def forever() -> Iterator[Any]:
        while True:
            for batch in loader:
                yield batch.tolist(), torch.rand(()).item()

    batches = forever()
    return [next(batches) for _ in range(count)], batches


@pytest.mark.parametrize("stop", [0, 1, 3, 9, 10, 13])
@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("name", list(LOADERS))
def test_a_run_goes_on_behind_what_was_handed_out(name: str, depth: int, stop: int) -> None:
    torch.manual_seed(5)
    plain: Any = LOADERS[name]()
    castor.checkpoint.make_resumable(plain)
    expected, going_on = begun(plain, 16)
    going_on.close()

    torch.manual_seed(5)
    loader = on_cpu(LOADERS[name](), depth=depth)
    taken, going_on = begun(loader, stop)
    state = decode(encode(loader.state_dict(), ""))
    random_state = torch.get_rng_state()
    going_on.close()

    torch.manual_seed(77)
    other = on_cpu(LOADERS[name](), depth=depth)
    torch.set_rng_state(random_state)
    other.load_state_dict(state)
    more, going_on = begun(other, 16 - stop)
    going_on.close()
    assert taken + more == expected


def test_a_position_survives_the_iteration_and_ends_the_one_under_way() -> None:
    loader = on_cpu(DataLoader(Numbers(), batch_size=2), depth=4)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state = loader.state_dict()
    assert state["handed_out"] == 3
    del batches
    assert loader.state_dict() == state
    running = iter(loader)
    assert loader.state_dict()["handed_out"] == 0
    loader.load_state_dict(state)
    with pytest.raises(castor.UsageError, match="has been ended"):
        next(running)
    assert next(iter(loader)).tolist() == [6, 7]


@pytest.mark.parametrize("wrapped", [(True, False), (False, True), (True, True)])
def test_booster_saves_and_loads_the_position(tmp_path: Path, wrapped: tuple[bool, bool]) -> None:
    def build(wrap: bool) -> Any:
        loader: Any = DataLoader(Numbers(), batch_size=2, shuffle=True)
        return on_cpu(loader, depth=3) if wrap else loader

    booster = castor.Booster(plugin())
    loader = build(wrapped[0])
    booster.boost(tower(), dataloader=loader)
    batches = iter(loader)
    taken = [next(batches).tolist() for _ in range(3)]
    booster.save(tmp_path / "run", tower(), dataloader=loader, step=3)
    rest = [batch.tolist() for batch in batches]
    assert len(taken + rest) == 10

    other = build(wrapped[1])
    booster.boost(tower(), dataloader=other)
    booster.load(tmp_path / "run", tower(), dataloader=other)
    assert [batch.tolist() for batch in other] == rest
    fewer: Any = on_cpu(DataLoader(Numbers(12), batch_size=2))
    with pytest.raises(castor.CheckpointError, match="num_batches=10, this one has 6"):
        booster.load(tmp_path / "run", tower(), dataloader=fewer)


class Stateful:
    """A loader with a state of its own, which is the same object for as long as it lives."""

    def __init__(self) -> None:
        self.state = {"at": [0]}

    def __iter__(self) -> Iterator[int]:
        while self.state["at"][0] < 20:
            self.state["at"][0] += 1
            yield self.state["at"][0] - 1

    def state_dict(self) -> dict[str, list[int]]:
        return self.state

    def load_state_dict(self, state: dict[str, list[int]]) -> None:
        self.state = state


def test_a_loader_with_a_state_of_its_own_keeps_its_position() -> None:
    loader = on_cpu(Stateful(), depth=4)
    batches = iter(loader)
    assert [next(batches) for _ in range(3)] == [0, 1, 2]
    state = loader.state_dict()
    assert state == {"at": [3]}
    other = on_cpu(Stateful(), depth=4)
    other.load_state_dict(state)
    assert list(other) == list(range(3, 20))


@pytest.mark.parametrize("workers", [0, 2])
def test_torchdatas_loader_keeps_its_position(workers: int, tmp_path: Path) -> None:
    stateful: Any = pytest.importorskip("torchdata.stateful_dataloader")

    def build() -> Any:
        loader = stateful.StatefulDataLoader(
            list(range(40)), batch_size=2, shuffle=True, num_workers=workers
        )
        return on_cpu(loader, depth=3)

    booster = castor.Booster(plugin())
    loader = build()
    batches = iter(loader)
    taken = [next(batches).tolist() for _ in range(5)]
    booster.save(tmp_path / "run", tower(), dataloader=loader, step=5)
    rest = [batch.tolist() for batch in batches]
    assert sorted(i for batch in taken + rest for i in batch) == list(range(40))
    other = build()
    booster.load(tmp_path / "run", tower(), dataloader=other)
    assert [batch.tolist() for batch in other] == rest


def test_a_loader_that_knows_no_position_says_so(tmp_path: Path) -> None:
    loader = on_cpu([1, 2])
    for use in (loader.state_dict, lambda: loader.load_state_dict({})):
        with pytest.raises(castor.UsageError, match="the list in this AsyncLoader does not know"):
            use()
    with pytest.raises(castor.UsageError, match="does not know its position"):
        castor.Booster(plugin()).save(tmp_path / "run", tower(), dataloader=loader, step=1)


# --- what a loader is asked ---------------------------------------------------------------------


def test_the_samplers_epoch_is_set_through_it() -> None:
    sampler: Any = DistributedSampler(range(20), num_replicas=2, rank=1)
    loader = on_cpu(DataLoader(Numbers(), batch_size=2, sampler=sampler))
    orders = []
    for epoch in (0, 3):
        loader.set_epoch(epoch)
        assert sampler.epoch == epoch
        orders.append([batch.tolist() for batch in loader])
    loader.sampler.set_epoch(0)
    assert [batch.tolist() for batch in loader] == orders[0] != orders[1]
    with pytest.raises(castor.UsageError, match="neither the DataLoader nor its sampler"):
        on_cpu(DataLoader(Numbers())).set_epoch(1)


def test_what_a_loader_says_of_itself_is_said_and_no_more() -> None:
    inner = DataLoader(Numbers(), batch_size=2)
    loader = on_cpu(inner)
    assert loader.loader is inner
    for name in ("dataset", "batch_size", "sampler", "batch_sampler"):
        assert getattr(loader, name) is getattr(inner, name)
    assert not hasattr(loader, "num_workers")
    assert not hasattr(on_cpu([1]), "dataset")
    with pytest.raises(TypeError):
        len(on_cpu(DataLoader(Stream())))
    assert len(list(on_cpu(DataLoader(Stream())))) == 20


# --- buckets ------------------------------------------------------------------------------------

Pair = namedtuple("Pair", ["tokens", "label"])


def tokens(length: int, **more: torch.Tensor) -> dict[str, Any]:
    ids = torch.arange(1, 2 * length + 1).view(2, length)
    mask = torch.ones_like(ids)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()} | more


def first(batch: Any, **options: Any) -> Any:
    return next(iter(on_cpu([batch], **options)))


def test_batches_are_padded_to_the_next_bucket() -> None:
    lengths = [3, 4, 5, 8, 1]
    given = [tokens(length) for length in lengths]
    for length, before, batch in zip(lengths, given, on_cpu(given, buckets=[4, 8]), strict=True):
        padded = 4 if length <= 4 else 8
        for name, value in (("input_ids", 0), ("attention_mask", 0), ("labels", -100)):
            assert batch[name].shape == (2, padded)
            assert batch[name].dtype == torch.int64
            assert torch.equal(batch[name][:, :length], before[name])
            assert (batch[name][:, length:] == value).all()
            assert before[name].shape == (2, length)


def test_values_to_pad_with_may_be_given() -> None:
    weights = torch.ones(2, 3, 5)
    batch = tokens(3, weights=weights, flags=torch.ones(2, 3, dtype=torch.bool), extra=weights)
    padded = first(
        batch,
        buckets=[4],
        pad_values={"input_ids": 9, "weights": -1.5, "flags": False, "extra": None},
    )
    assert (padded["input_ids"][:, 3:] == 9).all()
    assert padded["labels"][0, 3] == -100
    assert padded["weights"].shape == (2, 4, 5)
    assert (padded["weights"][:, 3] == -1.5).all()
    assert not padded["flags"][:, 3].any()
    assert padded["flags"].dtype == torch.bool
    assert padded["extra"] is weights


def test_each_tensor_goes_to_a_bucket_of_its_own() -> None:
    batch = {"input_ids": torch.ones(2, 7), "labels": torch.ones(2, 3), "sizes": torch.ones(2)}
    padded = first(batch, buckets=[4, 8])
    assert {name: list(one.shape) for name, one in padded.items()} == {
        "input_ids": [2, 8],
        "labels": [2, 4],
        "sizes": [2],
    }


def test_labels_of_samples_stay() -> None:
    batch = tokens(3) | {"labels": torch.tensor([0, 1])}
    assert first(batch, buckets=[8])["labels"].tolist() == [0, 1]


def test_batches_keep_their_kind() -> None:
    class Encoding(UserDict[str, Any]):
        note = "kept"

    given = Encoding(tokens(3))
    given.note = "of this one"
    padded = first(given, buckets=[4])
    assert type(padded) is Encoding
    assert (padded.note, padded["labels"].shape) == ("of this one", (2, 4))
    assert given["labels"].shape == (2, 3)
    pair = Pair(torch.ones(2, 3), torch.ones(2))
    padded = first(pair, buckets=[4], pad_values={"0": 0})
    assert type(padded) is Pair
    assert padded.tokens.shape == (2, 4)
    assert padded.label is pair.label
    assert type(first([torch.ones(2, 3)], buckets=[4], pad_values={"0": 0})) is list


@pytest.mark.parametrize(
    ("batch", "options", "message"),
    [
        (tokens(9), {}, r"'input_ids', \[2, 9\], is longer than the largest bucket, 8"),
        (tokens(3, ids2=torch.ones(2, 3)), {}, r"'ids2', \[2, 3\], is as long as 'input_ids'"),
        (tokens(3, m=torch.ones(2, 1, 3, 3)), {}, "'m', .* is as long as 'input_ids'"),
        ({"pixels": torch.ones(2, 3)}, {}, r"names none of this batch, a dict with \['pixels'\]"),
        (torch.ones(2, 3), {}, "names none of this batch, a Tensor"),
        ((torch.ones(2, 3),), {}, r"a tuple with \['0'\]"),
        (tokens(3), {"pad_values": {"labels": None}}, "")
    ],
)  # fmt: skip
def test_batches_that_cannot_be_padded_are_named(batch: Any, options: Any, message: str) -> None:
    if not message:  # what is named with None is left alone on purpose
        assert first(batch, buckets=[8], **options)["labels"].shape == (2, 3)
        return
    with pytest.raises(castor.UsageError, match=message):
        first(batch, buckets=[8], **options)


def test_a_batch_that_is_too_long_is_told_when_its_turn_comes() -> None:
    batches = iter(on_cpu([tokens(n) for n in (3, 4, 9, 5)], buckets=[8], depth=4))
    next(batches)
    next(batches)
    with pytest.raises(castor.UsageError, match="longer than the largest bucket"):
        next(batches)
    assert next(batches)["input_ids"].shape == (2, 8)


def test_losses_of_padded_batches_are_those_of_the_batches() -> None:
    def losses(wrap: Callable[[Any], Any]) -> list[float]:
        torch.manual_seed(1)
        boosted = boost(gpt2())
        data = []
        for seed, length in enumerate((5, 8, 11, 13, 7)):
            generator = torch.Generator().manual_seed(seed)
            ids = torch.randint(3, VOCABULARY, (2, length), generator=generator)
            data.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids})
        return [boosted.step(boosted.model(**batch).loss) for batch in wrap(data)]

    plain = losses(lambda data: data)
    assert losses(lambda data: on_cpu(data, buckets=[8, 16])) == pytest.approx(plain, rel=1e-5)


# --- a GPU --------------------------------------------------------------------------------------


@pytest.fixture
def to_gpu(gpu: Accelerator) -> Callable[..., AsyncLoader]:
    """AsyncLoaders of that device."""
    return lambda loader, **options: AsyncLoader(loader, device=gpu.device, **options)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_batches_arrive_on_the_gpu_in_order(
    gpu: Accelerator, to_gpu: Callable[..., AsyncLoader], depth: int
) -> None:
    width = gpu.width * 64
    data = [
        {"x": torch.full((width,), float(i)), "y": [torch.tensor(i)], "z": "z"} for i in range(12)
    ]
    found = []
    for batch in to_gpu(data, depth=depth):
        assert batch["x"].device == batch["y"][0].device == gpu.device
        assert batch["z"] == "z"
        # The compute stream is behind the copies, and the memory is its own until it is done.
        product = batch["x"] * 2
        gpu.torch._sleep(100_000 if gpu.real else 500)
        found.append((product + batch["x"]).sum() / width)
        del batch, product
    assert [round(one.item()) for one in found] == [3 * i for i in range(12)]


@pytest.mark.parametrize("depth", [0, 2])
def test_the_stream_of_the_loop_waits_for_a_slow_copy(
    gpu: Accelerator, to_gpu: Callable[..., AsyncLoader], depth: int
) -> None:
    # Page-locked here: the simulated GPU waits for its streams when such memory goes.
    data = [torch.full((4096,), float(i)).pin_memory() for i in range(6)]
    loader = to_gpu(data, depth=depth)
    batches = iter(loader)
    assert loader._lane is not None
    for i in range(6):
        with gpu.torch.stream(loader._lane._stream):
            gpu.torch._sleep(20_000_000 if gpu.real else 20_000)
        side = gpu.torch.Stream()
        with gpu.torch.stream(side):
            batch = next(batches) + 1
        side.synchronize()
        assert (batch == i + 1).all().item()


def test_what_is_elsewhere_stays_there(
    gpu: Accelerator, to_gpu: Callable[..., AsyncLoader]
) -> None:
    there = torch.ones(3, device=gpu.device)
    sparse = torch.eye(3).to_sparse()
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    found = next(iter(to_gpu([{"there": there, "sparse": sparse, "packed": packed}])))
    assert found["there"] is there
    assert found["sparse"] is sparse
    assert found["packed"] is packed
