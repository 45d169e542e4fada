"""Runs in this process what `accelerate launch`, and `trl sft` through it, starts in another."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from castor.errors import UsageError
from castor.runtime.launched import launched_size


class RefusedRunError(UsageError):
    """A script asks for what `castor run` does itself, or trains nothing: told in one line."""


LAUNCH_MODULE = "accelerate.commands.launch"
_OF_RANKS = ("multi_gpu_launcher",)
_OTHERS = ("deepspeed_launcher", "tpu_launcher", "tpu_pod_launcher", "sagemaker_launcher")
_MEETING = ("MASTER_ADDR", "MASTER_PORT")
"""Environment variables that castor run sets for its ranks."""


def enter_launchers(run: Callable[[Sequence[str]], None]) -> None:
    """From now on accelerate's launch command runs its script in this process.

    Args:
        run: Runs a file, or -m and a module, with its arguments.
    """
    launch: Any = importlib.import_module(LAUNCH_MODULE)
    prepare = launch.prepare_simple_launcher_cmd_env

    def run_here(arguments: Any) -> None:
        command, environment = prepare(arguments)
        if command[:1] != [sys.executable]:
            raise RefusedRunError(
                f"accelerate launch would start {' '.join(command[:2])}, and castor run trains in "
                "the Python process that it starts: leave --no_python and mpirun out, or give "
                "castor run the training script"
            )
        own = _MEETING if launched_size() > 1 else ()
        os.environ.update({k: v for k, v in environment.items() if k not in own})
        run(command[1:])

    def run_rank(arguments: Any) -> None:
        if arguments.use_fsdp or arguments.use_megatron_lm:
            refuse(arguments)
        if launched_size() == 1:
            asked = arguments.num_processes or "several"
            raise RefusedRunError(
                f"accelerate launch would start {asked} processes, and castor run starts ranks "
                "itself: castor run --nproc N, or --num_processes 1 behind the command for one"
            )
        run_here(arguments)

    def refuse(*arguments: Any) -> None:
        raise RefusedRunError(
            "accelerate launch is to start DeepSpeed, FSDP, Megatron-LM or a TPU's processes, and "
            "castor shards the model itself: leave them out of its arguments and configuration"
        )

    launch.simple_launcher = run_here
    for name in _OF_RANKS:
        setattr(launch, name, run_rank)
    for name in _OTHERS:
        setattr(launch, name, refuse)


class PythonProcesses:
    """Notes other Python processes that a script starts: castor run does not follow them."""

    def __init__(self) -> None:
        self.first = ""
        """Command line of the first one; "" where there is none."""

    def watch(self) -> None:
        """Follows what is started with subprocess from now on."""
        sys.addaudithook(self._see)

    def _see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "subprocess.Popen" or self.first:
            return
        with suppress(TypeError):  # of words that are no paths: subprocess says so
            given = arguments[1]
            words = [given] if isinstance(given, str | bytes | os.PathLike) else list(given)
            texts = [os.fsdecode(word) for word in words]
            name = os.path.basename(os.fsdecode(arguments[0] or "".join(texts[:1])))
            script = any(text.endswith(".py") or text == "-m" for text in texts[1:])
            if name.startswith("python") and script and "_inductor" not in " ".join(texts):
                self.first = " ".join([name, *texts[1:4]])
