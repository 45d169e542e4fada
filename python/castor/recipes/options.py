"""Options that the sub-commands which load a model for inference share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from castor.memory_options import help_of, read_options

ModelPath = Annotated[
    Path, typer.Argument(help="A model folder, a folder of adapters, or a run (its last step).")
]
Base = Annotated[
    Path | None, typer.Option(help="Model folder of adapters. Default: the one that they name.")
]
TokenizerPath = Annotated[
    Path | None, typer.Option("--tokenizer", help="Folder of the tokenizer. Default: the model's.")
]
Precision = Annotated[
    str | None, typer.Option(help=f"{help_of('precision')} Default: that of the weights.")
]
Config = Annotated[
    Path | None, typer.Option(help="GeminiPlugin's arguments in a file, JSON or YAML.")
]


def memory_settings(
    config: Path | None,
    given: Sequence[str] | None,
    *,
    nvme: Sequence[str] | None,
    **options: str | None,
) -> dict[str, Any]:
    """Returns GeminiPlugin's arguments from the options, read as `castor run` reads them.

    Raises:
        UsageError: A setting cannot be read or is given twice, or its path does not exist.
        OSError: The file cannot be read.
    """
    from castor import launch

    settings = read_options(config, given, nvme=nvme, **options) or {}
    launch.check_paths(settings)
    return settings
