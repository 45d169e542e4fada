"""The `castor` command, also `python -m castor`. Each sub-command is a function here.

Those that predict are in castor.cli_estimates, those that evaluate, chat and serve in
castor.recipes. A sub-command imports what it needs when it runs: `castor --help` answers without
transformers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.markup import escape

from castor.cli_estimates import estimate, plan, scaling
from castor.config.run_options import RunOptions
from castor.options import Memory, Overrides, from_fields, help_of
from castor.recipes.chat import chat
from castor.recipes.data.show import data_app
from castor.recipes.evaluate import evaluate
from castor.recipes.export import export
from castor.recipes.serve import serve
from castor.recipes.studio import studio

app = typer.Typer(
    name="castor",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from castor import _C

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
    nvme: Annotated[
        Path | None,
        typer.Option(help="Measure this directory too: 10 s, and 1 GiB that is removed again."),
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(help="Show where as many ranks of castor run would compute.", min=1),
    ] = None,
) -> None:
    """Show what castor finds on this machine, and what to change where it costs speed."""
    from castor import doctor as examination

    facts = examination.gather(nvme=nvme, nproc=nproc)
    if json:
        typer.echo(examination.as_json(facts))
    else:
        examination.show(facts, Console(highlight=False))


for _predicts in (estimate, plan, scaling):
    app.command()(_predicts)


@app.command(context_settings={"allow_extra_args": True, "allow_interspersed_args": False})
@from_fields
def run(
    context: typer.Context,
    script: Annotated[
        str,
        typer.Argument(
            help="A Python script, or a Python command such as trl; what follows is its own."
        ),
    ],
    memory: Memory,
    options: RunOptions,
    module: Annotated[bool, typer.Option("-m", help="The script is a module's name.")] = False,
    activations: Annotated[str | None, typer.Option(help=help_of("activations"))] = None,
) -> None:
    """Train with castor what a script trains, as it is; or start it on several ranks; or both."""
    from castor import launch
    from castor.integrations.check_settings import check_settings

    chosen = memory.arguments(activations=activations)
    if chosen is not None:
        check_settings(chosen)
    status = launch.run(script, context.args, options, module=module, settings=chosen)
    raise typer.Exit(status)


@app.command()
def init(
    method: Annotated[str, typer.Argument(help="sft, dpo, reward or pretrain.")],
    model: Annotated[str, typer.Option(help="A model's folder, or its name in the hub's cache.")],
    data: Annotated[str, typer.Option(help="A file or folder of rows, or a hub name.")],
) -> None:
    """Print a commented recipe for castor train: castor init sft ... > recipe.yaml."""
    from castor.recipes import require

    require("castor init", "pydantic", "yaml")
    from castor.recipes import init as recipes

    typer.echo(recipes.init(method, model, data), nl=False)


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="A YAML file, such as castor init prints.")],
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan, and train nothing.")
    ] = False,
) -> None:
    """Train a recipe, from its last checkpoint where there is one."""
    from castor.recipes import require

    require("castor train", "pydantic", "yaml", "trl", "datasets", "peft", "transformers")
    from castor.recipes import train as recipes

    raise typer.Exit(recipes.start(recipe, overrides or [], dry_run=dry_run))


app.add_typer(data_app)
for _uses_model in (evaluate, chat, serve, export, studio):
    app.command()(_uses_model)


@app.command()
def convert(
    source: Annotated[
        Path, typer.Argument(help="A run or one of its steps, an optimizer, a model, DCP, a .pt.")
    ],
    target: Annotated[Path, typer.Argument(help="A directory, which appears whole or not at all.")],
    to: Annotated[str, typer.Option(help="Layout of the target: hf, torch, dcp or castor.")],
    dtype: Annotated[
        str | None,
        typer.Option(help="Of the weights: fp32 (masters where there are), bf16 or fp16."),
    ] = None,
    shard_size: Annotated[
        str | None, typer.Option(help="Of files in hf and castor, such as 5GB. Default: one file.")
    ] = None,
    tie: Annotated[
        list[str] | None,
        typer.Option(
            help="KEY=OTHER: a name of the tensor OTHER, such as lm_head.weight=embed.weight; may "
            "be given several times. What castor saved knows its own."
        ),
    ] = None,
    names: Annotated[
        Path | None,
        typer.Option(
            help="Names of the parameters of an optimizer that knows positions alone, in its "
            "order, one a line."
        ),
    ] = None,
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="Without optimizer states.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a checkpoint at the target.")
    ] = False,
) -> None:
    """Write a checkpoint in another layout: Hugging Face's, torch.save's, DCP's or castor's."""
    from castor.checkpoint import convert as conversion
    from castor.config import parse_bytes
    from castor.estimate.model import build_by_name

    done = conversion.convert(
        source,
        target,
        conversion.checked_layout(to),
        dtype=None if dtype is None else conversion.checked_precision(dtype),
        max_bytes=None if shard_size is None else parse_bytes(shard_size, "--shard-size"),
        tie=tie or (),
        names=None if names is None else names.read_text(encoding="utf-8").split(),
        weights_only=weights_only,
        force=force,
        build=build_by_name,
    )
    typer.echo(done.describe(source, target, to))


@app.command("io-bench")
def io_bench(
    path: Annotated[Path, typer.Argument(help="A directory on the device; a file is made there.")],
    size: Annotated[str, typer.Option(help="Of that file.")] = "1GiB",
    block: Annotated[
        list[str] | None, typer.Option(help="Block size; may be given several times.")
    ] = None,
    depth: Annotated[
        list[int] | None, typer.Option(help="Blocks in flight; may be given several times.")
    ] = None,
    engine: Annotated[str, typer.Option(help="auto, io_uring or threads.")] = "auto",
    seconds: Annotated[float, typer.Option(help="Of each measurement.")] = 1.0,
    model_params: Annotated[
        float | None, typer.Option(help="Trainable parameters of a run, such as 18e9.")
    ] = None,
    state_format: Annotated[
        str, typer.Option("--format", help="Its optimizer state, as in castor estimate.")
    ] = "split",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure a device for the NVMe tier, and what a run's optimizer step would take there."""
    from castor import io_bench as bench
    from castor.config import parse_bytes

    parse_bytes(size, "--size")
    if model_params is not None:
        bench.step_bytes(model_params, state_format)  # refuses nonsense before measuring
    console = Console(highlight=False, soft_wrap=True)
    report = bench.measure(
        path,
        file_bytes=size,
        blocks=block or bench.BLOCKS,
        depths=depth or bench.DEPTHS,
        engine=cast(bench.Engine, engine),
        seconds=seconds,
    )
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=2))
        return
    bench.render(report, console)
    if model_params is not None:
        bench.render_step(report, console, model_params, state_format)


_CommandLineError: Any = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)
"""The class of errors in a command line. Typer brings a click of its own, or uses click's."""


def main() -> None:
    """Runs the command line. Exit status 1 for what castor refuses, 2 for wrong usage."""
    try:
        status = app(prog_name="castor", standalone_mode=False)
    except typer.Abort:
        sys.exit(130)
    except _CommandLineError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
        else:
            context = getattr(error, "ctx", None)
            command = context.command_path if context else "castor"
            said = error.format_message().replace("\n", " ").strip().rstrip(".")
            _say(f"{said}; `{command} --help` shows what there is")
        sys.exit(error.exit_code)
    except Exception as error:
        text = _meant_for_the_user(error)
        if text is None:
            raise
        _say(text)
        sys.exit(1)
    sys.exit(status if isinstance(status, int) else 0)


def _say(text: str) -> None:
    """Prints an error in one line; a traceback would hide it."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(
        f"[red]castor: error:[/red] {escape(text)}"
    )


def _meant_for_the_user(error: Exception) -> str | None:
    """Returns what an error says; None: it is a fault of castor's own, whose traceback counts."""
    errors = sys.modules.get("castor.errors")
    if errors is not None and isinstance(error, errors.Error):
        return str(error)
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}; give a file or directory that can be used"
    if isinstance(error, ValueError | OSError | NotImplementedError | ImportError):
        return str(error)
    return None
