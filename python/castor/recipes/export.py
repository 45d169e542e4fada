"""`castor export`: a model or a run as a folder for the hub, vLLM or llama.cpp.

What imports torch is imported within functions: `castor --help` imports this file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from castor.recipes import options, require


def export(
    path: options.ModelPath,
    out: Annotated[Path, typer.Argument(help="Folder to write: complete, or not there at all.")],
    layout: Annotated[
        str, typer.Option("--format", help="safetensors or gguf (llama, mistral, qwen2, qwen3).")
    ] = "safetensors",
    merge_adapter: Annotated[
        bool, typer.Option("--merge-adapter", help="Merge the adapters into the base's weights.")
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32, bfloat16, float16, or q8_0 in gguf. Default: that of the weights."
        ),
    ] = None,
    max_shard_size: Annotated[
        str | None, typer.Option(help="Size of a safetensors file. Default: 5GB.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the model that is in the folder.")
    ] = False,
    base: options.Base = None,
    tokenizer: options.TokenizerPath = None,
) -> None:
    """Write a model or a run as a folder for the hub, vLLM or llama.cpp, with a model card."""
    from castor.config import parse_bytes

    shard_bytes = None
    if max_shard_size is not None:
        shard_bytes = parse_bytes(max_shard_size, "--max-shard-size")
    libraries = ["transformers", "yaml"]
    libraries += ["peft"] if merge_adapter else []
    libraries += ["gguf"] if layout == "gguf" else []
    require("castor export", *libraries)
    import transformers

    from castor.recipes.exports import Export, write_export

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    asked = Export(
        path=path, out=out, layout=layout, merge_adapter=merge_adapter, dtype=dtype,
        shard_bytes=shard_bytes, overwrite=overwrite, base=base, tokenizer=tokenizer,
    )  # fmt: skip
    typer.echo(f"castor export: {write_export(asked)}")
