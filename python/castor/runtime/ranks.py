"""Whether this process trains alone."""

from __future__ import annotations

import os

from torch import distributed


def check_one_process() -> None:
    """Raises where several processes train one model: castor does not synchronise them yet.

    Raises:
        NotImplementedError: torch.distributed has more than one rank, or a launcher (torchrun, or
            another that sets RANK and WORLD_SIZE) has started more than one.
    """
    ranks, found = _num_ranks()
    if ranks > 1:
        raise NotImplementedError(
            f"castor does not train on several ranks yet, and {found}: each would train a model of "
            "its own, unsynchronised. Start one process (python, or torchrun --nproc-per-node=1); "
            "for runs that are meant to be independent, start each without torchrun's RANK and "
            "WORLD_SIZE and without init_process_group"
        )


def _num_ranks() -> tuple[int, str]:
    """How many, and what says so."""
    if distributed.is_available() and distributed.is_initialized():
        ranks = distributed.get_world_size()
        return ranks, f"the process group has {ranks}"
    world_size = os.environ.get("WORLD_SIZE", "")
    if "RANK" in os.environ and world_size.isdecimal():
        return int(world_size), f"WORLD_SIZE={world_size} and RANK={os.environ['RANK']} are set"
    return 1, ""
