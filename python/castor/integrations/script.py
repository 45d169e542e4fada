"""Somebody's training script, whose Trainers train with castor: what `castor run` starts.

python -m castor.integrations.script SETTINGS (-m MODULE | FILE) ARGUMENT...
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers

from castor.errors import UsageError
from castor.integrations.transformers import trainer_of_settings


def run(settings: Mapping[str, Any], arguments: Sequence[str]) -> None:
    """Runs a script as `python` would, in a process whose transformers.Trainer is castor's.

    Classes that derive from it, as TRL's, do so after it has been replaced.

    Args:
        settings: GeminiPlugin's arguments.
        arguments: What python is given: a file or -m and a module, and its own arguments.

    Raises:
        UsageError: No Trainer of the script has trained.
    """
    replacement: Any = trainer_of_settings(transformers.trainer.Trainer, settings)
    for module in (transformers, transformers.trainer):
        vars(module)["Trainer"] = replacement
    is_module = arguments[0] == "-m"
    sys.argv = list(arguments[1:] if is_module else arguments)
    if is_module:
        sys.path[0] = str(Path.cwd())
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")
    if not replacement.castor_has_trained:
        raise UsageError(
            "castor trained nothing: no transformers.Trainer of the script trained a model, and "
            "castor run knows no other framework yet; boost the model in the script instead"
        )


if __name__ == "__main__":
    run(json.loads(sys.argv[1]), sys.argv[2:])
