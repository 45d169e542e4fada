"""Starts commands on several ranks, as torchrun and castor run would, from a warm process."""

import os
from pathlib import Path

from rank_processes import Outcome, Rank, finish, held_port, nursery

UNDER_CASTOR = ("-m", "castor.integrations.script")
"""What castor run starts: its arguments are settings, a script, and the script's own."""


def run_ranks(directory: Path, size: int, *command: str) -> list[Outcome]:
    """Runs `python COMMAND` in a directory on ranks; one is alone, without a launcher."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with held_port() as holder:
        if size > 1:
            environment |= {
                "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "GROUP_RANK": "0",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(holder.getsockname()[1]),
            }  # fmt: skip
        ranks = []
        for rank in range(size):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if size > 1 else {}
            channel, _ = nursery(rank % 2)
            ranks.append(Rank(channel, environment | own, directory, *command, held_port=holder))
    return finish(ranks)
