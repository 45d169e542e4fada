"""Model cards: README.md with the hub's metadata, the recipe, scores and versions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from castor.checkpoint.adapters import CONFIG
from castor.errors import UsageError
from castor.recipes.models import read_json
from castor.recipes.runs import RECIPE, versions

_LIBRARIES = ("castor-torch", "torch", "transformers")
_IN_CACHE = re.compile(r"models--([^/]+)--([^/]+)$")
_ON_HUB = re.compile(r"\w[\w.-]*/[\w.-]+")
_CHECKPOINT = re.compile(r"(checkpoint|step)-\d+")
_USE = {
    "transformers": 'model = AutoModelForCausalLM.from_pretrained("{name}")',
    "peft": 'model = AutoPeftModelForCausalLM.from_pretrained("{name}")',
    "gguf": "llama-cli -m {name}/*.gguf",
}


@dataclass(frozen=True, kw_only=True)
class Card:
    """The facts of a model card."""

    name: str
    """Name of the model: that of its folder."""
    library: str
    """Library that loads the folder: "transformers", "peft" or "gguf"."""
    about: str
    """Kind and type of the weights, in words."""
    source: Path
    """The folder that was exported: a run, its checkpoint, or a model."""
    weights: Path | None
    """Folder of the whole model; None: it is not on this machine."""
    adapters: Path | None = None
    """Folder of the adapters that are exported by themselves."""
    merged: Path | None = None
    """Folder of the adapters that are merged into the weights."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """One metric of one task in a results file of lm-eval."""

    task: str
    metric: str
    value: float
    error: float | None
    """Standard error of the value; None: the file has none."""


def base_name(path: object) -> str:
    """Returns the name of a base model: its name on the hub, or else that of its folder."""
    text = str(path)
    for part in (Path(text), *Path(text).parents):
        if found := _IN_CACHE.search(part.name):
            return f"{found[1]}/{found[2]}"
    on_hub = _ON_HUB.fullmatch(text) is not None and not Path(text).is_dir()
    return text if on_hub else Path(text).name


def write_card(path: Path, card: Card) -> None:
    """Writes a model card.

    Raises:
        UsageError: The recipe or a results file of the source cannot be read.
    """
    recipe = _recipe(card.source)
    scores = read_scores(card.source)
    base = _base(card, recipe)
    method = (recipe or {}).get("method", {})
    data = ModelCardData(
        library_name=card.library,
        base_model=base if base is not None and "/" in base else None,
        license=_license(card),
        pipeline_tag="text-generation",
        tags=["castor", *([method["name"]] if method else [])],
        model_name=card.name if scores else None,
        eval_results=[
            EvalResult(
                task_type="text-generation",
                dataset_type=one.task,
                dataset_name=one.task,
                metric_type=one.metric,
                metric_value=one.value,
            )
            for one in scores
        ]
        or None,
    )
    text = f"---\n{data.to_yaml()}\n---\n\n" + "\n".join(_body(card, base, recipe, scores))
    path.write_text(text, encoding="utf-8")


def _body(
    card: Card, base: str | None, recipe: dict[str, Any] | None, scores: list[Score]
) -> Iterator[str]:
    method = (recipe or {}).get("method", {})
    made = f"`castor train` ({method['name']}, {method['adapter']})" if method else "training"
    yield f"# {card.name}\n"
    origin = f"The result of {made}" + (f", which began with `{base}`" if base is not None else "")
    yield f"{origin if method or card.merged or card.adapters else 'A model'}: {card.about}.\n"
    if card.merged is not None and method.get("adapter") == "qlora":
        yield (
            "The adapters were trained beside weights of 4 bits, and are merged into the weights "
            "before quantisation.\n"
        )
    shell = card.library == "gguf"
    yield f"```{'sh' if shell else 'python'}\n{_USE[card.library].format(name=card.name)}\n```\n"
    if scores:
        yield "## Scores\n\nMeasured before the export.\n"
        yield "| task | metric | value | standard error |\n|---|---|---|---|"
        for one in scores:
            error = "" if one.error is None else f"{one.error:.4f}"
            yield f"| {one.task} | {one.metric} | {one.value:.4f} | {error} |"
        yield ""
    if recipe is not None:
        text = yaml.safe_dump(_without_folders(recipe), sort_keys=False, allow_unicode=True)
        yield f"## Recipe\n\nPaths are without their folders.\n\n```yaml\n{text}```\n"
    yield "## Versions\n\n| library | version |\n|---|---|"
    for name, number in versions((*_LIBRARIES, *_more(card))).items():
        yield f"| {name} | {number} |"
    yield ""


def _more(card: Card) -> list[str]:
    """Returns the libraries that made a folder besides those of all folders."""
    adapted = card.adapters is not None or card.merged is not None
    return [*(["peft"] if adapted else []), *(["gguf"] if card.library == "gguf" else [])]


def _recipe(source: Path) -> dict[str, Any] | None:
    """Returns the recipe of a run, given the run or one of its checkpoints; None: there is none."""
    inside = _CHECKPOINT.fullmatch(source.resolve().name) is not None
    for folder in (source, *([source.resolve().parent] if inside else [])):
        file = folder / RECIPE
        if file.is_file():
            try:
                found: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
            except (yaml.YAMLError, UnicodeDecodeError) as error:
                raise UsageError(f"{file} is no YAML; restore it or move it away") from error
            method = found.get("method") if isinstance(found, dict) else None
            if not isinstance(method, dict) or not {"name", "adapter"} <= method.keys():
                raise UsageError(f"{file} is no recipe of castor train; move it away")
            recipe: dict[str, Any] = found
            return recipe
    return None


def _without_folders(value: Any) -> Any:
    """Returns a recipe whose absolute paths are names alone: cards are published."""
    if isinstance(value, dict):
        return {key: _without_folders(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_without_folders(one) for one in value]
    return base_name(value) if isinstance(value, str) and value.startswith("/") else value


def _base(card: Card, recipe: dict[str, Any] | None) -> str | None:
    """Returns the name of the model that training began with; None: it is not known."""
    adapters = card.adapters or card.merged
    if adapters is not None:
        named = read_json(adapters / CONFIG).get("base_model_name_or_path")
        path = named or card.weights
        return None if path is None else base_name(path)
    model = (recipe or {}).get("model", {})
    return base_name(model["path"]) if "path" in model else None


def _license(card: Card) -> str | None:
    """Returns the license that a card of the source or of the base model names."""
    for folder in (card.source, card.adapters, card.weights):
        if folder is not None and (folder / "README.md").is_file():
            found: Any = ModelCard.load(folder / "README.md").data.license
            if found:
                return str(found)
    return None


def read_scores(folder: Path) -> list[Score]:
    """Returns the scores in the results files of lm-eval in a run's folder.

    A file is named results*.json and may be in a folder of its own. Where several have scores of a
    task, those of the newest file count. Checkpoints have files of their own.

    Raises:
        UsageError: A file cannot be read.
    """
    files = [
        path
        for path in folder.rglob("results*.json")
        if not _CHECKPOINT.fullmatch(path.relative_to(folder).parts[0])
    ]
    tasks: dict[str, dict[str, Any]] = {}
    for path in sorted(files, key=lambda one: (one.stat().st_mtime, one.name)):
        try:
            found = json.loads(path.read_text(encoding="utf-8"))["results"]
            tasks |= {task: dict(metrics) for task, metrics in found.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"{path} is no results file of castor evaluate; move it away"
            ) from error
    return [score for task, metrics in tasks.items() for score in _of_task(task, metrics)]


def _of_task(task: str, metrics: dict[str, Any]) -> Iterator[Score]:
    """Yields a task's scores: lm-eval names them "metric,filter" and "metric_stderr,filter"."""
    for key, value in metrics.items():
        metric, _, kind = key.partition(",")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not kind or metric.endswith("_stderr"):
            continue
        error = metrics.get(f"{metric}_stderr,{kind}")
        yield Score(
            task=task,
            metric=metric if kind == "none" else f"{metric} ({kind})",
            value=value,
            error=error if isinstance(error, int | float) else None,
        )
