"""Starts what rank_cases.py and others hold on several ranks, as torchrun would."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Scenario = Callable[[Path], None]
"""Of the directory that the ranks share."""


@dataclass(frozen=True)
class Outcome:
    """Of one rank."""

    code: int
    output: str
    errors: str


def start(scenario: Scenario, size: int, directory: Path) -> list[subprocess.Popen[str]]:
    """Starts a scenario on `size` ranks."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    ranks = []
    for rank in range(size):
        environment = os.environ | {
            "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        ranks.append(
            subprocess.Popen(
                [sys.executable, scenario.__code__.co_filename, scenario.__name__, str(directory)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=directory,
            )
        )
    return ranks


def finish(ranks: list[subprocess.Popen[str]], *, timeout: float = 240) -> list[Outcome]:
    """Waits for ranks that were started.

    Raises:
        AssertionError: They are not over in time; they are killed.
    """
    try:
        outputs = [process.communicate(timeout=timeout) for process in ranks]
    except subprocess.TimeoutExpired as error:
        for process in ranks:
            process.kill()
        said = "\n".join(str(process.communicate()) for process in ranks)
        raise AssertionError(f"ranks are not over after {timeout} s: {said}") from error
    return [
        Outcome(process.returncode, output, errors)
        for process, (output, errors) in zip(ranks, outputs, strict=True)
    ]


def run(scenario: Scenario, size: int, directory: Path, *, timeout: float = 240) -> list[Outcome]:
    """Starts a scenario on `size` ranks and waits until all are over."""
    return finish(start(scenario, size, directory), timeout=timeout)


def succeeded(outcomes: list[Outcome]) -> list[str]:
    """What each rank has printed; all have ended well."""
    for outcome in outcomes:
        assert outcome.code == 0, outcome.errors
    return [outcome.output for outcome in outcomes]


def found(scenario: Scenario, size: int, directory: Path) -> Any:
    """What rank 0 has written into NAME.json, of a scenario of that name."""
    succeeded(run(scenario, size, directory, timeout=600))
    return json.loads((directory / f"{scenario.__name__}.json").read_text())


def found_by_each(scenario: Scenario, size: int, directory: Path) -> list[Any]:
    """What each rank has written into NAME0.json, NAME1.json, ..."""
    succeeded(run(scenario, size, directory, timeout=600))
    paths = [directory / f"{scenario.__name__}{rank}.json" for rank in range(size)]
    return [json.loads(path.read_text()) for path in paths]
