"""Somebody's training script, whatever trains in it, with castor: for `castor run`.

python -m castor.integrations.script SETTINGS (-m MODULE | FILE) ARGUMENT...
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import runpy
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from castor.integrations.common import OnCastor
from castor.integrations.launchers import (
    LAUNCH_MODULE,
    PythonProcesses,
    RefusedRunError,
    enter_launchers,
)
from castor.integrations.loop import Loops
from castor.runtime.boosted_model import BoostedModel, listen, model_with
from castor.runtime.ranks import leave


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
