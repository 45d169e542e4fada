"""Starts what rank_cases.py and others hold on several ranks, as torchrun would."""

import functools
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

NURSERY = Path(__file__).parent / "nursery.py"

_LEAKS = re.compile(r"^nanobind: leaked .*?refleaks\.html\n?", re.DOTALL | re.MULTILINE)
"""Printed by the triton of torch 2.15 at the end of a process that was forked after gc.freeze()."""

Scenario = Callable[[Path], None]
"""Of the directory that the ranks share."""


@dataclass(frozen=True)
class Outcome:
    """Of one rank."""

    code: int
    output: str
    errors: str


class Rank:
    """A process that a nursery has started."""

    def __init__(
        self,
        nursery: socket.socket,
        environment: dict[str, str],
        directory: Path,
        *arguments: str,
        held_port: socket.socket | None = None,
        quick: bool = False,
    ) -> None:
        """Args:
        nursery: Of the nursery that starts it.
        environment: All of it.
        directory: What it runs in.
        arguments: The script and its own.
        held_port: Of where it meets others: nobody is given it while this process lives.
        quick: Whether it ends without what Python tears down, if it ends well.
        """
        self._said = [os.memfd_create(name) for name in ("output", "errors")]
        read, written = os.pipe()
        request = {
            "arguments": arguments, "environment": environment, "directory": str(directory),
            "quick": quick,
        }  # fmt: skip
        socket.send_fds(nursery, [json.dumps(request).encode()], [*self._said, written])
        os.close(written)
        self._status = os.fdopen(read)
        self.pid = int(self._status.readline())
        self._held_port = held_port and held_port.dup()
        self._code: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code; a negative one is a signal's.

        Raises:
            TimeoutError: It is not over after `timeout` seconds.
        """
        if self._code is None:
            over, _, _ = select.select([self._status], [], [], timeout)
            if not over:
                raise TimeoutError
            self._code = int(self._status.readline())
            self._status.close()
            if self._held_port:
                self._held_port.close()
        return self._code

    def over(self) -> bool:
        """Whether it has ended."""
        try:
            self.wait(0)
        except TimeoutError:
            return False
        return True

    def kill(self) -> None:
        """With SIGKILL; as nothing where it is over."""
        if not self.over():
            os.kill(self.pid, signal.SIGKILL)

    def outcome(self) -> Outcome:
        """Once it is over."""
        said = []
        for descriptor in self._said:
            with open(descriptor, "rb") as file:
                file.seek(0)
                said.append(_LEAKS.sub("", file.read().decode()))
        return Outcome(self.wait(), *said)


@functools.cache
def nursery(_: int) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """A process that starts others and ends with this one, and the socket to tell it by."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        descriptor = theirs.fileno()
        process = subprocess.Popen(
            [sys.executable, str(NURSERY), str(descriptor)],
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    return ours, process


def held_port(host: str = "127.0.0.1") -> socket.socket:
    """Bound to a port at which a rank can listen, and which nobody else is given meanwhile."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as rank 0's will be
    holder.bind((host, 0))
    return holder


_ENDED_WHOLE: set[str] = set()
"""Files of scenarios of which a rank 0 has ended as any process does."""


def start(scenario: Scenario, size: int, directory: Path, *, nodes: int = 1) -> list[Rank]:
    """Starts a scenario on `size` ranks, which count as those of so many machines.

    Rank 0 of the first one of a file ends as any process does. What Python tears down takes half
    of what a short run of two ranks does, and is the same after every scenario of a file.
    """
    local = size // nodes
    file = scenario.__code__.co_filename
    whole = 0 if file not in _ENDED_WHOLE else None
    _ENDED_WHOLE.add(file)
    ranks = []
    with held_port() as holder:
        port = holder.getsockname()[1]
        for rank in range(size):
            environment = os.environ | {
                "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank % local),
                "LOCAL_WORLD_SIZE": str(local), "GROUP_RANK": str(rank // local),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            if nodes > 1:
                environment["CASTOR_RANK_LINK"] = "node"
            # Of two: neighbours hash strings differently, as processes of their own do.
            script = (file, scenario.__name__, str(directory))
            channel, _ = nursery(rank % 2)
            quick = rank != whole
            ranks.append(
                Rank(channel, environment, directory, *script, held_port=holder, quick=quick)
            )
    return ranks


def finish(ranks: list[Rank], *, timeout: float = 240) -> list[Outcome]:
    """Waits for ranks that were started.

    Raises:
        AssertionError: They are not over in time; they are killed.
    """
    end = time.monotonic() + timeout
    try:
        for rank in ranks:
            rank.wait(max(0, end - time.monotonic()))
    except BaseException as error:
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.wait()
        if not isinstance(error, TimeoutError):
            raise
        said = "\n".join(str(rank.outcome()) for rank in ranks)
        raise AssertionError(f"ranks are not over after {timeout} s: {said}") from error
    return [rank.outcome() for rank in ranks]


def run(
    scenario: Scenario, size: int, directory: Path, *, timeout: float = 240, nodes: int = 1
) -> list[Outcome]:
    """Starts a scenario on `size` ranks, as start(), and waits until all are over."""
    return finish(start(scenario, size, directory, nodes=nodes), timeout=timeout)


def run_python(
    *arguments: str | Path, directory: Path | None = None, timeout: float = 300, **environment: str
) -> subprocess.CompletedProcess[str]:
    """As `python ARGUMENTS` in a directory, this one if none is given; nothing is on its input.

    It takes none of the time that its imports would.
    """
    command = [str(argument) for argument in arguments]
    process = Rank(nursery(0)[0], os.environ | environment, directory or Path.cwd(), *command)
    (outcome,) = finish([process], timeout=timeout)
    return subprocess.CompletedProcess(command, outcome.code, outcome.output, outcome.errors)


def succeeded(outcomes: list[Outcome]) -> list[str]:
    """What each rank has printed; all have ended well."""
    for outcome in outcomes:
        assert outcome.code == 0, outcome.errors
    return [outcome.output for outcome in outcomes]


def found(scenario: Scenario, size: int, directory: Path) -> Any:
    """What rank 0 has written into NAME.json, of a scenario of that name."""
    succeeded(run(scenario, size, directory, timeout=600))
    return json.loads((directory / f"{scenario.__name__}.json").read_text())


def found_by_each(scenario: Scenario, size: int, directory: Path, *, nodes: int = 1) -> list[Any]:
    """What each rank has written into NAME0.json, NAME1.json, ..."""
    succeeded(run(scenario, size, directory, timeout=600, nodes=nodes))
    paths = [directory / f"{scenario.__name__}{rank}.json" for rank in range(size)]
    return [json.loads(path.read_text()) for path in paths]


def assert_said(of_ranks: Iterable[str], kind: str, part: str) -> None:
    """Each rank has raised an error of that kind, with these words in it."""
    for said in of_ranks:
        assert said.startswith(kind), said
        assert part in said, said


def assert_go_on_as_one(scenario: Scenario, directory: Path) -> None:
    """Of one that keeps what an optimizer has come to, and goes on from there when run again."""
    paths = {size: directory / str(size) for size in (1, 2)}
    for size, path in paths.items():
        path.mkdir()
        for _ in range(2):
            succeeded(run(scenario, size, path))
    for begun in (0, 3):
        one, two = (
            (path / f"state-{begun}" / "optimizer.safetensors").read_bytes()
            for path in paths.values()
        )
        assert one == two


def of_sizes(scenario: Scenario, factory: pytest.TempPathFactory) -> Callable[[int], Any]:
    """What found() gives on so many ranks, which run it once."""

    @functools.cache
    def of(size: int) -> Any:
        return found(scenario, size, factory.mktemp(f"{scenario.__name__}{size}"))

    return of


def kept(
    scenario: Scenario,
    size: int,
    factory: pytest.TempPathFactory,
    *,
    timeout: float,
    nodes: int = 1,
) -> Callable[..., Any]:
    """What ranks, which run once, have given torch.save: ("tight", 0) is in tight.0.pt."""

    @functools.cache
    def directory() -> Path:
        path = factory.mktemp(scenario.__name__)
        succeeded(run(scenario, size, path, timeout=timeout, nodes=nodes))
        return path

    def load(*name: object) -> Any:
        return torch.load(directory() / f"{'.'.join(map(str, name))}.pt")

    return load
