"""The `castor` command, also `python -m castor`. Each sub-command is a function here.

A sub-command imports what it needs when it runs: `castor --help` answers without transformers.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from castor import _C
from castor.errors import Error

app = typer.Typer(
    name="castor",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"castor {_C.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Memory runtime for PyTorch: trains models that do not fit the device."""


@app.command()
def selftest() -> None:
    """Check the installation: train a small model inside a budget against plain torch."""
    from castor import selftest as checks

    raise typer.Exit(checks.main())


@app.command()
def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print facts and findings as JSON.")] = False,
) -> None:
    """Show what castor finds on this machine, and what to change where it costs speed."""
    from castor import doctor as examination

    facts = examination.gather()
    if json:
        typer.echo(examination.as_json(facts))
    else:
        examination.show(facts, Console(highlight=False))


def main() -> None:
    """Runs the command line. Exit status 1 for what castor refuses, 2 for wrong usage."""
    try:
        app()
    except (Error, ValueError, OSError, NotImplementedError) as error:
        # What these say is meant for the user; a traceback would hide it.
        Console(stderr=True, highlight=False, soft_wrap=True).print(
            f"[red]castor: error:[/red] {escape(str(error))}"
        )
        sys.exit(1)
