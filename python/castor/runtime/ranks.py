"""The processes that train one model together: torch.distributed's ranks."""

from __future__ import annotations

import atexit
import hashlib
import os
from typing import Any

import torch
from torch import distributed, nn
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed.rendezvous import rendezvous

from castor.errors import UsageError
from castor.runtime.launched import launched_size

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
