"""A group of ranks, and the collectives among them: a thin layer over c10d's process groups."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import distributed

from castor import _C
from castor.errors import Error, UsageError
from castor.runtime.process_groups import own_groups
from castor.runtime.ranks import memory_mark
from castor.runtime.waits import served_by_another

if TYPE_CHECKING:
    from typing_extensions import Self

Result = TypeVar("Result")

GIVEN_THE_SAME = "all ranks train one model, and are given the same"
"""The remedy that check_equal names where there is no better one."""
_MOST_LISTED = 4
"""Number of different values that a message lists."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RankGroup:
    """Some ranks of a run, with a process group of their own.

    Calls are collective: every rank of the group makes the same ones in the same order. They raise
    Error if another rank is gone.
    """

    rank: int
    """Index of this rank in the group."""
    size: int
    """Number of ranks in the group."""
    members: Sequence[int] = ()
    """Numbers of these ranks among all ranks of the run, for messages; empty: the indices."""
    name: str = ""
    """Name of the process group."""
    group: _C.RankGroup
    """Collectives of host memory over the process group."""
    tensors: _C.RankTensors | None = None
    """Collectives of tensors, through memory that ranks share where they can, and over a process
    group for devices where there is one. None: the group sends none."""

    @classmethod
    def of(cls, name: str, members: Sequence[int], *, sends_tensors: bool = True) -> Self:
        """Makes the group of a process group. Collective.

        Args:
            name: Name of the process group, which is used here only.
            members: Numbers of its ranks among all ranks of the run.
            sends_tensors: Whether the group has collectives of tensors.

        Raises:
            UsageError: The environment's CASTOR_RANK_LINK differs between ranks; see memory_mark.
        """
        rank, size = members.index(distributed.get_rank()), len(members)
        bare = RankGroup(rank=rank, size=size, members=members, group=_C.RankGroup(name))
        tensors = None
        if sends_tensors:
            link = os.environ.get("CASTOR_RANK_LINK")
            bare.check_equal({"the environment's CASTOR_RANK_LINK": link})
            tensors = _C.RankTensors(name, memory_mark=memory_mark())
        return cls(**{**vars(bare), "name": name, "tensors": tensors})

    @classmethod
    def of_all_ranks(cls, *, sends_tensors: bool = True) -> Self:
        """Makes a group of all ranks, with a process group of its own. Collective."""
        members = range(distributed.get_world_size())
        (name,) = own_groups([members], 1)
        return cls.of(name, members, sends_tensors=sends_tensors)

    def all_gather_object(self, value: Any, *, place: str = "") -> list[Any]:
        """Returns the picklable values of all ranks, in rank order.

        Args:
            value: This rank's value.
            place: Place in the program where this rank is, for messages.
        """
        told = f"is at {place or 'what ranks tell each other outside passes'}"
        # Where ranks share memory, this link can name a rank that has ended or stopped.
        given = (self.tensors.gather_bytes if self.tensors else self.group.gather)(
            pickle.dumps(value), told
        )
        return [pickle.loads(one) for one in given]

    def barrier(self, what: str) -> None:
        """Returns when every rank has called it; `what` names this rank's action in messages."""
        self.group.barrier(what)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Gives every rank rank 0's values of a tensor, in place."""
        full = tensor.detach()
        values = full.cpu().contiguous()
        self.group.broadcast(values)
        if values is not full:
            full.copy_(values)

    def broadcast_all(self, tensors: Iterable[torch.Tensor]) -> None:
        """Gives every rank rank 0's values of tensors, such as a model's parameters, in place."""
        for tensor in tensors:
            self.broadcast(tensor)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the sum over the ranks, a new tensor with the same bits on all.

        It is in rank order, unless the backend adds (reduction="backend").
        """
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        self.links.all_reduce(total)
        return total

    def all_gather(self, shard: torch.Tensor) -> torch.Tensor:
        """Returns the ranks' tensors of one shape, stacked in rank order."""
        shard = shard.detach().contiguous()
        shards = shard.new_empty((self.size, *shard.shape))
        self.links.all_gather(shard, shards)
        return shards

    def all_to_all(self, sent: torch.Tensor) -> torch.Tensor:
        """Sends the i-th of stacked tensors to rank i; returns those received, in rank order."""
        received = torch.empty_like(sent)
        self.links.all_to_all(sent, received)
        return received

    def reduce_scatter(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Returns this rank's slice of the ranks' sum along a dimension.

        The sum is in rank order, in fp32 and rounded once, or the backend's (reduction="backend").
        """
        slices = torch.stack(tensor.detach().chunk(self.size, dim))
        if self.links.backend_sums(slices):
            own = torch.empty_like(slices[0])
            self.links.reduce_scatter(slices, own)
            return own
        return sum_in_rank_order(self.all_to_all(slices))

    @property
    def numbers(self) -> Sequence[int]:
        """Numbers of these ranks among all ranks of the run, in rank order."""
        return self.members or range(self.size)

    @property
    def links(self) -> _C.RankTensors:
        """Collectives of tensors, in a group that has them."""
        assert self.tensors is not None
        return self.tensors

    def check_equal(self, facts: Mapping[str, Any], *, extra: Any = None) -> list[Any]:
        """Checks that every rank was given the same.

        Args:
            facts: Values to compare, by their names in messages; different values need a different
                repr.
            extra: Further value of this rank, which may differ; picklable.

        Returns:
            `extra` of every rank, in rank order.

        Raises:
            UsageError: Ranks differ; every rank raises it.
        """
        place = f"the check that all were given the same: {next(iter(facts))}"
        mine = {name: repr(value) for name, value in facts.items()}
        everyone = self.all_gather_object((mine, extra), place=place)
        check_equal([theirs for theirs, _ in everyone], numbers=self.numbers)
        return [other for _, other in everyone]

    def on_first(
        self,
        work: Callable[[], Result],
        *,
        serve: Callable[[], None],
        end_service: Callable[[], None],
    ) -> Result:
        """Runs `work` on rank 0 for all ranks, which all return its result or raise its error.

        Args:
            work: Called once, on rank 0.
            serve: Called on the other ranks meanwhile; returns after rank 0's `end_service`.
            end_service: Called on rank 0 when `work` is over.

        Raises:
            Exception: What `work` raised on rank 0.
        """
        # From here on all ranks wait for rank 0.
        self.all_gather_object(None, place="a save or a load")
        outcome: tuple[Any, Exception | None] = None, None
        if self.rank == 0:
            try:
                outcome = work(), None
            except Exception as error:
                outcome = None, sendable(error)
            end_service()
        else:
            with served_by_another():
                serve()
        with served_by_another():
            returned, raised = self.all_gather_object(outcome)[0]
        if raised is not None:
            raise raised
        result: Result = returned
        return result


@dataclass(frozen=True, kw_only=True, eq=False)
class DataParallelGroup(RankGroup):
    """The ranks that share one boosted model and have different data."""

    names: tuple[str, str, str]
    """Names of three process groups: `name`, for passes and calls between them; one for gradients,
    which are summed beside backward; and one for updates, which may run beside all else."""
    saves: RankGroup
    """The same ranks, for checkpoints that are written beside the training."""

    @classmethod
    def make(cls, subsets: Sequence[Sequence[int]]) -> DataParallelGroup | None:
        """Makes the group of this process's subset of all ranks; None: it is alone there.

        Collective: every rank calls it with the same subsets, of which each rank is in one.
        """
        rank = distributed.get_rank() if distributed.is_initialized() else 0
        members = next(subset for subset in subsets if rank in subset)
        if len(members) == 1:
            return None
        passes, gradients, updates, saves = own_groups(subsets, 4)
        of_passes = RankGroup.of(passes, members)
        return cls(
            **vars(of_passes),
            names=(passes, gradients, updates),
            saves=RankGroup.of(saves, members),
        )


def check_equal(
    everyone: Sequence[Mapping[str, Any]],
    *,
    numbers: Sequence[int] = (),
    remedy: str = GIVEN_THE_SAME,
) -> None:
    """Checks that all ranks have equal values.

    Args:
        everyone: Values of each rank, by their names in messages, in rank order.
        numbers: Numbers of the ranks; empty: 0, 1, 2, ...
        remedy: End of the message, which says what to change.

    Raises:
        UsageError: Ranks differ; it names them all, with the first value in which they do.
    """
    if all(facts == everyone[0] for facts in everyone):
        return
    for name in dict.fromkeys(name for facts in everyone for name in facts):
        found: list[tuple[Any, list[int]]] = []
        for number, facts in zip(numbers or range(len(everyone)), everyone, strict=True):
            value = facts.get(name)
            known = next((ranks for other, ranks in found if other == value), None)
            if known is None:
                found.append((value, [number]))
            else:
                known.append(number)
        if len(found) > 1:
            of_ranks = [_numbers(ranks) for _, ranks in found]
            values = [str(value) for value, _ in found]
            raise UsageError(f"{_listed(of_ranks)} differ in {name}: {_listed(values)}; {remedy}")


def _numbers(ranks: Sequence[int]) -> str:
    """Returns the numbers of ranks in words, such as "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    numbers = (f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(numbers)}"


def _listed(words: Sequence[str]) -> str:
    """Joins words, of which many are cut short: "a, b, c and 61 others"."""
    if len(words) > _MOST_LISTED:
        words = [*words[: _MOST_LISTED - 1], f"{len(words) - _MOST_LISTED + 1} others"]
    return f"{', '.join(words[:-1])} and {words[-1]}"


def sum_in_rank_order(parts: torch.Tensor) -> torch.Tensor:
    """Returns the sum of the ranks' tensors (ranks, ...), in fp32 and rounded once.

    A reduction of torch may add in another order on another device.
    """
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:].unbind():
        total += part
    return total.to(parts.dtype)


def sendable(error: Exception) -> Exception:
    """Returns the error, or an Error with its text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return Error(f"{type(error).__name__}: {error}")
    return error
