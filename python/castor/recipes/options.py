"""Options that the sub-commands which load a model for inference share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from castor.memory_options import help_of

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
