"""`castor run`: starts a script on every rank of this machine, as torchrun does."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from castor.config.layout_plan import ENVIRONMENT, read_plan
from castor.config.settings_file import read_settings_file
from castor.errors import UsageError
from castor.runtime import rank_cores

_TAIL = 20
"""Lines of a failed rank's log that are shown."""


def run(
    script: str,
    arguments: Sequence[str],
    *,
    module: bool,
    settings: Mapping[str, Any] | None,
    nproc: int | None,
    nodes: int,
    rendezvous: str | None,
    max_restarts: int,
    log_dir: Path | None,
    plan: Path | None = None,
    bind: bool = True,
) -> int:
    """Runs a script on `nproc` ranks here, and returns when all are over.

    With settings its transformers Trainers train with castor; a script that boosts its own models
    needs none. Rank 0 of the machine keeps the terminal; what the others write goes to files. Where
    a rank fails, the others are ended, and the end of its log is shown. Every rank finds its place
    in torchrun's environment variables.

    Args:
        script: A Python file, or a module's name.
        arguments: Its own.
        module: Whether `script` is a module.
        settings: GeminiPlugin's arguments for Trainers; None: the script is left as it is.
        nproc: Ranks on this machine; None: one process, and where nothing else asks for a launcher
            none of its environment.
        nodes: Machines; each runs this command.
        rendezvous: Where machines meet, HOST:PORT on one of them; needed with several.
        max_restarts: How often all ranks begin again after a failure.
        plan: From `castor plan`: its numbers of ranks and machines are taken, and
            HybridParallelPlugin("auto") takes its layout.
        bind: Whether each rank keeps to cores of a NUMA node, where there are several.
        log_dir: Of the other ranks' output; by default a temporary one, which stays after failures.

    Returns:
        0, or the exit status for the shell: that of the rank that failed first, 128 and the signal
        for a killed one, or for this process (Ctrl-C), which ends all ranks.

    Raises:
        UsageError: A number does not make sense, or is not the plan's, or the script is not there.
        OSError: The plan cannot be read.
    """
    if plan is not None:
        nproc, nodes = _counts_of(plan, nproc, nodes)
        os.environ[ENVIRONMENT] = str(plan.absolute())
    for name, value, least in (
        ("nproc", 1 if nproc is None else nproc, 1),
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
    target = ["-m", script] if module else [script]
    if settings is not None:
        target = ["-m", "castor.integrations.script", json.dumps(settings), *target]
    if nproc is None and nodes == 1 and max_restarts == 0 and log_dir is None:
        status = subprocess.call([sys.executable, "-u", *target, *arguments])
        return status if status >= 0 else 128 - status
    nproc = nproc or 1
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
    # Each attempt has a store of its own: in torch's, a rank may find the address of a dead one.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // nproc)))
    begin = []
    if bind and (places := rank_cores.places_of_ranks(nproc)):
        os.environ[rank_cores.CORES] = rank_cores.as_environment(places)
        begin = ["-I", rank_cores.__file__]
    status = 0
    try:
        elastic_launch(config, sys.executable)(*begin, "-u", *target, *arguments)
    except ChildFailedError as error:
        return _tell(*error.get_first_failure(), logs)
    except SignalException as error:  # when it comes all ranks have been ended
        name = signal.Signals(error.sigval).name
        Console(stderr=True).print(f"[red]castor run:[/red] {name}: all ranks have been ended")
        status = 128 + int(error.sigval)
    if log_dir is None:
        shutil.rmtree(logs, ignore_errors=True)
    return status


def _counts_of(path: Path, nproc: int | None, nodes: int) -> tuple[int, int]:
    plan = read_plan(path)
    for name, given, planned in (
        ("nproc", nproc, plan["ranks_per_node"]),
        ("nodes", nodes if nodes > 1 else None, plan["nodes"]),
    ):
        if given not in (None, planned):
            raise UsageError(f"--{name} is {given}, and {path} is for {planned}; leave it out")
    return plan["ranks_per_node"], plan["nodes"]


def read_settings(config: Path | None, given: Sequence[str]) -> dict[str, Any] | None:
    """GeminiPlugin's arguments from a file and from NAME=VALUE, which go before it.

    Args:
        config: A JSON file, or a YAML one.
        given: Values as JSON has them; what is no JSON is text.

    Returns:
        None where there is neither.

    Raises:
        UsageError: One cannot be read.
        OSError: The file cannot be.
    """
    if config is None and not given:
        return None
    settings = {} if config is None else read_settings_file(config)
    for one in given:
        name, separator, value = one.partition("=")
        if not separator:
            raise UsageError(f"--set {one}: give NAME=VALUE")
        try:
            settings[name] = json.loads(value)
        except ValueError:
            settings[name] = value
    return settings


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
