"""Somebody's training script, whatever trains in it, with castor: for `castor run`.

python -m castor.integrations.script SETTINGS (-m MODULE | FILE) ARGUMENT...
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import runpy
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from castor.errors import UsageError
from castor.integrations.common import OnCastor
from castor.integrations.loop import Loops
from castor.runtime.boosted_model import BoostedModel, listen, model_with
from castor.runtime.ranks import launched_size, leave

# --- Runs in this process what `accelerate launch`, and `trl sft` through it, starts in another ---


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


# --- Somebody's training script, whatever trains in it, with castor: for `castor run` -------------


def run(settings: Mapping[str, Any], arguments: Sequence[str]) -> None:
    """Runs a script as `python` would, in a process whose Trainers and loops train with castor.

    Classes that derive from transformers' Trainer and accelerate's Accelerator, as TRL's, do so
    after they have been replaced. The Trainer makes an Accelerator of its own, which is
    accelerate's. Lightning's Trainers get castor's strategy. What none of them has boosted is
    boosted when it is first called. A script that `accelerate launch` starts runs in this process.

    Args:
        settings: GeminiPlugin's arguments.
        arguments: What python is given: a file or -m and a module, and its own arguments.

    Raises:
        RefusedRunError: Nothing of the script has trained a model, or it starts ranks itself.
    """
    processes = PythonProcesses()
    if _installed("accelerate"):
        if _installed("transformers"):  # first: the Trainer's Accelerator is accelerate's
            _enter_trainers(settings)
        _enter_accelerate(settings)
        enter_launchers(_run)
    Loops(settings).watch()  # before anyone binds what it replaces
    if _installed("lightning"):
        importlib.import_module("castor.integrations.lightning").enter_trainers(settings)
    processes.watch()
    own = _OwnBoosts(settings)
    listen(own.see)
    try:
        _run(arguments)
    except SystemExit as end:
        if end.code:
            raise
    leave()  # of torch.distributed's group, which scripts leave to the end of the process
    if not OnCastor.castor_has_trained and own.first is not None:
        raise RefusedRunError(
            f"the settings of castor run were not used: {own.what_counts}. Leave {own.given} out, "
            "or take the boosting out of the script"
        )
    if not OnCastor.castor_has_trained:
        elsewhere = (
            f". It started another Python process ({processes.first} ...), which castor run does "
            "not follow: give castor run the script that trains"
        )
        raise RefusedRunError(
            "castor trained nothing: in this script no model was called with gradients after an "
            "optimizer had been made for it, and none was given to a Trainer or to "
            f"accelerator.prepare{elsewhere if processes.first else ''}"
        )


class _OwnBoosts:
    """Says for which models the settings of a run do not count: those that a script boosts itself.

    Args:
        settings: GeminiPlugin's arguments, of `castor run`.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.given = ", ".join(settings) or "the settings"
        """Names of the settings."""
        self.first: str | None = None
        """Class of the first such model; None: there is none."""
        self._others: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    @property
    def what_counts(self) -> str:
        """The sentence about the first such model."""
        return f"the script boosts its {self.first} itself, and the plugin that it makes counts"

    def see(self, boosted: BoostedModel) -> None:
        """Takes note of a model that has been boosted, and says it of the first such model."""
        model = model_with(boosted)
        if OnCastor.castor_boosts:
            self._others.add(model)
        if model in self._others or self.first is not None:
            return
        self.first = type(model).__name__
        print(f"castor run: {self.what_counts} there, not {self.given}", file=sys.stderr)


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _enter_accelerate(settings: Mapping[str, Any]) -> None:
    import accelerate  # type: ignore[import-untyped]

    from castor.integrations.accelerate import accelerator_of_settings

    made: Any = accelerator_of_settings(accelerate.Accelerator, settings)
    for module in (accelerate, accelerate.accelerator):
        vars(module)["Accelerator"] = made


def _enter_trainers(settings: Mapping[str, Any]) -> None:
    import transformers

    from castor.integrations.transformers import trainer_of_settings

    made: Any = trainer_of_settings(transformers.trainer.Trainer, settings)
    for module in (transformers, transformers.trainer):
        vars(module)["Trainer"] = made


def _run(arguments: Sequence[str]) -> None:
    is_module = arguments[0] == "-m"
    sys.argv = list(arguments[1:] if is_module else arguments)
    if is_module:
        sys.path[0] = str(Path.cwd())
        if (
            sys.argv[0] == LAUNCH_MODULE
        ):  # as "__main__" it would be another, which starts processes
            importlib.import_module(LAUNCH_MODULE).main()
            return
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


def main() -> None:
    """Runs the script of the command line; says in one line what castor run refuses of it."""
    try:
        run(json.loads(sys.argv[1]), sys.argv[2:])
    except RefusedRunError as error:
        print(f"castor: error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
