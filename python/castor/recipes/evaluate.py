"""`castor evaluate`: a model's results on tasks of lm-eval, in a memory budget.

What imports torch is imported within functions: `castor --help` imports this file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from castor.config import did_you_mean
from castor.config.declared import at_least
from castor.options import Memory, ModelPaths, Read, from_fields
from castor.recipes import require

_OF_LM_EVAL = ("until", "max_gen_toks")
"""lm-eval's own arguments of generation."""
_BY_LM_EVAL = {"use_cache", "pad_token_id", "max_length"}
"""Arguments of transformers that lm-eval gives itself."""


def gen_kwargs_of(text: str) -> dict[str, Any]:
    """Returns arguments of generation, given as lm-eval takes them: a=1,b=2 or an object of JSON.

    Raises:
        ValueError: The text is neither.
    """
    try:
        found = json.loads(text) if text.lstrip().startswith("{") else None
    except ValueError as error:
        raise ValueError(f"--gen-kwargs {text} is no JSON: {error}") from error
    if found is None and not all("=" in one for one in text.split(",")):
        raise ValueError(
            f"--gen-kwargs {text}: give NAME=VALUE, such as temperature=0.7,do_sample=true, or an "
            "object of JSON"
        )
    if found is None:
        require("--gen-kwargs", "lm_eval")
        from lm_eval.utils import simple_parse_args_string

        found = simple_parse_args_string(text)
    arguments: dict[str, Any] = found
    return arguments


@dataclass(frozen=True, kw_only=True)
class Questions:
    """The tasks that a model is evaluated on, and how lm-eval puts them to it.

    These are the options of `castor evaluate`, and the section `evaluate` of a recipe.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid", "allow_inf_nan": False}

    tasks: Annotated[
        tuple[str, ...],
        Read(lambda text: tuple(name.strip() for name in text.split(",") if name.strip())),
    ]
    """lm-eval's tasks, a,b: names, YAML files, or folders of these."""
    include: Path | None = None
    """Folder with YAML files of tasks of your own, which go before lm-eval's."""
    num_fewshot: int | None = None
    """Examples before a question. Default: the task's."""
    batch_size: int = 1
    """Sequences in one forward."""
    limit: float | None = None
    """Documents of each task, or a share below 1. Default: all."""
    max_length: int | None = None
    """Most tokens of a sequence. Default: the model's positions."""
    apply_chat_template: bool = False
    """Ask in the format of the tokenizer's chat template."""
    log_samples: bool = False
    """Write every question and its answer too."""
    seed: int | None = None
    """Seed of all generators. Default: lm-eval's."""
    confirm_run_unsafe_code: bool = False
    """Let tasks run code of the model's."""
    gen_kwargs: Annotated[Mapping[str, Any], Read(gen_kwargs_of)] = field(default_factory=dict)
    """Arguments of generation in place of the tasks': temperature=0.7,..."""

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ValueError("tasks names no task; give some, such as boolq,gsm8k")
        least = {"num_fewshot": 0, "batch_size": 1, "max_length": 2, "seed": 0}
        for name, number in least.items():
            if (value := getattr(self, name)) is not None:
                at_least(number)(value, name)
        limit = self.limit
        if limit is not None and not (0 < limit < 1 or (limit >= 1 and limit == int(limit))):
            raise ValueError(f"limit is {limit:g}; give a number of documents or a share below 1")
        if self.gen_kwargs:
            from transformers import GenerationConfig

            known = sorted({*vars(GenerationConfig()), *_OF_LM_EVAL} - _BY_LM_EVAL)
            for name in self.gen_kwargs:
                if name not in known or name.startswith("_"):
                    others = f"; give those of GenerationConfig, {' or '.join(_OF_LM_EVAL)}"
                    raise ValueError(
                        f"gen_kwargs: there is no argument of generation {name!r}"
                        f"{did_you_mean(name, known) or others}"
                    )


@from_fields
def evaluate(
    model: ModelPaths,
    questions: Questions,
    memory: Memory,
    output: Annotated[
        Path | None,
        typer.Option(help="For lm-eval's JSON: a folder, or FILE.json. Default: a run's folder."),
    ] = None,
) -> None:
    """Evaluate a model on tasks of lm-eval, in a memory budget."""
    settings = memory.arguments() or {}
    require("castor evaluate", "transformers", "jinja2", "datasets", "lm_eval")
    import transformers

    transformers.logging.set_verbosity_error()
    evaluate_and_write(
        model.path, questions, settings=settings, base=model.base, tokenizer=model.tokenizer,
        output=output,
    )  # fmt: skip


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
