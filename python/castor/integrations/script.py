"""Somebody's training script, whatever trains in it, with castor: for `castor run`.

python -m castor.integrations.script SETTINGS (-m MODULE | FILE) ARGUMENT...
"""

from __future__ import annotations

import importlib.util
import json
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import accelerate  # type: ignore[import-untyped]
import transformers

from castor.errors import UsageError
from castor.integrations.accelerate import accelerator_of_settings
from castor.integrations.common import OnCastor
from castor.integrations.loop import Loops
from castor.integrations.transformers import trainer_of_settings
from castor.runtime.ranks import leave


def run(settings: Mapping[str, Any], arguments: Sequence[str]) -> None:
    """Runs a script as `python` would, in a process whose Trainers and loops train with castor.

    Classes that derive from transformers' Trainer and accelerate's Accelerator, as TRL's, do so
    after they have been replaced. The Trainer makes an Accelerator of its own, which is
    accelerate's. Lightning's Trainers get castor's strategy. What none of them has boosted is
    boosted when it is first called.

    Args:
        settings: GeminiPlugin's arguments.
        arguments: What python is given: a file or -m and a module, and its own arguments.

    Raises:
        UsageError: Nothing of the script has trained a model.
    """
    trainer: Any = trainer_of_settings(transformers.trainer.Trainer, settings)
    accelerator: Any = accelerator_of_settings(accelerate.Accelerator, settings)
    for module in (transformers, transformers.trainer):
        vars(module)["Trainer"] = trainer
    for module in (accelerate, accelerate.accelerator):
        vars(module)["Accelerator"] = accelerator
    Loops(settings).watch()  # before anyone binds what it replaces
    if importlib.util.find_spec("lightning") is not None:
        importlib.import_module("castor.integrations.lightning").enter_trainers(settings)
    try:
        _run(arguments)
    except SystemExit as end:
        if end.code:
            raise
    leave()  # of torch.distributed's group, which scripts leave to the end of the process
    if not OnCastor.castor_has_trained:
        raise UsageError(
            "castor trained nothing: in this script no model was called with gradients after an "
            "optimizer had been made for it, and none was given to a Trainer or to "
            "accelerator.prepare"
        )


def _run(arguments: Sequence[str]) -> None:
    is_module = arguments[0] == "-m"
    sys.argv = list(arguments[1:] if is_module else arguments)
    if is_module:
        sys.path[0] = str(Path.cwd())
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    run(json.loads(sys.argv[1]), sys.argv[2:])
