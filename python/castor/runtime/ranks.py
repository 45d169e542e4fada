"""The ranks of this process: what launchers' environments tell of them, and their process group."""

from __future__ import annotations

import atexit
import hashlib
import os
import re
import socket
import warnings
from typing import Any

import torch
from torch import distributed, nn
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed.rendezvous import rendezvous

from castor.errors import UsageError

# --- Reads the number of processes, and of those on this machine, from launchers' environments ----

# castor needs only torch.distributed's environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), or
# a process group. torchrun, Ray Train and Lightning give the number of ranks on this machine by
# LOCAL_RANK and LOCAL_WORLD_SIZE, srun and Open MPI's mpirun by variables of their own.


def launched_size() -> int:
    """Returns the size of this process's group, or the number of processes that were launched.

    It is 1 if there is neither. Not collective: it makes no group.
    """
    if _joined():
        return distributed.get_world_size()
    return _told("WORLD_SIZE") or 1


def rank_of_node() -> int:
    """Returns this process's number on its machine; 0 if no launcher gives it."""
    return _place_on_node()[0]


def ranks_of_node() -> int:
    """Returns the number of ranks on this machine; 1 if no launcher gives it."""
    return _place_on_node()[1]


def name_of_node() -> str:
    """Returns a name that is equal on the ranks of one machine."""
    return socket.gethostname()


def warn_of_neighbours(here: int, *, stacklevel: int) -> None:
    """Warns if the launcher has given a smaller number of ranks on this machine.

    Args:
        here: Number of ranks on this machine.
        stacklevel: As warnings.warn counts, from the caller of this function.
    """
    told = ranks_of_node()
    if here > told and "LOCAL_WORLD_SIZE" not in os.environ:
        warnings.warn(
            f"{here} ranks are on this machine ({name_of_node()}), and their launcher has told "
            f"each of {told}: default budgets are too large, and each takes the GPU of a rank 0. "
            f"Set LOCAL_WORLD_SIZE={here}, and LOCAL_RANK from 0 to {here - 1}",
            RuntimeWarning,
            stacklevel=stacklevel + 1,
        )


def _place_on_node() -> tuple[int, int]:
    """Returns (number of this rank on its machine, number of ranks there)."""
    size = launched_size()
    if size == 1:
        return 0, 1
    for which, of in (
        (_told("LOCAL_RANK"), _told("LOCAL_WORLD_SIZE")),
        (_told("SLURM_LOCALID"), _tasks_of_slurm(size)),
        (_told("OMPI_COMM_WORLD_LOCAL_RANK"), _told("OMPI_COMM_WORLD_LOCAL_SIZE")),
        (distributed.get_rank() if _joined() else _told("RANK"), size if _meet_here() else None),
    ):
        if of:
            return (0 if of == 1 else which or 0), of
    return 0, 1


def _told(name: str) -> int | None:
    """Returns the number in a launcher's variable; None if there is none."""
    told = os.environ.get(name, "")
    return int(told) if told.isdecimal() and (_joined() or "RANK" in os.environ) else None


def _joined() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def _tasks_of_slurm(size: int) -> int | None:
    """Returns the number of tasks that srun started here, if they are the ranks; else None."""
    node, each = _told("SLURM_NODEID"), os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    if _told("SLURM_STEP_NUM_TASKS") != size or node is None:
        return None
    counts: list[int] = []  # of "4(x2),3": 4, 4, 3
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", each):
        counts += [int(count)] * int(times or 1)
    return counts[node] if node < len(counts) else None


def _meet_here() -> bool:
    """Whether MASTER_ADDR is a loopback address, so that all ranks are on this machine."""
    address = os.environ.get("MASTER_ADDR", "")
    return address in ("localhost", "::1") or address.startswith("127.")


# --- The processes that train one model together: torch.distributed's ranks -----------------------

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
    _leave_at_exit()


def be_alone() -> None:
    """Makes torch.distributed's default process group of this process alone.

    Some of torch's classes need a group. No effect if there is one.
    """
    if not distributed.is_initialized():
        distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        _leave_at_exit()


def _leave_at_exit() -> None:
    """Has this process leave its group when it exits, and no child that it forks.

    A child does not have the threads of the group, for whose end it would wait for ever.
    """
    process = os.getpid()

    def end() -> None:
        if os.getpid() == process:
            leave()

    atexit.register(end)


def leave() -> None:
    """Ends torch.distributed's process group, where there is one.

    Without this, gloo's threads may abort a process that exits: they release the last collective's
    tensors when Python is gone already.
    """
    if distributed.is_initialized():
        distributed.destroy_process_group()


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
