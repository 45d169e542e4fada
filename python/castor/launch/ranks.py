"""Starts a script on every rank of this machine, as torchrun does."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from castor.config.run_options import RunOptions
from castor.errors import UsageError
from castor.runtime import rank_cores

# --- Brings the machines of one `castor run` together before anything is started on them ----------

_HANDSHAKE_SECONDS = 5
"""Seconds in which a store that listens answers."""
_POLL_SECONDS = 0.1
_LARGEST_PORT = 65535


def parse_rendezvous(text: str) -> tuple[str, int]:
    """Splits HOST:PORT into (host, port).

    Raises:
        UsageError: The port is missing or out of range, or the host is missing or unknown.
    """
    host, separator, port = text.rpartition(":")
    host = host.strip("[]")
    if not separator or not port:
        raise UsageError(
            f"--rendezvous {text} has no port; give HOST:PORT, such as {text.strip(':')}:29500"
        )
    if not port.isdecimal() or not 0 < int(port) <= _LARGEST_PORT:
        raise UsageError(
            f"--rendezvous {text}: the port is {port!r}; give a number from 1 to {_LARGEST_PORT}"
        )
    if not host:
        raise UsageError(f"--rendezvous {text} has no host; give HOST:PORT, such as node0:{port}")
    _addresses(host, int(port), text)
    return host, int(port)


@contextmanager
def all_machines(text: str, nodes: int, patience: float) -> Iterator[None]:
    """Waits until `nodes` machines have come to HOST:PORT; keeps the store within the context.

    Args:
        text: HOST:PORT, on one of the machines.
        nodes: Number of machines.
        patience: Seconds to wait for the machines.

    Raises:
        UsageError: The host is unknown, the port belongs to another program, nothing answers
            there, or too few machines have come.
    """
    host, port = parse_rendezvous(text)
    end = time.monotonic() + patience
    local = _is_here(host, port, text)
    keeps_store = local and not _in_use(port)
    if keeps_store:
        store = TCPStore(
            host, port, is_master=True, wait_for_workers=False, multi_tenant=True,
            timeout=timedelta(seconds=patience),
        )  # fmt: skip
    else:
        store = _join(host, port, text, end=end, patience=patience, local=local)
    try:
        number = store.add("castor/machines", 1)
        store.set(f"castor/machine{number}", socket.gethostname())
        if (came := _count(store, "castor/machines", nodes, end)) < nodes:
            names = sorted(store.get(f"castor/machine{i + 1}").decode() for i in range(came))
        else:
            store.add("castor/met", 1)
    except RuntimeError as error:
        raise UsageError(
            f"the machine at {text} left before {nodes} machines had met there ({error}); see "
            "what it printed, and start the command on all of them again"
        ) from error
    if came < nodes:
        raise UsageError(
            f"{came} of {nodes} machines came to {text} within {patience:g} s "
            f"({', '.join(names)}); start the same command on the others, or wait longer for "
            "them with --join-timeout SECONDS"
        )
    if keeps_store:  # the context may be short, and the others must have met
        _count(store, "castor/met", nodes, end + _HANDSHAKE_SECONDS)
    yield  # the others find the store while this process keeps it


def _count(store: TCPStore, key: str, wanted: int, end: float) -> int:
    """Waits until a count of the store is `wanted`, or until `end`, and returns the count."""
    while (count := store.add(key, 0)) < wanted and time.monotonic() <= end:
        time.sleep(_POLL_SECONDS)
    return count


def _addresses(host: str, port: int, text: str) -> list[tuple[int, tuple[Any, ...]]]:
    """Returns (family, address) of each address of a host."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        raise UsageError(
            f"--rendezvous {text}: this machine does not know the host {host} ({error}); give the "
            "name or the address of one of the machines"
        ) from None
    return [(family, address) for family, _, _, _, address in found]


def _is_here(host: str, port: int, text: str) -> bool:
    """Whether the host is this machine: only its own addresses can be bound."""
    for family, address in _addresses(host, port, text):
        with socket.socket(family, socket.SOCK_STREAM) as probe, suppress(OSError):
            probe.bind((address[0], 0))
            return True
    return False


def _in_use(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            if error.errno == errno.EACCES:
                raise UsageError(
                    f"--rendezvous: port {port} is the system's; give one of 1024 or more"
                ) from None
            return True
    return False


def _join(host: str, port: int, text: str, *, end: float, patience: float, local: bool) -> TCPStore:
    """Connects to the store of the machine that has the host."""
    while True:
        try:
            socket.create_connection((host, port), timeout=_HANDSHAKE_SECONDS).close()
            break
        except OSError:
            if time.monotonic() > end:
                raise UsageError(
                    f"nothing answers at {text} within {patience:g} s; start the same command on "
                    f"{host} too, and see that its port {port} is open to this machine"
                ) from None
            time.sleep(_POLL_SECONDS)
    try:
        return TCPStore(
            host, port, is_master=False, multi_tenant=True,
            timeout=timedelta(seconds=_HANDSHAKE_SECONDS),
        )  # fmt: skip
    except RuntimeError:
        where = "this machine" if local else host
        raise UsageError(
            f"--rendezvous {text}: port {port} of {where} is in use by another program; give "
            "another port, the same on all machines"
        ) from None


# --- Starts a script on every rank of this machine, as torchrun does ------------------------------

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
