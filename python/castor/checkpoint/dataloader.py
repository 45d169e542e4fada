"""Data loaders that can be resumed: the position of every rank in one order of samples."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from castor.checkpoint import rng
from castor.errors import CheckpointError
from castor.runtime.boosted_model import BoostedModel
from castor.runtime.rank_group import check_equal

# --- A sampler whose ranks share one order of samples and one position in it ----------------------


class RankSampler(DistributedSampler[Any]):
    """A DistributedSampler that can begin anywhere in its epoch's order.

    Rank r of n takes samples r, r + n, r + 2n and so on of the samples that are left. So the
    samples that all ranks have taken are always a prefix of the order. Any number of ranks can go
    on behind it.
    """

    begin = 0
    """Number of samples at the beginning of the epoch's order that are skipped."""

    def __iter__(self) -> Iterator[int]:
        """Returns this rank's sample indices of the epoch, from `begin` on."""
        if self.begin == 0:
            return super().__iter__()
        whole: DistributedSampler[Any] = DistributedSampler(
            self.dataset, num_replicas=1, rank=0, shuffle=self.shuffle, seed=self.seed
        )
        whole.set_epoch(self.epoch)
        order = list(whole)
        left = order[self.begin :]
        beyond = len(left) % self.num_replicas
        if beyond and self.drop_last:
            del left[-beyond:]
        elif beyond:
            left += itertools.islice(itertools.cycle(order), self.num_replicas - beyond)
        return iter(left[self.rank :: self.num_replicas])

    @property
    def order(self) -> dict[str, Any]:
        """Values that decide an epoch's order, by their names in messages."""
        num_samples = len(self.dataset)  # type: ignore[arg-type]
        return {"num_samples": num_samples, "shuffle": self.shuffle, "seed": self.seed}

    def taken(self, batches: int, batch_size: int) -> int:
        """Returns the number of samples that all ranks have taken together in this epoch.

        Args:
            batches: Number of batches handed out on each rank, from `begin` on.
            batch_size: Number of samples in a batch of one rank.
        """
        step = batch_size * self.num_replicas
        taken, end = self.begin + batches * step, self.order["num_samples"]
        nothing_left = end - taken < (step if self.drop_last else 1)
        return int(end) if nothing_left else taken


# --- Data loaders that save their position and resume from it -------------------------------------

_FORMAT = "castor-dataloader-1"


class ResumableLoader(DataLoader[Any]):
    """A mixin that makes a DataLoader given to booster.boost resumable; the object stays the same.

    At `iter()` the loader notes the random states that the epoch begins with. Then it counts the
    batches that it hands out; batches that workers fetch ahead do not count.

    After `load_state_dict` the first `iter()` begins the saved epoch again with its random states.
    It skips the batches that were handed out, and leaves the random states as load_state_dict found
    them. If the epoch's last batch had been handed out, that first iteration is empty, as the
    interrupted one would have been.

    Batches are skipped by their indices alone where no worker and no iterable dataset is involved,
    otherwise by fetching them again. An iterable dataset that draws from the global generators
    while it is read must bring its own state (torchdata's StatefulDataLoader).

    With a RankSampler, a loader with another number of ranks or another batch size goes on behind
    the samples that all ranks had taken. It does not restore the saved random states then.
    """

    _castor_position: _Position | None
    _castor_resume: tuple[dict[str, Any], rng.Snapshot] | None

    def __iter__(self) -> Any:
        """Returns an iterator over the epoch's batches; after a resume, over the rest of them."""
        resume, self._castor_resume = self._castor_resume, None
        if resume is not None:
            state, now = resume
            return self._go_on(state, now) if self._same_batches(state) else self._go_behind(state)
        if (sampler := _rank_sampler(self)) is not None:
            sampler.begin = 0
        return self._begin()

    def _begin(self) -> Any:
        begun = {
            "rng": rng.snapshot(),
            "generators": [generator.get_state() for generator in _generators(self)],
            "sampler_epoch": _sampler_epoch(self),
        }
        self._castor_position = _Position(begun)
        return _Batches(super().__iter__(), self._castor_position)

    def _go_behind(self, state: dict[str, Any]) -> Any:
        """Returns the rest of the epoch, for another number of ranks or another batch size."""
        sampler = _sampler_of(self)
        sampler.set_epoch(state["begun"]["sampler_epoch"])
        sampler.begin = state["order"]["taken"]
        return self._begin()

    def _go_on(self, state: dict[str, Any], now: rng.Snapshot) -> Any:
        begun = state["begun"]
        own = [generator.get_state() for generator in _generators(self)]
        rng.restore(begun["rng"])
        _set_generators(self, begun["generators"])
        if begun["sampler_epoch"] is not None:
            _sampler_of(self).set_epoch(begun["sampler_epoch"])
        if (sampler := _rank_sampler(self)) is not None and state.get("order"):
            sampler.begin = state["order"]["begin"]
        try:
            batches = super().__iter__()
            _pass_over(self, batches, state["handed_out"])
        finally:
            rng.restore(now)
            _set_generators(self, own)
        self._castor_position = _Position(begun, state["handed_out"])
        return _Batches(batches, self._castor_position)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the latest iteration; between epochs, only generators' states."""
        if self._castor_resume is not None:
            return self._castor_resume[0]
        position = self._castor_position
        if position is None or position.finished:
            position = _Position(None)
        return {
            "format": _FORMAT,
            "begun": position.begun,
            "handed_out": position.handed_out,
            "generators": [generator.get_state() for generator in _generators(self)],
            "batch_size": self.batch_size,
            "num_batches": _length(self),
            "order": self._order(position.handed_out),
        }

    def _order(self, handed_out: int) -> dict[str, Any] | None:
        """Returns the position of all ranks in the epoch's order; None: there is no RankSampler."""
        sampler = _rank_sampler(self)
        if sampler is None:
            return None
        return {
            **sampler.order,
            "ranks": sampler.num_replicas,
            "begin": sampler.begin,
            "taken": sampler.taken(handed_out, self.batch_size or 1),
        }

    def _same_batches(self, state: dict[str, Any]) -> bool:
        """Whether the saved epoch was divided into batches as this loader divides it."""
        sampler, order = _rank_sampler(self), state.get("order")
        if sampler is None or order is None:
            return True
        return (order["ranks"], state["batch_size"]) == (sampler.num_replicas, self.batch_size)

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Checks that `state` fits this loader.

        Raises:
            CheckpointError: The state is that of another loader.
        """
        if state.get("format") != _FORMAT:
            raise CheckpointError("the saved dataloader position is not that of a torch DataLoader")
        sampler, saved = _rank_sampler(self), state | (state.get("order") or {})
        own: dict[str, Any] = {} if sampler is None else sampler.order
        if self._same_batches(state):
            own |= {"batch_size": self.batch_size, "num_batches": _length(self)}
        for name, value in own.items():
            if saved.get(name, value) != value:
                raise CheckpointError(
                    f"the saved dataloader position counts batches of a loader with "
                    f"{name}={saved[name]}, this one has {value}; build it over the same data"
                )
        if len(state["generators"]) != len(_generators(self)):
            raise CheckpointError(
                f"the saved dataloader had {len(state['generators'])} generators of its own, this "
                f"one has {len(_generators(self))}; give generator= as before"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Makes the next `iter()` go on where `state` was taken.

        Raises:
            CheckpointError: The state is that of another loader.
        """
        self.check_state_dict(state)
        if self._same_batches(state):
            _set_generators(self, state["generators"])
        self._castor_position = None
        self._castor_resume = (state, rng.snapshot()) if state["begun"] is not None else None


@dataclass
class _Position:
    """The progress of the latest iteration. The loader holds it, not the iterator's workers."""

    begun: dict[str, Any] | None
    """Random states and sampler epoch at the beginning; None: no iteration is under way."""
    handed_out: int = 0
    """Number of batches handed out."""
    finished: bool = False
    """Whether the iteration has ended."""


class _Batches:
    """An iterator for the training loop that counts the batches it hands out."""

    def __init__(self, batches: Any, position: _Position) -> None:
        self._batches = batches
        self._position = position

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self._batches)

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            self._position.finished = True
            raise
        self._position.handed_out += 1
        return batch


def make_resumable(loader: Any) -> None:
    """Gives a torch DataLoader `state_dict` and `load_state_dict`, in place.

    Loaders that have these methods, and objects that are no DataLoader, stay as they are.
    """
    if isinstance(loader, DataLoader) and not hasattr(loader, "state_dict"):
        kind: Any = type(loader)
        loader.__class__ = _resumable_class(kind)
        loader.__dict__["_castor_position"] = None
        loader.__dict__["_castor_resume"] = None


@functools.cache
def _resumable_class(base: Any) -> Any:
    return type(base.__name__, (ResumableLoader, base), {"__module__": base.__module__})


def check_equal_loaders(shared: BoostedModel, loader: Any) -> None:
    """Checks that ranks which share a dataset sample it in the same order. Collective.

    Nothing is compared where a rank has no torch loader with a DistributedSampler: its data are its
    own.

    Args:
        shared: The model that the ranks train.
        loader: Data loader of this rank, or None.

    Raises:
        UsageError: The samplers of two ranks differ; every rank raises it.
    """
    if shared.ranks is None:
        return
    sampler = _sampler_of(loader) if isinstance(loader, DataLoader) else None
    order = None
    if isinstance(sampler, DistributedSampler):
        order = {
            "the length of the dataloader's dataset": len(sampler.dataset),  # type: ignore[arg-type]
            **{f"the {name} of the dataloader's sampler": getattr(sampler, name)
               for name in ("shuffle", "seed", "drop_last", "num_replicas")},
        }  # fmt: skip
    everyone = shared.gather(order)
    if all(everyone):
        check_equal(everyone)


def _pass_over(loader: ResumableLoader, batches: Any, count: int) -> None:
    by_index = loader.num_workers == 0 and not isinstance(loader.dataset, IterableDataset)
    for _ in range(count):
        try:
            if by_index:
                batches._next_index()  # its __next__ draws this before it reads the dataset
                batches._num_yielded += 1
            else:
                next(batches)
        except StopIteration:
            raise CheckpointError(
                f"the dataloader ended before the {count} batches that the saved epoch had handed "
                "out; build it over the same data"
            ) from None


def _sampler_of(loader: DataLoader[Any]) -> Any:
    return getattr(loader.batch_sampler, "sampler", loader.sampler)


def _rank_sampler(loader: ResumableLoader) -> RankSampler | None:
    sampler = _sampler_of(loader)
    return sampler if isinstance(sampler, RankSampler) else None


def _sampler_epoch(loader: ResumableLoader) -> int | None:
    """Returns the epoch of a DistributedSampler or a sampler like it; None: it has none."""
    sampler = _sampler_of(loader)
    return getattr(sampler, "epoch", None) if hasattr(sampler, "set_epoch") else None


def _generators(loader: ResumableLoader) -> list[torch.Generator]:
    """Returns the generators of the loader and its samplers, each once."""
    owners = (loader, loader.sampler, loader.batch_sampler, _sampler_of(loader))
    found = (getattr(owner, "generator", None) for owner in owners)
    return list({id(item): item for item in found if isinstance(item, torch.Generator)}.values())


def _set_generators(loader: ResumableLoader, states: list[torch.Tensor]) -> None:
    for generator, state in zip(_generators(loader), states, strict=True):
        generator.set_state(state)


def _length(loader: ResumableLoader) -> int | None:
    try:
        return len(loader)
    except TypeError:  # an iterable dataset without a length
        return None
