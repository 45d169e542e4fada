"""The target of `castor run`, a Python file, a module or a command, in a process of its own."""

from __future__ import annotations

import importlib.machinery
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from castor.config import did_you_mean
from castor.errors import UsageError

# --- Finds the target of `castor run`: a Python file, a module, or an installed Python command ----

_LAUNCHERS = {
    "torchrun": "torchrun",
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torch.distributed.launch",
    "deepspeed": "deepspeed",
    "mpirun": "mpirun",
    "srun": "srun",
}
_NO_PYTHON = {
    ".sh": "a shell script",
    ".bash": "a shell script",
    ".ipynb": "a notebook, which `jupyter nbconvert --to script` makes a Python file of",
    ".json": "a JSON file",
    ".yaml": "a YAML file",
    ".yml": "a YAML file",
}
_OWN_OPTIONS = ("--device-memory", "--host-memory", "--set", "--plan", "--nvme")
"""Options of `castor run` that few scripts have too."""


def find_target(script: str, *, module: bool) -> list[str]:
    """Returns Python's arguments for a target: a file, or -m and a module.

    Args:
        script: A Python file, the name of a Python command on PATH such as "trl", or a module.
        module: Whether `script` is a module's name.

    Raises:
        UsageError: The target does not exist, is no Python, or starts ranks itself.
    """
    launcher = _LAUNCHERS.get(script if module else Path(script).name)
    if launcher and not Path(script).is_file():
        raise UsageError(
            f"{launcher} starts ranks itself, and castor run --nproc N starts them too: give "
            "castor run the training script, castor run --nproc N train.py"
        )
    if module:
        return _module(script)
    if Path(script).is_dir():
        raise UsageError(f"{script} is a directory; give the training script in it")
    if Path(script).is_file():
        _check_python(Path(script))
        return [script]
    command = shutil.which(script) if os.sep not in script else None
    if command is None:
        alike = did_you_mean(script, [path.name for path in Path(script).parent.glob("*.py")])
        raise UsageError(f"there is no file {script}; give a script, or -m and a module{alike}")
    _check_python(Path(command))
    return [command]


def options_behind(arguments: Sequence[str]) -> list[str]:
    """Returns options of `castor run` given after the script, which gets them instead."""
    names = [argument.partition("=")[0] for argument in arguments]
    return [name for name in dict.fromkeys(names) if name in _OWN_OPTIONS]


def names_castor(target: Sequence[str]) -> bool:
    """Whether a script may boost its models itself; always True for a module, which is not read."""
    return target[0] == "-m" or "castor" in Path(target[0]).read_text("utf-8", errors="replace")


def _module(name: str) -> list[str]:
    if name.endswith(".py") and Path(name).is_file():
        raise UsageError(f"-m takes the name of a module, and {name} is a file; leave -m out")
    top = name.partition(".")[0]
    # A package that has the module is not imported here: that would run its code.
    if top not in sys.builtin_module_names and not importlib.machinery.PathFinder.find_spec(
        top, [str(Path.cwd()), *sys.path]
    ):
        raise UsageError(
            f"there is no module {name} in this directory or among the installed ones; give the "
            "name of one, or a file without -m"
        )
    return ["-m", name]


def _check_python(path: Path) -> None:
    """Checks that a file is a Python program."""
    what = _NO_PYTHON.get(path.suffix)
    if what is None and path.suffix != ".py":
        begin = path.read_bytes()[:4096]
        if begin[:2] == b"#!" and b"python" not in b"\n".join(begin.split(b"\n")[:2]):
            what = "a program of another language"
        elif b"\0" in begin:
            what = "a binary program"
    if what is not None:
        raise UsageError(
            f"{path} is {what}; castor run trains in the Python process that it starts: give the "
            "Python script that trains"
        )


# --- Starts a script in a process of its own ------------------------------------------------------

_PASSED_ON = (signal.SIGTERM, signal.SIGHUP)


def start_process(command: Sequence[str]) -> int:
    """Runs a command of Python and waits for its end; forwards signals to it.

    Args:
        command: The script, or -m and a module, and its arguments.

    Returns:
        The exit status for the shell: 128 plus the signal's number if a signal ended it.
    """
    with subprocess.Popen([sys.executable, "-u", *command]) as process:

        def forward_signal(number: int, _: Any) -> None:
            process.send_signal(number)

        before = {number: signal.signal(number, forward_signal) for number in _PASSED_ON}
        # The terminal sends Ctrl-C to both; this process waits for the other one.
        before[signal.SIGINT] = signal.signal(signal.SIGINT, lambda *_: None)
        try:
            status = process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    return status if status >= 0 else 128 - status
