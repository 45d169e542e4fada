"""Ranks in namespaces of their own: `python namespaced_machine.py NETWORK DIRECTORY`.

They run node_cases.tight in that network namespace, and their process numbers are those of another
machine: that with the number NODE, of LOCAL_WORLD_SIZE ranks.
"""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import node_cases

CLONE_NEWNS, CLONE_NEWPID, CLONE_NEWNET = 0x00020000, 0x20000000, 0x40000000
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def _check(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _forked(work: Callable[[], None]) -> int:
    """The number of a process that does the work, and ends as a script does."""
    pid = os.fork()
    if pid == 0:
        _check(_LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL))
        work()
        sys.exit()
    return pid


def _wait(*pids: int) -> None:
    results = [os.waitpid(pid, 0)[1] for pid in pids]
    if any(results):
        sys.exit(1)


def machine() -> None:
    """The first process of its namespace: the ranks end with it."""
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "proc", "proc", "/proc"], check=True)
    size = int(os.environ["LOCAL_WORLD_SIZE"])
    _wait(*(_forked(lambda local=local: rank(local, size)) for local in range(size)))  # type: ignore[misc]


def rank(local: int, size: int) -> None:
    number = int(os.environ["NODE"]) * size + local
    os.environ.update(LOCAL_RANK=str(local), RANK=str(number))
    torch.set_num_threads(1)
    node_cases.tight(Path(sys.argv[2]))


if __name__ == "__main__":
    with open(f"/run/netns/{sys.argv[1]}") as network:
        _check(_LIBC.setns(network.fileno(), CLONE_NEWNET))
    _check(_LIBC.unshare(CLONE_NEWPID | CLONE_NEWNS))
    _wait(_forked(machine))
