"""`castor evaluate`: a model's results on tasks of lm-eval, in a memory budget.

What imports torch is imported within functions: `castor --help` imports this file.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from castor import memory_options
from castor.recipes import options, require

if TYPE_CHECKING:
    from castor.recipes.evaluation import Questions


def evaluate(
    path: options.ModelPath,
    tasks: Annotated[
        str, typer.Option(help="lm-eval's tasks, a,b: names, YAML files, or folders of these.")
    ],
    include: Annotated[
        Path | None, typer.Option(help="Folder with YAML files of tasks of your own.")
    ] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(help="Examples before a question. Default: the task's.", min=0)
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences in one forward.", min=1)] = 1,
    limit: Annotated[
        float | None, typer.Option(help="Documents of each task, or a share below 1.")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Most tokens of a sequence. Default: the model's.", min=2)
    ] = None,
    apply_chat_template: Annotated[
        bool, typer.Option(help="Ask in the format of the tokenizer's chat template.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(help="For lm-eval's JSON: a folder, or FILE.json. Default: a run's folder."),
    ] = None,
    log_samples: Annotated[
        bool, typer.Option("--log-samples", help="Write every question and its answer too.")
    ] = False,
    seed: Annotated[
        int | None, typer.Option(help="Seed of all generators. Default: lm-eval's.", min=0)
    ] = None,
    gen_kwargs: Annotated[
        str | None,
        typer.Option(help="Arguments of generation in place of the tasks': temperature=0.7,..."),
    ] = None,
    confirm_run_unsafe_code: Annotated[
        bool,
        typer.Option("--confirm-run-unsafe-code", help="Let tasks run code of the model's."),
    ] = False,
    base: options.Base = None,
    tokenizer: options.TokenizerPath = None,
    device_memory: memory_options.DeviceMemory = None,
    host_memory: memory_options.HostMemory = None,
    device: memory_options.Device = None,
    precision: options.Precision = None,
    nvme: memory_options.Nvme = None,
    config: memory_options.Config = None,
    settings: memory_options.Settings = None,
) -> None:
    """Evaluate a model on tasks of lm-eval, in a memory budget."""
    chosen = memory_options.read_options(
        config, settings, nvme=nvme, device_memory=device_memory, host_memory=host_memory,
        device=device, precision=precision,
    )  # fmt: skip
    require("castor evaluate", "transformers", "jinja2", "datasets", "lm_eval")
    import transformers

    from castor.recipes import evaluation

    questions = evaluation.Questions(
        tasks=tuple(name.strip() for name in tasks.split(",") if name.strip()),
        include=include, num_fewshot=num_fewshot, batch_size=batch_size, limit=limit,
        max_length=max_length, apply_chat_template=apply_chat_template, log_samples=log_samples,
        seed=seed, run_unsafe_code=confirm_run_unsafe_code,
        gen_kwargs=evaluation.gen_kwargs_of(gen_kwargs) if gen_kwargs else {},
    )  # fmt: skip
    transformers.logging.set_verbosity_error()
    evaluate_and_write(
        path, questions, settings=chosen or {}, base=base, tokenizer=tokenizer, output=output
    )


def evaluate_and_write(
    path: Path, questions: Questions, *, output: Path | None, **loading: Any
) -> None:
    """Evaluates a model, prints the results, and writes them where there is a place.

    Args:
        path: The model.
        questions: The tasks.
        output: Folder or file of the results, as in `evaluation.results_file`.
        loading: Further arguments of `evaluation.evaluate`.

    Raises:
        Exception: `evaluation.evaluate` raises it; or UsageError, for an output that is no place.
        OSError: The results cannot be written; they have been printed.
    """
    from castor.errors import UsageError
    from castor.recipes import evaluation

    file = evaluation.results_file(path, output)
    if questions.log_samples and file is None:
        raise UsageError("--log-samples writes files, and there is no run's folder; give --output")
    results = evaluation.evaluate(path, questions, **loading)
    if results is not None:
        show(results)
        if file is not None:
            for one in evaluation.save(results, file):
                typer.echo(f"castor evaluate: wrote {one}", err=True)


def show(results: dict[str, Any]) -> None:
    """Prints lm-eval's tables of results, and to stderr the device memory that they took."""
    from lm_eval.utils import make_table

    config = results["config"]
    given = ",".join(f"{name}={value}" for name, value in config["model_args"].items())
    typer.echo(f"castor ({given}), limit: {config['limit']}, batch_size: {config['batch_size']}")
    typer.echo(make_table(results))
    if "groups" in results:
        typer.echo(make_table(results, "groups"))
    peak, budget = (
        f"{results['castor'][name] / 2**20:,.1f} MiB"
        for name in ("peak_device_bytes", "device_budget_bytes")
    )
    typer.echo(f"castor evaluate: device: at most {peak} of a budget of {budget}", err=True)
