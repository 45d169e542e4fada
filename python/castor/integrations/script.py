"""Somebody's training script, whose Trainers and Accelerators train with castor: for `castor run`.

python -m castor.integrations.script SETTINGS (-m MODULE | FILE) ARGUMENT...
"""

from __future__ import annotations

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
from castor.integrations.transformers import trainer_of_settings
from castor.runtime.ranks import leave


def run(settings: Mapping[str, Any], arguments: Sequence[str]) -> None:
    """Runs a script as `python` would, in a process with castor's Trainer and Accelerator.

    Classes that derive from them, as TRL's, do so after they have been replaced. The Trainer makes
    an Accelerator of its own, which is accelerate's.

    Args:
        settings: GeminiPlugin's arguments.
        arguments: What python is given: a file or -m and a module, and its own arguments.

    Raises:
        UsageError: No Trainer and no Accelerator of the script has boosted a model.
    """
    trainer: Any = trainer_of_settings(transformers.trainer.Trainer, settings)
    accelerator: Any = accelerator_of_settings(accelerate.Accelerator, settings)
    for module in (transformers, transformers.trainer):
        vars(module)["Trainer"] = trainer
    for module in (accelerate, accelerate.accelerator):
        vars(module)["Accelerator"] = accelerator
    try:
        _run(arguments)
    except SystemExit as end:
        if end.code:
            raise
    leave()  # of torch.distributed's group, which scripts leave to the end of the process
    if not OnCastor.castor_has_trained:
        raise UsageError(
            "castor trained nothing: no transformers.Trainer of the script trained a model, no "
            "accelerate.Accelerator was given one to prepare with its optimizer, and castor run "
            "knows no other framework yet; boost the model in the script instead"
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
