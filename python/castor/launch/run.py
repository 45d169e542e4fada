"""Starts a training script with the arguments of `castor run`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from castor.config.files import ENVIRONMENT, read_plan
from castor.config.run_options import RunOptions
from castor.errors import UsageError
from castor.launch.summary import RunRecord, check_report, recording
from castor.launch.target import find_target, names_castor, options_behind, start_process
from castor.runtime.parallel_dims import ParallelDims


def run(
    script: str,
    arguments: Sequence[str],
    options: RunOptions,
    *,
    module: bool,
    settings: Mapping[str, Any] | None,
) -> int:
    """Runs a script on ranks of this machine, and returns when all have ended.

    With settings the models that the script trains are boosted; a script that boosts its own models
    needs none. Rank 0 of the machine keeps the terminal; output of the other ranks goes to files.
    If a rank fails, the others are ended, and the end of its log is shown. Every rank finds its
    place in torchrun's environment variables. All arguments are checked before anything is started.
    At the end a summary goes to stderr.

    Args:
        script: A Python file, an installed Python command, or a module's name.
        arguments: Arguments of the script.
        options: Ranks and files of the run.
        module: Whether `script` is a module.
        settings: GeminiPlugin's arguments, checked; None: the script is left as it is.

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
    if (plan := options.plan) is not None:
        options = _planned(plan, options)
        environment[ENVIRONMENT] = str(plan.absolute())
        if settings is not None:
            raise UsageError(
                f"--plan {plan} gives HybridParallelPlugin('auto') in the script its layout, and "
                f"{', '.join(settings)} would train the script's models with GeminiPlugin, which "
                "has none; give one of them"
            )
    _check_numbers(options)
    if options.report is not None:
        check_report(options.report)
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
    alone = (options.nproc, options.nodes, options.max_restarts, options.log_dir) == (
        None, 1, 0, None,
    )  # fmt: skip
    with recording(options.report, environment) as record:
        told = not boosts and _told_beforehand(record, target, arguments)
        if alone:
            status = start_process(command)
        else:
            from castor.launch.ranks import start_ranks  # imports torch

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


def _check_numbers(options: RunOptions) -> None:
    nodes, rendezvous = options.nodes, options.rendezvous
    for name, value, least in (
        ("nproc", 1 if options.nproc is None else options.nproc, 1),
        ("nodes", nodes, 1),
        ("max-restarts", options.max_restarts, 0),
        ("join-timeout", options.join_timeout, 1),
    ):
        if not value >= least:
            raise UsageError(f"--{name} is {value}; give {least} or more")
    if nodes > 1 and rendezvous is None:
        raise UsageError(
            f"--nodes {nodes} needs --rendezvous HOST:PORT, the same on all: a port of one of them"
        )
    if rendezvous is not None:
        from castor.launch.ranks import parse_rendezvous

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


def _planned(path: Path, options: RunOptions) -> RunOptions:
    """Returns the options with the numbers of ranks and machines of a plan."""
    plan = read_plan(path)
    for name, given, planned in (
        ("nproc", options.nproc, plan["ranks_per_node"]),
        ("nodes", options.nodes if options.nodes > 1 else None, plan["nodes"]),
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
    return replace(options, nproc=nproc, nodes=nodes)
