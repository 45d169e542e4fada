"""Reads the number of processes, and of those on this machine, from launchers' environments.

castor needs only torch.distributed's environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), or a
process group. torchrun, Ray Train and Lightning give the number of ranks on this machine by
LOCAL_RANK and LOCAL_WORLD_SIZE, srun and Open MPI's mpirun by variables of their own.
"""

from __future__ import annotations

import os
import re
import socket
import warnings

from torch import distributed


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
