"""`castor data show`: the rows of a recipe, as the model sees them."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from castor.options import Overrides
from castor.recipes import require
from castor.recipes.data import IGNORED
from castor.recipes.data.write import write

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from castor.recipes.data.prepare import Prepared
    from castor.recipes.recipe import Recipe

COUNTED = "bold green"
"""Style of tokens that the loss counts; the others are dim."""
_QUANTILES = {"shortest": 0.0, "median": 0.5, "95%": 0.95, "longest": 1.0}

data_app = typer.Typer(
    name="data", no_args_is_help=True, help="Look at the data of a recipe, or write it."
)


@data_app.callback()
def _root() -> None:
    """Look at the data of a recipe, or write it."""


data_app.command()(write)


@data_app.command()
def show(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a YAML file.")],
    rows: Annotated[int, typer.Option(help="Number of rows to print.", min=0)] = 3,
    held_out: Annotated[bool, typer.Option(help="Rows to evaluate on, not to train on.")] = False,
    overrides: Overrides = None,
) -> None:
    """Print rows as the model sees them, and figures of all rows.

    Tokens that the loss counts are bold and green, the others dim. Rows are tokenised for that, and
    `castor train` takes them from the cache.
    """
    require("castor data show", "datasets", "transformers", "trl", "yaml", "pydantic")
    from rich.console import Console

    from castor.recipes.data.prepare import prepare
    from castor.recipes.recipe import load
    from castor.recipes.train import load_tokenizer

    settings = load(recipe, overrides or ())
    tokenizer = load_tokenizer(settings)
    prepared = prepare(settings.data, tokenizer, method=settings.method.name)
    console = Console(highlight=False)
    print_rows(prepared, tokenizer, console, settings, num_rows=rows, held_out=held_out)


def print_rows(
    prepared: Prepared,
    tokenizer: Any,
    console: Console,
    recipe: Recipe,
    *,
    num_rows: int,
    held_out: bool = False,
) -> None:
    """Prints the first rows, then lengths and counts of all.

    Args:
        prepared: The data sets of the recipe.
        tokenizer: The tokenizer that made them.
        console: Place to print on.
        recipe: The recipe, whose limits the figures are compared with.
        num_rows: Number of rows to print.
        held_out: Whether the rows are those to evaluate on.

    Raises:
        ValueError: There are no held-out rows.
    """
    from rich.rule import Rule
    from rich.text import Text

    table = prepared.held_out if held_out else prepared.train
    if table is None:
        raise ValueError("the recipe holds out no rows: data.held_out is 0")
    for number, row in enumerate(table.select(range(min(num_rows, len(table)))), 1):
        console.print(Rule(f"row {number} of {len(table):,}", align="left"))
        if "input_ids" in row:
            console.print(coloured(row, tokenizer), soft_wrap=True)
        else:
            for name in ("prompt", "chosen", "rejected"):
                style = COUNTED if name != "prompt" else "dim"
                turns = row[name]
                if not isinstance(turns, str):
                    turns = "\n".join(f"{turn['role']}: {turn['content']}" for turn in turns)
                console.print(Text(f"{name}: "), Text(turns, style), soft_wrap=True)
    console.print(Rule("all rows", align="left"))
    for line in figures(prepared, recipe):
        console.print(Text(line), soft_wrap=True)


def coloured(row: dict[str, Any], tokenizer: Any) -> Text:
    """Returns a row's tokens as text, in colour where the loss counts them.

    Where a packed row goes on with another document, a line of its own says so. Tokens that are
    parts of one character are decoded together, in the last one's colour.
    """
    from rich.text import Text

    found, waiting = Text(), list[int]()
    begins = set(accumulate(row.get("seq_lengths", [])))
    for at, (token, label) in enumerate(zip(row["input_ids"], row["labels"], strict=True)):
        if at in begins:
            found.append("\n--- next document ---\n", "yellow")
        waiting.append(token)
        piece = tokenizer.decode(waiting, clean_up_tokenization_spaces=False)
        if piece.endswith("\ufffd") and len(waiting) < 4:
            continue
        found.append(piece, COUNTED if label != IGNORED else "dim")
        waiting.clear()
    if waiting:
        found.append(tokenizer.decode(waiting, clean_up_tokenization_spaces=False), "dim")
    return found


def figures(prepared: Prepared, recipe: Recipe) -> list[str]:
    """Returns lines with the counts, lengths and packing of all rows."""
    import numpy as np

    from castor.recipes.data.prepare import Outcome

    limit, outcomes = recipe.data.max_length, prepared.outcomes
    counts = {outcome: outcomes.get(outcome, 0) for outcome in Outcome}
    total = sum(count for outcome, count in counts.items() if outcome is not Outcome.BLANK)
    lines = [
        f"rows: {total:,} read; {'packed into ' if prepared.density is not None else ''}"
        f"{len(prepared.train):,} to train on, "
        f"{len(prepared.held_out) if prepared.held_out is not None else 0:,} held out",
        f"left out: {counts[Outcome.BROKEN]:,} broken, {counts[Outcome.TOO_LONG]:,} longer than "
        f"{limit:,} tokens, {counts[Outcome.WITHOUT_LOSS]:,} without a token that the loss counts",
        f"truncated: {counts[Outcome.TRUNCATED]:,} to {limit:,} tokens",
    ]
    if counts[Outcome.SPLIT]:
        lines.append(
            f"split: {counts[Outcome.SPLIT]:,} longer rows into sequences of at most {limit:,} "
            "tokens"
        )
    if prepared.lengths:
        quantiles = np.quantile(
            list(prepared.lengths), list(_QUANTILES.values()), method="inverted_cdf",
            weights=list(prepared.lengths.values()),
        )  # fmt: skip
        listed = [f"{name} {int(one):,}" for name, one in zip(_QUANTILES, quantiles, strict=True)]
        lines.append(f"tokens of a row: {', '.join(listed)}")
    if prepared.num_counted:
        share = prepared.num_counted / prepared.num_tokens
        lines.append(
            f"tokens to train on: {prepared.num_tokens:,}; the loss counts "
            f"{prepared.num_counted:,} ({share:.1%})"
        )
    if prepared.density is not None:
        lines.append(
            f"packing: {len(prepared.train):,} rows of {limit:,} tokens, "
            f"{prepared.density:.1%} full"
        )
    lines += [f"broken: {one}" for one in prepared.broken]
    lines.append(f"cache: {prepared.cache}")
    return lines
