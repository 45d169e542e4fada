"""`castor data write`: the documents of a recipe as token files of Megatron-LM."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from castor.options import Overrides
from castor.recipes import require


def write(
    recipe: Annotated[
        Path, typer.Argument(help="The recipe, a YAML file, whose method is pretrain.")
    ],
    prefix: Annotated[Path, typer.Argument(help="Path of the files, without .bin and .idx.")],
    held_out: Annotated[
        bool, typer.Option(help="Documents to evaluate on, not to train on.")
    ] = False,
    overrides: Overrides = None,
) -> None:
    """Write a recipe's documents as PREFIX.bin and PREFIX.idx, which Megatron-LM reads.

    Each row becomes a document of one sequence, in full, with the end token that training adds:
    max_length, truncation and packing do not count here. Existing files are not replaced. A recipe
    reads the files with `format: megatron`.
    """
    require("castor data write", "datasets", "transformers", "yaml", "pydantic")
    import numpy as np
    from rich.console import Console

    from castor.errors import UsageError
    from castor.recipes.data import megatron
    from castor.recipes.data.prepare import prepare
    from castor.recipes.recipe import load
    from castor.recipes.train import load_tokenizer

    for path in megatron.paths(prefix):
        if path.exists():
            raise UsageError(f"{path} is there already: remove it, or give another prefix")
    settings = load(recipe, overrides or ())
    if settings.method.name != "pretrain":
        raise UsageError(
            f"method.name is {settings.method.name!r}, and Megatron-LM's files hold no more than "
            "token ids, not which of them the loss counts: use a recipe whose method.name is "
            "'pretrain'"
        )
    tokenizer = load_tokenizer(settings)
    in_full = {"packing": False, "truncation": "refuse", "max_length": np.iinfo(np.int32).max}
    prepared = prepare(
        settings.data.model_copy(update=in_full), tokenizer, method=settings.method.name
    )
    table = prepared.held_out if held_out else prepared.train
    if table is None:
        raise UsageError("the recipe holds out no rows: data.held_out is 0")
    files = megatron.paths(prefix)
    files[0].parent.mkdir(parents=True, exist_ok=True)
    dtype = megatron.smallest_dtype(len(tokenizer))
    rows = table.select_columns("input_ids").with_format("numpy")
    megatron.write(prefix, ([row["input_ids"]] for row in rows), dtype)
    tokens = files[0].stat().st_size // np.dtype(dtype).itemsize
    Console(highlight=False).print(
        f"{len(table):,} documents, {tokens:,} tokens as {np.dtype(dtype).name}: {files[0]}, "
        f"{files[1]}",
        soft_wrap=True,
    )
    for one in prepared.broken:
        Console(highlight=False, stderr=True).print(f"left out: {one}", soft_wrap=True)
