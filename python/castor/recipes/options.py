"""Options that the sub-commands which load a model for inference share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

ModelPath = Annotated[
    Path, typer.Argument(help="A model folder, a folder of adapters, or a run (its last step).")
]
Base = Annotated[
    Path | None, typer.Option(help="Model folder of adapters. Default: the one that they name.")
]
TokenizerPath = Annotated[
    Path | None, typer.Option("--tokenizer", help="Folder of the tokenizer. Default: the model's.")
]
DeviceMemory = Annotated[str | None, typer.Option(help="Budget of the device, such as 8GiB.")]
HostMemory = Annotated[str | None, typer.Option(help="Budget of the host, such as 48GiB.")]
Device = Annotated[str | None, typer.Option(help="Where the model computes: cuda, cuda:1 or cpu.")]
Precision = Annotated[
    str | None, typer.Option(help="fp32, bf16 or fp16. Default: that of the weights.")
]
Nvme = Annotated[
    list[str] | None,
    typer.Option(help="A directory on an NVMe device; may be given several times."),
]
Config = Annotated[
    Path | None, typer.Option(help="GeminiPlugin's arguments in a file, JSON or YAML.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="Another of its arguments: NAME=VALUE; may be given several times."),
]


def memory_settings(
    *,
    device_memory: str | None,
    host_memory: str | None,
    device: str | None,
    precision: str | None,
    nvme: Sequence[str] | None,
    config: Path | None,
    given: Sequence[str] | None,
) -> dict[str, Any]:
    """Returns GeminiPlugin's arguments from the options, read as `castor run` reads them.

    Raises:
        UsageError: A setting cannot be read or is given twice, or its path does not exist.
        OSError: The file cannot be read.
    """
    from castor import launch

    options = {
        "device_memory": device_memory, "host_memory": host_memory, "device": device,
        "precision": precision,
        "nvme_path": (nvme[0] if len(nvme) == 1 else list(nvme)) if nvme else None,
    }  # fmt: skip
    settings = launch.read_settings(config, options, given or []) or {}
    launch.check_paths(settings)
    return settings
