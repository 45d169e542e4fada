"""Starts a training script with the arguments of `castor run`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from castor.config.layout_plan import ENVIRONMENT, read_plan
from castor.errors import UsageError
from castor.launch.summary import RunRecord, check_report, recording
from castor.launch.target import find_target, names_castor, options_behind, start_process
from castor.runtime.parallel_dims import ParallelDims

JOIN_SECONDS = 25.0
"""Default of the seconds that a machine waits for the others."""


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
    report: Path | None = None,
    join_timeout: float = JOIN_SECONDS,
) -> int:
    """Runs a script on `nproc` ranks of this machine, and returns when all have ended.

    With settings the models that the script trains are boosted; a script that boosts its own models
    needs none. Rank 0 of the machine keeps the terminal; output of the other ranks goes to files.
    If a rank fails, the others are ended, and the end of its log is shown. Every rank finds its
    place in torchrun's environment variables. All arguments are checked before anything is started.
    At the end a summary goes to stderr.

    Args:
        script: A Python file, an installed Python command, or a module's name.
        arguments: Arguments of the script.
        module: Whether `script` is a module.
        settings: GeminiPlugin's arguments, checked; None: the script is left as it is.
        nproc: Number of ranks on this machine. None: one process, without a launcher's environment
            unless another argument needs a launcher.
        nodes: Number of machines; each runs this command.
        rendezvous: Address at which the machines find each other, HOST:PORT on one of them;
            needed with several.
        max_restarts: Number of times that all ranks begin again after a failure.
        plan: File of `castor plan`, which sets the numbers of ranks and machines, and the layout of
            HybridParallelPlugin("auto").
        bind: Whether each rank keeps to cores of a NUMA node, where there are several.
        log_dir: Directory of the other ranks' output. Default: a temporary one, which stays after
            failures.
        report: File for all figures: .json, or .html for a page of the model that took the most
            steps.
        join_timeout: Seconds to wait for the other machines.

    Returns:
        0, or the exit status for the shell: the status of the rank that failed first. It is 128
        plus the signal's number if that rank was killed, or if a signal to this process (Ctrl-C)
        ended all ranks.

    Raises:
        UsageError: An argument does not make sense, contradicts the plan or would have no effect.
            Or the script does not exist, or the machines do not meet.
        OSError: The plan cannot be read.
    """
    environment = _short_waits()
    if plan is not None:
        nproc, nodes = _counts_of(plan, nproc, nodes)
        environment[ENVIRONMENT] = str(plan.absolute())
        if settings is not None:
            raise UsageError(
                f"--plan {plan} gives HybridParallelPlugin('auto') in the script its layout, and "
                f"{', '.join(settings)} would train the script's models with GeminiPlugin, which "
                "has none; give one of them"
            )
    _check_numbers(nproc, nodes, rendezvous, max_restarts, join_timeout)
    if report is not None:
        check_report(report)
    target = find_target(script, module=module)
    boosts = settings is not None
    if settings is not None and _is_castor(target):
        raise UsageError(
            f"castor run was given {', '.join(settings)} and the command castor, whose "
            f"sub-commands take such options themselves: put them behind {' '.join(arguments[:1])}"
        )
    command = [*target, *arguments]
    if boosts:
        command = ["-m", "castor.integrations.script", json.dumps(settings), *command]
    alone = nproc is None and nodes == 1 and max_restarts == 0 and log_dir is None
    with recording(report, environment) as record:
        told = not boosts and _told_beforehand(record, target, arguments)
        if alone:
            status = start_process(command)
        else:
            from castor.launch.ranks import LaunchOptions, start_ranks  # imports torch

            options = LaunchOptions(
                nproc=nproc or 1,
                nodes=nodes,
                rendezvous=rendezvous,
                join_timeout=join_timeout,
                max_restarts=max_restarts,
                log_dir=log_dir,
                bind=bind,
            )
            status = start_ranks(options, command)
        record.end(status=status, boosts=boosts, plan=plan, told=told)
    return status


def _short_waits() -> dict[str, str]:
    """Returns environment variables that let idle OpenMP threads sleep soon.

    It is empty if the user has set how they wait. By default they spin for milliseconds, on cores
    that copies, the update or other programs need. On two cores that other programs used, a step
    took 0.6 of the time with these variables; on idle cores it took the same time.
    """
    if any(name in os.environ for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")):
        return {}
    return {"GOMP_SPINCOUNT": "1000"}


def _check_numbers(
    nproc: int | None,
    nodes: int,
    rendezvous: str | None,
    max_restarts: int,
    join_timeout: float,
) -> None:
    for name, value, least in (
        ("nproc", 1 if nproc is None else nproc, 1),
        ("nodes", nodes, 1),
        ("max-restarts", max_restarts, 0),
        ("join-timeout", join_timeout, 1),
    ):
        if not value >= least:
            raise UsageError(f"--{name} is {value}; give {least} or more")
    if nodes > 1 and rendezvous is None:
        raise UsageError(
            f"--nodes {nodes} needs --rendezvous HOST:PORT, the same on all: a port of one of them"
        )
    if rendezvous is not None:
        from castor.launch.rendezvous import parse_rendezvous

        parse_rendezvous(rendezvous)
        if nodes == 1:
            raise UsageError(
                f"--rendezvous {rendezvous} is where several machines meet, and --nodes is 1; give "
                "--nodes N as well, or leave it out"
            )


def _told_beforehand(record: RunRecord, target: Sequence[str], arguments: Sequence[str]) -> bool:
    """Prints warnings about options after the script, and about a run without castor.

    Returns:
        Whether it printed any.
    """
    # `castor run --nproc 2 -m castor evaluate` takes the memory options of the sub-command.
    behind = [] if _is_castor(target) else options_behind(arguments)
    if behind:
        record.say(
            f"{' and '.join(behind)} stands behind {target[-1]}, so that the script gets it and "
            "castor does not; options of castor run go before the script"
        )
    if names_castor(target):
        return bool(behind)
    record.say(
        f"no setting was given and {target[-1]} does not name castor, so that it trains in plain "
        "PyTorch; --device-memory 24GiB, or another setting, trains it under castor"
    )
    return True


def _is_castor(target: Sequence[str]) -> bool:
    """Returns whether the command line is that of castor itself, not a script's."""
    return Path(target[-1]).name == "castor"


def _counts_of(path: Path, nproc: int | None, nodes: int) -> tuple[int, int]:
    plan = read_plan(path)
    for name, given, planned in (
        ("nproc", nproc, plan["ranks_per_node"]),
        ("nodes", nodes if nodes > 1 else None, plan["nodes"]),
    ):
        if given not in (None, planned):
            raise UsageError(f"--{name} is {given}, and {path} is for {planned}; leave it out")
    nproc, nodes = plan["ranks_per_node"], plan["nodes"]
    try:
        needed = ParallelDims.of_arguments(plan["layout"]).world_size
    except (TypeError, ValueError) as error:
        raise UsageError(f"{path}: {error}") from error
    if nproc * nodes % needed:
        raise UsageError(
            f"{path}: its layout needs a multiple of {needed} ranks, and it is for {nproc} on each "
            f"of {nodes} machines; mend it, or let `castor plan` write another"
        )
    return nproc, nodes
