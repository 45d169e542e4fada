"""`castor run`: starts a script on every rank of this machine, as torchrun does."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from castor.errors import UsageError

_TAIL = 20
"""Lines of a failed rank's log that are shown."""


def run(
    script: str,
    arguments: Sequence[str],
    *,
    module: bool,
    nproc: int,
    nodes: int,
    rendezvous: str | None,
    max_restarts: int,
    log_dir: Path | None,
) -> int:
    """Runs a script on `nproc` ranks here, and returns when all are over.

    Rank 0 of the machine keeps the terminal; what the others write goes to files. Where a rank
    fails, the others are ended, and the end of its log is shown. Every rank finds its place in
    torchrun's environment variables.

    Args:
        script: A Python file, or a module's name.
        arguments: Its own.
        module: Whether `script` is a module.
        nproc: Ranks on this machine.
        nodes: Machines; each runs this command.
        rendezvous: Where machines meet, HOST:PORT on one of them; needed with several.
        max_restarts: How often all ranks begin again after a failure.
        log_dir: Of the other ranks' output; by default a temporary one, which stays after failures.

    Returns:
        0, or the exit status for the shell: that of the rank that failed first, 128 and the signal
        for a killed one.

    Raises:
        UsageError: A number does not make sense, or the script is not there.
    """
    for name, value, least in (
        ("nproc", nproc, 1),
        ("nodes", nodes, 1),
        ("max-restarts", max_restarts, 0),
    ):
        if value < least:
            raise UsageError(f"--{name} is {value}; give {least} or more")
    if nodes > 1 and rendezvous is None:
        raise UsageError(
            f"--nodes {nodes} needs --rendezvous HOST:PORT, the same on all: a port of one of them"
        )
    if not module and not Path(script).is_file():
        raise UsageError(f"there is no file {script}; give a script, or -m and a module")
    logs = log_dir or Path(tempfile.mkdtemp(prefix="castor-run-"))
    others = dict.fromkeys(range(1, nproc), Std.ALL)
    config = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=nproc,
        # Machines that meet at one place are of one run.
        run_id=rendezvous or str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint=rendezvous or "localhost:0",
        max_restarts=max_restarts,
        logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=others),
        signals_to_handle="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    )
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # what they say comes below
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // nproc)))
    target = ["-m", script] if module else [script]
    try:
        elastic_launch(config, sys.executable)("-u", *target, *arguments)
    except ChildFailedError as error:
        return _tell(*error.get_first_failure(), logs)
    if log_dir is None:
        shutil.rmtree(logs, ignore_errors=True)
    return 0


def _tell(rank: int, failure: ProcessFailure, logs: Path) -> int:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    killed = failure.exitcode < 0
    how = (
        f"was ended by {signal.Signals(-failure.exitcode).name}"
        if killed
        else f"failed with exit status {failure.exitcode}"
    )
    console.print(f"[red]castor run:[/red] rank {rank} (process {failure.pid}) {how}")
    attempts = logs.glob(f"*/attempt_*/{failure.local_rank}/stderr.log")
    latest = max(attempts, key=lambda log: log.stat().st_mtime, default=None)
    if latest is not None:
        lines = latest.read_text(errors="replace").splitlines()[-_TAIL:]
        console.print(escape("\n".join([f"the end of {latest}:", *(f"  {one}" for one in lines)])))
    return 128 - failure.exitcode if killed else failure.exitcode
