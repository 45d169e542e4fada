"""Data loaders that go on with the next batch."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

import castor
from castor.checkpoint import make_resumable
from castor.checkpoint.dataloader import RankSampler
from castor.checkpoint.documents import decode, encode
from helpers import plugin
from zoo import tower, tower_batch

BOOSTER = castor.Booster(plugin=plugin())


class Augmented(Dataset[torch.Tensor]):
    """Counts its reads and draws from the global generator for each."""

    def __init__(self, size: int = 20) -> None:
        self.size, self.reads = size, 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads += 1
        return index + torch.rand(())


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(20)


def resumable(*args: Any, **kwargs: Any) -> Any:
    loader: Any = DataLoader(*args, **kwargs)
    kind = type(loader)
    make_resumable(loader)
    assert isinstance(loader, kind)
    return loader


def interrupted(build: Any, stop: int) -> tuple[list[Any], list[Any]]:
    """(all batches of an epoch and a half, the same with a stop and a new process in between)."""

    def batches(loader: Any, count: int) -> list[Any]:
        taken: list[Any] = []
        while len(taken) < count:
            for batch in loader:
                taken.append((batch.tolist(), torch.rand(()).item()))
                if len(taken) == count:
                    break
        return taken

    torch.manual_seed(5)
    expected = batches(build(), 8)
    torch.manual_seed(5)
    loader = build()
    taken = batches(loader, stop)
    state = json.loads(json.dumps(encode(loader.state_dict(), "")))
    random_state = torch.get_rng_state()
    torch.manual_seed(77)
    other = build()
    torch.set_rng_state(random_state)
    other.load_state_dict(decode(state))
    return expected, taken + batches(other, 8 - stop)


LOADERS = {
    "shuffled": lambda: resumable(Augmented(), batch_size=4, shuffle=True),
    "own generator": lambda: resumable(
        Augmented(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1)
    ),
    "sampler": lambda: resumable(
        Augmented(), batch_size=4,
        sampler=RandomSampler(range(20), replacement=True, generator=torch.Generator()),
    ),
    "weights": lambda: resumable(
        Augmented(), batch_size=4, sampler=WeightedRandomSampler([1.0] * 20, 20)
    ),
    "distributed": lambda: resumable(
        Augmented(), batch_size=4, sampler=DistributedSampler(range(20), num_replicas=1, rank=0)
    ),
    "stream": lambda: resumable(Stream(), batch_size=4),
}  # fmt: skip


@pytest.mark.parametrize("stop", [1, 3, 5, 7])
@pytest.mark.parametrize("name", list(LOADERS))
def test_loader_goes_on_with_the_next_batch(name: str, stop: int) -> None:
    expected, actual = interrupted(LOADERS[name], stop)
    assert actual == expected


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_loader_with_workers_goes_on_with_the_next_batch(persistent: bool) -> None:
    expected, actual = interrupted(
        lambda: resumable(
            Augmented(), batch_size=4, shuffle=True, num_workers=2, prefetch_factor=2,
            persistent_workers=persistent,
        ),
        3,
    )  # fmt: skip
    assert actual == expected


def test_epoch_of_a_distributed_sampler_comes_back() -> None:
    def build() -> Any:
        sampler: Any = DistributedSampler(range(20), num_replicas=2, rank=1)
        return resumable(range(20), batch_size=2, sampler=sampler)

    loader, other = build(), build()
    loader.sampler.set_epoch(3)
    expected = [batch.tolist() for batch in loader]
    next(iter(loader))
    other.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in other] == expected[1:]


def test_skipped_batches_are_not_read() -> None:
    loader = resumable(Augmented(), batch_size=4, shuffle=True)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    other = resumable(Augmented(), batch_size=4, shuffle=True)
    other.load_state_dict(loader.state_dict())
    assert len([*other]) == 2
    assert other.dataset.reads == 8


def test_finished_and_untouched_loaders_begin_anew() -> None:
    loader = resumable(Augmented(), batch_size=4)
    other = resumable(Augmented(), batch_size=4)
    for _ in range(2):
        other.load_state_dict(loader.state_dict())
        assert len([*other]) == 5
        assert len([*loader]) == 5


def test_interrupted_after_its_last_batch_an_epoch_has_nothing_left() -> None:
    loader = resumable(Augmented(), batch_size=4)
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    other = resumable(Augmented(), batch_size=4)
    other.load_state_dict(loader.state_dict())
    assert [len([*other]) for _ in range(2)] == [0, 5]


def test_position_of_another_loader_is_refused() -> None:
    state = resumable(Augmented(), batch_size=4).state_dict()
    with pytest.raises(castor.CheckpointError, match="batch_size=4, this one has 2"):
        resumable(Augmented(), batch_size=2).load_state_dict(state)
    with pytest.raises(castor.CheckpointError, match="num_batches=5, this one has 3"):
        resumable(Augmented(12), batch_size=4).load_state_dict(state)
    with pytest.raises(castor.CheckpointError, match="generator"):
        resumable(Augmented(), batch_size=4, generator=torch.Generator()).load_state_dict(state)


def test_boost_leaves_other_loaders_as_they_are(tmp_path: Path) -> None:
    model = tower()
    batches = [tower_batch(0)]
    *_, returned, _ = BOOSTER.boost(model, None, None, batches, None)
    assert returned is batches
    with pytest.raises(castor.UsageError, match="list does not know its position"):
        BOOSTER.save(tmp_path / "run", model, dataloader=batches)
    assert not list(tmp_path.iterdir())


class Stateful:
    """A loader with its own methods, as torchdata's StatefulDataLoader."""

    def __init__(self) -> None:
        self.position: dict[Any, Any] = {"files": ("a", 3), 7: b"\x00\xff"}

    def state_dict(self) -> dict[Any, Any]:
        return self.position

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        self.position = state


def test_loaders_with_their_own_state_use_it(tmp_path: Path) -> None:
    loader, other = Stateful(), Stateful()
    BOOSTER.save(tmp_path / "run", tower(), dataloader=loader, step=4)
    other.position = {}
    BOOSTER.load(tmp_path / "run", tower(), dataloader=other)
    assert other.position == loader.position


SIZE = 50


class Ranks:
    """Loaders over the same data, one a rank."""

    def __init__(self, count: int, batch_size: int, **options: Any) -> None:
        self.loaders: list[Any] = []
        for rank in range(count):
            sampler = RankSampler(range(SIZE), count, rank, seed=3, **options)
            self.loaders.append(
                resumable(
                    list(range(SIZE)),
                    batch_size=batch_size,
                    sampler=sampler,
                    drop_last=sampler.drop_last,
                )
            )
        self._epoch = [iter(())] * count

    def begin(self) -> None:
        self._epoch = [iter(loader) for loader in self.loaders]

    def take(self, batches: int) -> list[int]:
        """What all ranks see in so many batches, in the order that they share."""
        taken: list[int] = []
        for _ in range(batches):
            theirs = [next(epoch).tolist() for epoch in self._epoch]
            assert len({len(batch) for batch in theirs}) == 1
            taken += [index for together in zip(*theirs, strict=True) for index in together]
        return taken

    def rest(self) -> list[int]:
        taken: list[int] = []
        while True:
            try:
                taken += self.take(1)
            except StopIteration:
                return taken


@pytest.mark.parametrize("saved", [(1, 6), (2, 3), (3, 2), (4, 1)])
@pytest.mark.parametrize("loaded", [(1, 6), (2, 3), (3, 2), (4, 1), (2, 5)])
@pytest.mark.parametrize("shuffle", [False, True])
def test_any_number_of_ranks_goes_on_behind_the_samples_that_were_taken(
    saved: tuple[int, int], loaded: tuple[int, int], shuffle: bool
) -> None:
    order = list(RankSampler(range(SIZE), 1, 0, shuffle=shuffle, seed=3))
    before, after = Ranks(*saved, shuffle=shuffle), Ranks(*loaded, shuffle=shuffle)
    before.begin()
    taken = before.take(4)
    for loader in after.loaders:
        loader.load_state_dict(before.loaders[0].state_dict())
    after.begin()
    taken += after.take(2)
    once_more = Ranks(*saved, shuffle=shuffle)
    for loader in once_more.loaders:
        loader.load_state_dict(after.loaders[0].state_dict())
    once_more.begin()
    taken += once_more.rest()
    assert taken[:SIZE] == order
    assert taken[SIZE:] == order[: len(taken) - SIZE]  # so that every rank has as many
    assert len(taken) - SIZE < saved[0]
    once_more.begin()
    assert once_more.rest()[:SIZE] == order


@pytest.mark.parametrize("drop_last", [False, True])
def test_an_epoch_that_has_handed_out_all_is_over_for_any_number_of_ranks(drop_last: bool) -> None:
    before, after = (Ranks(size, 4, drop_last=drop_last) for size in (3, 2))
    before.begin()
    before.take(len(before.loaders[0]))
    for loader in after.loaders:
        loader.load_state_dict(before.loaders[0].state_dict())
    after.begin()
    assert after.rest() == []
    after.begin()
    assert len(after.rest()) == (48 if drop_last else SIZE)


@pytest.mark.parametrize(("name", "value"), [("seed", 4), ("shuffle", False)])
def test_an_order_of_samples_that_another_loader_has_is_refused(name: str, value: Any) -> None:
    options = {"seed": 3, "shuffle": True}
    loaders = [
        resumable(list(range(SIZE)), sampler=RankSampler(range(SIZE), 2, 0, **chosen))
        for chosen in (options, options | {name: value})
    ]
    next(iter(loaders[0]))
    with pytest.raises(castor.CheckpointError, match=f"{name}={options[name]}, this one has"):
        loaders[1].load_state_dict(loaders[0].state_dict())
