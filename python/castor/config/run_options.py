"""The options of `castor run` that say where a script runs, and on how many ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Ranks of a script, and the files about its run."""

    report: Path | None = None
    """File for all figures at the end: FILE.json, or FILE.html for a page of the model that took
    the most steps."""
    nproc: int | None = None
    """Ranks on this machine. Default: one process, not launched unless another option needs it."""
    nodes: int = 1
    """Machines; each runs this command."""
    rendezvous: str | None = None
    """Address at which several machines meet: HOST:PORT on one of them."""
    join_timeout: float = 25.0
    """Seconds to wait for the other machines."""
    max_restarts: int = 0
    """Number of times that all ranks begin again after a failure."""
    bind: bool = True
    """Keep each rank to a NUMA node's cores, where there are several."""
    plan: Path | None = None
    """File of castor plan: its ranks, and HybridParallelPlugin('auto')'s layout."""
    log_dir: Path | None = None
    """Directory of the output of ranks other than 0; else a temporary one, which stays after
    failures."""
