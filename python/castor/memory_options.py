"""Options by which sub-commands of castor take the arguments of GeminiPlugin."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from castor.config import GeminiArguments
from castor.config.declared import texts_of


def help_of(name: str) -> str:
    """Returns the help of an option: the first sentence of the argument's text."""
    return re.split(r"(?<=\.) ", texts_of(GeminiArguments)[name], maxsplit=1)[0]


DeviceMemory = Annotated[str | None, typer.Option(help=help_of("device_memory"))]
HostMemory = Annotated[str | None, typer.Option(help=help_of("host_memory"))]
Device = Annotated[str | None, typer.Option(help=help_of("device"))]
Nvme = Annotated[
    list[str] | None, typer.Option(help=f"{help_of('nvme_path')} May be given several times.")
]
Config = Annotated[
    Path | None, typer.Option(help="GeminiPlugin's arguments, JSON or YAML: a run's castor.json.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="Another of its arguments: NAME=VALUE; may be given several times."),
]


def read_options(
    config: Path | None,
    given: Sequence[str] | None,
    *,
    nvme: Sequence[str] | None,
    **options: str | None,
) -> dict[str, Any] | None:
    """Returns GeminiPlugin's arguments from a file, from options, and from NAME=VALUE.

    Args:
        config: JSON or YAML file; the others override it.
        given: Texts NAME=VALUE of --set.
        nvme: Directories of --nvme.
        options: Arguments with an option of their own; None: the option was not given.

    Returns:
        The arguments, whose values are not checked yet; None if nothing was given.

    Raises:
        UsageError: A setting cannot be read, is given twice, is a size without a unit, or is a
            path that does not exist.
        OSError: The file cannot be read.
    """
    from castor import launch

    nvme_path = (nvme[0] if len(nvme) == 1 else list(nvme)) if nvme else None
    settings = launch.read_settings(config, {**options, "nvme_path": nvme_path}, given or [])
    launch.check_paths(settings or {})
    return settings
