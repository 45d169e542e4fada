"""`castor export`: a model or a run as a folder for the hub, vLLM or llama.cpp.

What imports torch is imported within functions: `castor --help` imports this file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from castor.options import ModelPaths, from_fields, read_size
from castor.recipes import require


@dataclass(frozen=True, kw_only=True)
class Export(ModelPaths):
    """The arguments of `castor export`."""

    out: Annotated[Path, typer.Argument()]
    """Folder to write: complete, or not there at all."""
    layout: Annotated[str, typer.Option("--format")] = "safetensors"
    """safetensors or gguf (llama, mistral, qwen2, qwen3)."""
    merge_adapter: bool = False
    """Merge the adapters into the base's weights."""
    dtype: str | None = None
    """float32, bfloat16, float16, or q8_0 in gguf. Default: that of the weights."""
    shard_bytes: Annotated[
        int | None,
        typer.Option("--max-shard-size"),
        read_size("--max-shard-size"),
    ] = None
    """Size of a safetensors file. Default: 5GB."""
    overwrite: bool = False
    """Replace the model that is in the folder."""


@from_fields
def export(asked: Export) -> None:
    """Write a model or a run as a folder for the hub, vLLM or llama.cpp, with a model card."""
    libraries = ["transformers", "yaml"]
    libraries += ["peft"] if asked.merge_adapter else []
    libraries += ["gguf"] if asked.layout == "gguf" else []
    require("castor export", *libraries)
    import transformers

    from castor.recipes.exports import write_export

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    typer.echo(f"castor export: {write_export(asked)}")
