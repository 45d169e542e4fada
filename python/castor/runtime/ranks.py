"""The processes that train one model together: torch.distributed's ranks."""

from __future__ import annotations

import atexit
import hashlib
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import distributed, nn
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed.rendezvous import rendezvous

from castor import _C
from castor.errors import Error, UsageError
from castor.runtime.launched import launched_size
from castor.runtime.process_groups import own_groups
from castor.runtime.waits import served_by_another

Result = TypeVar("Result")

_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables of torchrun, and of every launcher like it."""


def launch_from_torch() -> None:
    """Joins the ranks that torchrun, or another launcher like it, has started.

    Makes torch.distributed's default process group from RANK, WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT, with gloo for the CPU and NCCL for GPUs, and ends it at exit. Booster.boost calls
    it if there is no group yet. No effect if there is one.

    Raises:
        UsageError: No launcher has started this process.
    """
    if distributed.is_initialized():
        return
    missing = [name for name in _LAUNCHED if name not in os.environ]
    if missing:
        slurm = "; tasks of srun: RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS"
        raise UsageError(
            f"no launcher has started this process: {', '.join(missing)} not set; start it with "
            "torchrun --nproc-per-node N, or call torch.distributed.init_process_group"
            f"{slurm if 'SLURM_PROCID' in os.environ else ''}"
        )
    store, rank, size = next(rendezvous("env://"))
    # After a restart torchrun keeps its store, which has the addresses of the ended processes.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
        store=PrefixStore(f"castor/attempt {attempt}", store),
        rank=rank,
        world_size=size,
    )
    atexit.register(leave)


def be_alone() -> None:
    """Makes torch.distributed's default process group of this process alone.

    Some of torch's classes need a group. No effect if there is one.
    """
    if not distributed.is_initialized():
        distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        atexit.register(leave)


def leave() -> None:
    """Ends torch.distributed's process group, where there is one.

    Without this, gloo's threads may abort a process that exits: they release the last collective's
    tensors when Python is gone already.
    """
    if distributed.is_initialized():
        distributed.destroy_process_group()


@dataclass(frozen=True, kw_only=True, eq=False)
class Peers:
    """Some ranks of a run, with a process group of their own.

    Calls are collective, and raise Error if another rank is gone.
    """

    rank: int
    size: int
    group: _C.RankGroup

    def gather(self, value: Any) -> list[Any]:
        """Returns the picklable values of all ranks, in rank order."""
        return self.gather_at("what ranks tell each other outside passes", value)

    def gather_at(self, place: str, value: Any) -> list[Any]:
        """Gathers as `gather` does; `place` names the purpose in messages."""
        given = self.group.gather(pickle.dumps(value), f"is at {place}")
        return [pickle.loads(one) for one in given]

    def meet(self, what: str) -> None:
        """Returns when every rank has called it; `what` names this rank's action in messages."""
        self.group.meet(what)

    def share(self, tensor: torch.Tensor) -> None:
        """Gives every rank rank 0's values of a tensor, in place."""
        whole = tensor.detach()
        values = whole.cpu().contiguous()
        self.group.broadcast(values)
        if values is not whole:
            whole.copy_(values)

    def share_all(self, model: nn.Module) -> None:
        """Gives every rank rank 0's parameters and buffers, in place."""
        for tensor in (*model.parameters(), *model.buffers()):
            self.share(tensor)

    def check_equal(self, facts: Mapping[str, Any], *, extra: Any = None) -> list[Any]:
        """Checks that every rank was given the same.

        Args:
            facts: Values to compare, by their names in messages; different values need a different
                repr.
            extra: Further value of this rank, which may differ; picklable.

        Returns:
            `extra` of every rank, in rank order.

        Raises:
            UsageError: Two ranks differ; every rank raises it.
        """
        place = f"the check that all were given the same: {next(iter(facts))}"
        mine = {name: repr(value) for name, value in facts.items()}
        everyone = self.gather_at(place, (mine, extra))
        check_equal_on_all([theirs for theirs, _ in everyone])
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
        self.gather_at("a save or a load", None)  # from here on all ranks wait for rank 0
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
            returned, raised = self.gather(outcome)[0]
        if raised is not None:
            raise raised
        result: Result = returned
        return result


@dataclass(frozen=True, kw_only=True, eq=False)
class LinkedPeers(Peers):
    """Peers whose gather can name a rank that has ended or stopped, where ranks share memory."""

    link: _C.RankTensors

    def gather_at(self, place: str, value: Any) -> list[Any]:
        """See Peers."""
        given = self.link.gather_bytes(pickle.dumps(value), f"is at {place}")
        return [pickle.loads(one) for one in given]


@dataclass(frozen=True, kw_only=True, eq=False)
class Ranks(LinkedPeers):
    """The ranks that share one boosted model and have different data."""

    names: tuple[str, str, str]
    """Names of three groups: `group`, for passes and calls between them; a group for gradients,
    which are summed beside backward; and one for updates, which may run beside all else."""
    saves: Peers
    """The same ranks, for checkpoints that are written beside the training."""
    memory_mark: str | None
    """See memory_mark()."""


def check_equal_on_all(everyone: Sequence[Mapping[str, Any]]) -> None:
    """Raises UsageError for the first rank that was given other values than rank 0.

    Args:
        everyone: Values of each rank, by their names in messages, in rank order.
    """
    for rank, theirs in enumerate(everyone):
        for name, first in everyone[0].items():
            if theirs[name] != first:
                raise UsageError(
                    f"rank 0 and rank {rank} differ in {name}: {first} and {theirs[name]}; "
                    "all ranks train one model, and are given the same"
                )


def sendable(error: Exception) -> Exception:
    """Returns the error, or an Error with its text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return Error(f"{type(error).__name__}: {error}")
    return error


def make_ranks(parts: Sequence[Sequence[int]]) -> Ranks | None:
    """Makes the Ranks of this process's subset of all ranks.

    Collective: every rank calls it with the same `parts`, after rank_and_size.

    Args:
        parts: Subsets of all ranks; each rank is in one of them.

    Returns:
        The ranks; None if the subset is this process alone.
    """
    rank, _ = rank_and_size()
    mine = next(part for part in parts if rank in part)
    if len(mine) == 1:
        return None
    passes, gradients, updates, saves = own_groups(parts, 4)
    own, size = mine.index(rank), len(mine)
    mark = common_memory_mark(Peers(rank=own, size=size, group=_C.RankGroup(passes)))
    return Ranks(
        rank=own,
        size=size,
        names=(passes, gradients, updates),
        saves=_linked(saves, own, size, mark),
        memory_mark=mark,
        group=_C.RankGroup(passes),
        link=_C.RankTensors(passes, memory_mark=mark),
    )


def make_savers() -> Peers:
    """Makes Peers of all ranks for checkpoints that they write beside the training.

    Collective: every rank calls it, after rank_and_size.
    """
    rank, size = rank_and_size()
    (name,) = own_groups([range(size)], 1)
    mark = common_memory_mark(Peers(rank=rank, size=size, group=_C.RankGroup(name)))
    return _linked(name, rank, size, mark)


def _linked(name: str, rank: int, size: int, mark: str | None) -> LinkedPeers:
    return LinkedPeers(
        rank=rank,
        size=size,
        group=_C.RankGroup(name),
        link=_C.RankTensors(name, memory_mark=mark),
    )


def common_memory_mark(ranks: Peers) -> str | None:
    """Returns this rank's memory_mark, and checks that CASTOR_RANK_LINK is equal. Collective.

    Raises:
        UsageError: The variable differs between ranks; see also memory_mark.
    """
    ranks.check_equal({"the environment's CASTOR_RANK_LINK": os.environ.get("CASTOR_RANK_LINK")})
    return memory_mark()


def memory_mark() -> str | None:
    """Returns a mark that is equal on ranks that may share memory; None: none may.

    With CASTOR_RANK_LINK="group" no ranks may share memory. With "node" only ranks of one
    GROUP_RANK may, so that one machine can simulate several. "auto" is the default.

    Raises:
        UsageError: CASTOR_RANK_LINK has another value, or is "node" and GROUP_RANK is not set.
    """
    link = os.environ.get("CASTOR_RANK_LINK", "auto")
    if link not in ("auto", "group", "node"):
        raise UsageError(f'CASTOR_RANK_LINK is {link!r}; "auto", "group" and "node" are known')
    if link == "node" and "GROUP_RANK" not in os.environ:
        raise UsageError(
            'CASTOR_RANK_LINK is "node", and the launcher has not set GROUP_RANK, which says on '
            'which machine a rank counts; start with torchrun, or leave it at "auto"'
        )
    return {"auto": "", "group": None}.get(link, os.environ.get("GROUP_RANK"))


def may_share_memory() -> bool:
    """Whether ranks of one machine may share memory; see memory_mark."""
    return memory_mark() is not None


def rank_and_size() -> tuple[int, int]:
    """Returns (rank, size) of this process; joins the ranks that a launcher has started.

    Collective: every rank calls it.
    """
    if not distributed.is_available():
        return 0, 1
    if not distributed.is_initialized():
        if launched_size() < 2:
            return 0, 1
        launch_from_torch()
    return distributed.get_rank(), distributed.get_world_size()


def describe_parameters(model: nn.Module) -> dict[str, Any]:
    """Returns facts that must be equal on every rank, by their names in messages."""
    described = [
        f"{name}{tuple(param.shape)}{param.dtype}{'' if param.requires_grad else ' frozen'}"
        for name, param in model.named_parameters()
    ]
    digest = hashlib.sha256("\n".join(described).encode()).hexdigest()[:12]
    return {
        "the number of the model's parameters": len(described),
        "names, shapes, dtypes or requires_grad of parameters": digest,
    }
