"""Starts a script on every rank of this machine, as torchrun does."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from castor.config.run_options import RunOptions
from castor.launch.rendezvous import all_machines
from castor.runtime import rank_cores

_TAIL = 20
"""Number of lines of a failed rank's log that are shown."""


def start_ranks(options: RunOptions, command: Sequence[str]) -> int:
    """Runs a command of Python on every rank of this machine, and waits for all of them.

    Args:
        options: Numbers of ranks and machines, and where these rendezvous.
        command: The script, or -m and a module, and its arguments.

    Returns:
        The exit status, as castor.launch.run returns it.

    Raises:
        UsageError: The machines do not meet; see all_machines.
    """
    nproc, nodes = options.nproc or 1, options.nodes
    logs = options.log_dir or Path(tempfile.mkdtemp(prefix="castor-run-"))
    config = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=nproc,
        # Machines that meet at one place belong to one run.
        run_id=options.rendezvous or str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint=options.rendezvous or "localhost:0",
        max_restarts=options.max_restarts,
        logs_specs=DefaultLogsSpecs(
            log_dir=str(logs), redirects=dict.fromkeys(range(1, nproc), Std.ALL)
        ),
        signals_to_handle="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    )
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # errors are printed below
    # Each attempt has its own store: in torch's, a rank may find the address of a dead rank.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // nproc)))
    begin = []
    if options.bind and (places := rank_cores.places_of_ranks(nproc)):
        os.environ[rank_cores.CORES] = rank_cores.as_environment(places)
        begin = ["-I", rank_cores.__file__]
    status = 0
    came = (
        nullcontext()
        if options.rendezvous is None
        else all_machines(options.rendezvous, nodes, options.join_timeout)
    )
    failed = False
    try:
        with came:
            elastic_launch(config, sys.executable)(*begin, "-u", *command)
    except ChildFailedError as error:
        failed = True
        return _tell(*error.get_first_failure(), logs)
    except SignalException as error:  # all ranks have been ended by now
        name = signal.Signals(error.sigval).name
        Console(stderr=True).print(f"[red]castor run:[/red] {name}: all ranks have been ended")
        status = 128 + int(error.sigval)
    finally:
        if options.log_dir is None and not failed:
            shutil.rmtree(logs, ignore_errors=True)
    return status


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
