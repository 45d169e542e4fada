"""Starts processes that have torch, transformers and castor imported: 5 s of a core each otherwise.

`python nursery.py DESCRIPTOR`: requests come over that socket, each with files for a process's
standard output and errors and one for what becomes of it: its number, and then its exit code. The
process is forked before torch starts a thread, runs what python would of those arguments (a script,
or -m and a module; -W error before it, if anything), and ends as any other does, or with this one,
which ends with whoever asked. A request may ask for the end of a script without what Python tears
down then: three quarters of the time of a short one.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

Request = dict[str, Any]
FAMILIES = (
    *("bert", "bloom", "falcon", "gemma2", "glm", "gpt2", "gpt_neox", "gpt_oss", "gptj", "llama"),
    *("mistral", "mixtral", "olmoe", "opt", "phi3", "qwen2_moe", "qwen3", "qwen3_moe", "t5", "vit"),
)
_PR_SET_PDEATHSIG = 1


def serve(channel: socket.socket) -> Request:
    """Returns in each new process, with what it shall do. Exits where the other side has."""
    statuses: dict[int, tuple[int, int]] = {}  # of a pidfd: the process, and where to write
    with selectors.DefaultSelector() as ready:
        ready.register(channel, selectors.EVENT_READ)
        while True:
            for key, _ in ready.select():
                if key.fileobj is not channel:
                    ready.unregister(key.fd)
                    pid, status = statuses.pop(key.fd)
                    _, result = os.waitpid(pid, 0)
                    os.write(status, b"%d\n" % os.waitstatus_to_exitcode(result))
                    os.close(status)
                    os.close(key.fd)
                    continue
                message, files, _, _ = socket.recv_fds(channel, 1 << 20, 3)
                if not message:
                    sys.exit()
                output, errors, status = files
                own = os.getpid()
                pid = os.fork()
                if pid == 0:
                    _end_with(own)
                    for other, (_, written) in statuses.items():
                        os.close(other)
                        os.close(written)
                    os.close(status)
                    _take(output, 1)
                    _take(errors, 2)
                    return json.loads(message)
                os.write(status, b"%d\n" % pid)
                os.close(output)
                os.close(errors)
                pidfd = os.pidfd_open(pid)
                statuses[pidfd] = (pid, status)
                ready.register(pidfd, selectors.EVENT_READ)


def _end_with(parent: int) -> None:
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0 or os.getppid() != parent:
        os._exit(1)


def _take(file: int, number: int) -> None:
    os.dup2(file, number)
    os.close(file)


def preload() -> bool:
    """What ranks import before they differ. False where that has started a thread.

    Some library that transformers finds on a machine may; a process forked beside it is not safe.
    """
    for name in ("castor", "pytest", "torch.distributed.pipelining", "torch.distributed.tensor"):
        importlib.import_module(name)
    for name in FAMILIES:
        importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    gc.freeze()  # or each process copies it all when it ends, to find what is not used
    return len(os.listdir("/proc/self/task")) == 1


def main() -> None:
    """Ends as the script of a process does."""
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        alone = preload()
        request = serve(channel)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    if not alone:
        os.execv(sys.executable, [sys.executable, *request["arguments"]])
    arguments = request["arguments"]
    if arguments[:2] == ["-W", "error"]:
        warnings.simplefilter("error")
        del arguments[:2]
    if arguments[0] == "-m":
        sys.path[0] = request["directory"]
        _, module, *_ = arguments
        sys.argv[:] = arguments[1:]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    script, *_ = sys.argv[:] = arguments
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")
    if request["quick"]:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


main()
