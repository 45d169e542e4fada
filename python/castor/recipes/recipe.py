"""A recipe: one YAML file that says what `castor train` trains, on which data, in which memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml  # type: ignore[import-untyped]
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from castor.config import did_you_mean
from castor.config.settings import SIZES
from castor.errors import UsageError
from castor.integrations.check_settings import check_settings
from castor.launch.settings import check_paths
from castor.recipes.evaluate import Questions

Format = Literal[
    "auto", "messages", "sharegpt", "alpaca", "prompt_completion", "preference", "text", "megatron"
]
Method = Literal["sft", "dpo", "reward", "pretrain"]
Adapter = Literal["full", "lora", "qlora"]
Scheduler = Literal["linear", "cosine", "constant", "constant_with_warmup"]
Logger = Literal["tensorboard", "trackio"]

OF_PAIRS = ("dpo", "reward")
"""Methods that compare a chosen with a rejected answer."""
LEARNING_RATES: dict[Method, float] = {"sft": 2e-5, "dpo": 1e-6, "reward": 1e-4, "pretrain": 3e-4}
"""Default learning rates of all weights; adapters get ten times as much."""

_OWN_NAME = "castor-torch"
_SPEAKING = (("memory",), ("evaluate",))
"""Sections that are checked as a whole: the message names the setting."""
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
"""Pydantic's faults of names that a section has not."""
_AboveZero = Annotated[int, Field(ge=1)]
_Share = Annotated[float, Field(ge=0)]


class RecipeError(UsageError, ValueError):
    """A recipe cannot be read, or says what castor cannot train; names file, line and setting."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False)


class ModelSection(_Section):
    """The model that is trained."""

    path: str
    """Folder of a Hugging Face model, or its name in the hub's cache."""
    tokenizer: str | None = None
    """Folder or name of the tokenizer; None: the model's own."""
    random_weights: bool = False
    """Whether training begins with random weights of the folder's config.json: pretrain only."""


class LoraSection(_Section):
    """Low-rank adapters; the names and defaults are those of PEFT's LoraConfig."""

    r: _AboveZero = 8
    """Rank of the adapters."""
    lora_alpha: _AboveZero = 8
    """Scale of the adapters, which is divided by their rank."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the adapters' inputs that are dropped."""
    target_modules: str | list[str] | None = None
    """Names of the layers, or "all-linear"; None: PEFT's choice for the family."""
    use_rslora: bool = False
    """Whether the scale is divided by the root of the rank instead."""
    use_dora: bool = False
    """Whether magnitudes are trained apart from directions (DoRA)."""


class MethodSection(_Section):
    """The way of training."""

    name: Method
    """Objective: "sft", "dpo", "reward" or "pretrain"."""
    adapter: Adapter = "full"
    """Parameters that train: all, LoRA adapters, or LoRA adapters on weights of 4 bits."""
    lora: LoraSection | None = None
    """Adapters; None: PEFT's defaults with "lora" and "qlora"."""
    beta: Annotated[float, Field(gt=0)] | None = None
    """DPO's weight of the distance to the reference model; 0.1 by default."""


class DataSource(_Section):
    """One of several sources that are mixed."""

    path: str
    """File, folder or hub name."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Number of times that each row is taken; 0.5 takes a random half of the rows."""
    format: Format = "auto"
    """Format of its rows."""


class DataSection(_Section):
    """The rows that the model trains on."""

    train: str | list[DataSource]
    """File, folder or hub name, or several sources to mix."""
    format: Format = "auto"
    """Format of the rows."""
    held_out: float | int | str = 0.02
    """Rows to evaluate on: a share below 1, a number of rows from 1 on, or a path."""
    chat_template: str | None = None
    """File with a chat template; None: the tokenizer's own."""
    max_length: Annotated[int, Field(ge=2)] = 2048
    """Tokens of the longest sequence."""
    truncation: Literal["right", "drop", "refuse", "split"] = "right"
    """Treatment of a longer one: cut at its end, left out, as reward does by default, an error, or
    split into several sequences, as pretrain does by default."""
    packing: bool = True
    """Whether several documents share a sequence, apart from each other."""
    loss_on: Literal["assistant", "all"] = "assistant"
    """Tokens that the loss counts."""
    broken_rows: Literal["refuse", "skip"] = "refuse"
    """Treatment of rows that cannot be read: an error, or left out."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of shuffles, of the held-out rows and of the mixture."""

    @field_validator("held_out")
    @classmethod
    def _held_out(cls, value: float | int | str) -> float | int | str:
        if isinstance(value, bool):
            raise ValueError("give a share below 1, a number of rows, or a path")
        if isinstance(value, str):
            return value
        if value < 0 or (value >= 1 and value != int(value)):
            raise ValueError("give a share below 1, a whole number of rows, or a path")
        return int(value) if value >= 1 else value

    @field_validator("train")
    @classmethod
    def _some(cls, value: str | list[DataSource]) -> str | list[DataSource]:
        if not value:
            raise ValueError("give a file, a folder or a hub name")
        return value


class TrainSection(_Section):
    """Steps, batches and the optimizer, which is AdamW."""

    epochs: Annotated[float, Field(gt=0)] = 1.0
    """Number of times that each row is trained on."""
    max_steps: _AboveZero | None = None
    """Number of optimizer steps, in place of `epochs`."""
    batch_size: _AboveZero = 1
    """Sequences, or pairs of answers, in one forward of a rank."""
    gradient_accumulation: _AboveZero = 1
    """Forwards that one optimizer step adds up."""
    learning_rate: Annotated[float, Field(gt=0)] | None = None
    """Peak learning rate; None: the method's default."""
    scheduler: Scheduler = "cosine"
    """Course of the learning rate after the warm-up."""
    warmup: _Share = 0.03
    """Warm-up: a share of the steps below 1, or a number of steps."""
    weight_decay: _Share = 0.0
    """AdamW's weight decay."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (
        0.9,
        0.999,
    )
    """AdamW's decay rates of the moments."""
    max_grad_norm: _Share = 1.0
    """Norm that gradients are clipped to; 0: no clipping."""
    evaluate_every: _AboveZero | None = None
    """Steps between evaluations on the held-out rows; None: after each epoch."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of new weights, dropout and the order of rows."""

    @field_validator("warmup")
    @classmethod
    def _warmup(cls, value: float) -> float:
        if value >= 1 and value != int(value):
            raise ValueError("give a share of the steps below 1, or a whole number of steps")
        return value


class ParallelSection(_Section):
    """The processes that train together."""

    nproc: _AboveZero | None = None
    """Data-parallel ranks on this machine; None: one process, not launched as a rank."""


class LogSection(_Section):
    """The figures that a run prints on its way."""

    every: _AboveZero = 10
    """Steps between lines of the loss."""
    to: list[Logger] = Field(default_factory=list)
    """Libraries that get the figures besides."""


class OutputSection(_Section):
    """The folder of a run, and its checkpoints."""

    dir: str
    """Folder of the run: checkpoints, the trained model, and the resolved recipe."""
    save_every: _AboveZero = 500
    """Steps between checkpoints."""
    keep: _AboveZero | None = 2
    """Number of checkpoints that stay; None: all."""


class Recipe(_Section):
    """A whole recipe. A recipe that `load` returned is resolved: its paths are absolute."""

    model: ModelSection
    data: DataSection
    method: MethodSection
    train: TrainSection = Field(default_factory=TrainSection)
    memory: dict[str, Any] = Field(default_factory=dict)
    """GeminiPlugin's arguments by name; precision is "bf16" by default. "auto" gives none of them,
    as a section that is left out does. `budgets.with_budgets` chooses the budgets that lack."""
    parallel: ParallelSection = Field(default_factory=ParallelSection)
    log: LogSection = Field(default_factory=LogSection)
    evaluate: Questions | None = None
    """Tasks of lm-eval that the trained model is evaluated on at the end."""
    output: OutputSection
    versions: dict[str, str] = Field(default_factory=dict)
    """Versions of the libraries that a run was made with; empty in a recipe by hand."""

    @model_validator(mode="after")
    def _resolve(self) -> Recipe:
        """Refuses contradictions, and puts in the defaults that depend on the method."""
        method, data = self.method, self.data
        if method.adapter == "full" and method.lora is not None:
            raise ValueError(
                "method.lora describes adapters, and method.adapter is 'full': give adapter: lora, "
                "or leave method.lora out"
            )
        if method.name != "dpo" and method.beta is not None:
            raise ValueError(f"method.beta is DPO's, and method.name is {method.name!r}")
        if method.name == "reward" and self.evaluate is not None:
            raise ValueError(
                "evaluate asks a model that generates text, and method.name: reward trains another"
            )
        if self.model.random_weights and (method.name, method.adapter) != ("pretrain", "full"):
            raise ValueError(
                "model.random_weights begins with an untrained model, which only method.name: "
                "pretrain with adapter: full trains"
            )
        train = self.train
        if train.evaluate_every is not None and data.held_out == 0:
            raise ValueError(
                f"train.evaluate_every is {train.evaluate_every}, and data.held_out: 0 leaves no "
                "rows to evaluate on; give some, or leave train.evaluate_every out"
            )
        if train.max_steps is not None and 1 <= train.max_steps < train.warmup:
            raise ValueError(
                f"train.warmup is {train.warmup:g} steps, and train.max_steps is "
                f"{train.max_steps}: the learning rate would not reach its peak; give fewer"
            )
        if method.name in OF_PAIRS:
            if "packing" in data.model_fields_set and data.packing:
                raise ValueError(f"data.packing is for sft and pretrain, not for {method.name}")
            if data.loss_on == "all":
                raise ValueError(
                    f"data.loss_on is for sft: {method.name} compares the answers alone"
                )
            data.packing = False
        if method.name == "reward":
            if "truncation" in data.model_fields_set and data.truncation == "right":
                raise ValueError(
                    "data.truncation: right would cut the answers that reward compares as a whole; "
                    "give drop or refuse"
                )
            data.truncation = "refuse" if data.truncation == "refuse" else "drop"
        if method.name == "pretrain":
            if "loss_on" in data.model_fields_set and data.loss_on == "assistant":
                raise ValueError("data.loss_on: assistant is for sft: pretrain counts every token")
            data.loss_on = "all"
            if "truncation" not in data.model_fields_set:
                data.truncation = "split"
        elif data.truncation == "split":
            raise ValueError(
                f"data.truncation: split is for pretrain: {method.name} trains on a row as a "
                "whole; give right, drop or refuse"
            )
        if method.adapter != "full" and method.lora is None:
            method.lora = LoraSection()
        if method.name == "dpo" and method.beta is None:
            method.beta = 0.1
        if self.train.learning_rate is None:
            scale = 1 if method.adapter == "full" else 10
            self.train.learning_rate = scale * LEARNING_RATES[method.name]
        self.memory.setdefault("precision", "bf16")
        return self

    @field_validator("evaluate")
    @classmethod
    def _no_code(cls, value: Questions | None) -> Questions | None:
        """Refuses what only the one who runs a recipe may allow, who need not have written it."""
        if value is not None and value.confirm_run_unsafe_code:
            raise ValueError(
                "a recipe cannot allow tasks to run code of the model's; leave "
                "confirm_run_unsafe_code out, and run castor evaluate --confirm-run-unsafe-code "
                "after training"
            )
        return value

    @field_validator("memory", mode="before")
    @classmethod
    def _auto(cls, value: Any) -> Any:
        if value == "auto":
            return {}
        if not isinstance(value, dict):
            raise ValueError("give arguments of GeminiPlugin by name, or auto")
        return value

    @field_validator("memory")
    @classmethod
    def _memory(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Checks the settings as GeminiPlugin does; a size needs a unit."""
        numbers = {
            name: str(value[name]) for name in SIZES if type(value.get(name)) in (int, float)
        }
        check_settings(value | numbers)  # a text without a unit is refused
        check_paths(value)
        return value


def load(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Reads and checks a recipe.

    Relative paths in it start at the working directory, as those of a command line do.

    Args:
        path: The YAML file.
        overrides: Texts SECTION.NAME=VALUE, which replace what the file says. Values are YAML.

    Returns:
        The recipe with all defaults; paths that exist, and the output folder, are absolute.

    Raises:
        RecipeError: The file is no YAML, or a setting is unknown, has a wrong value or contradicts
            another one. The message has file, line, and the nearest known name.
        OSError: The file cannot be read.
    """
    text = Path(path).read_text(encoding="utf-8")
    tree = _Tree(str(path), text)
    for given in overrides:
        tree.override(given)
    try:
        recipe = Recipe.model_validate(tree.values)
    except ValidationError as error:
        raise tree.error(error) from None
    except (UsageError, TypeError, NotImplementedError) as error:  # pydantic passes them on
        raise RecipeError(f"{tree.place(('memory',), str(error))}: memory: {error}") from None
    template = recipe.data.chat_template
    if template is not None and not Path(template).is_file():
        where = tree.place(("data", "chat_template"))
        raise RecipeError(f"{where}: data.chat_template: there is no file {template}")
    _make_absolute(recipe)
    return recipe


def dump(recipe: Recipe) -> str:
    """Returns a recipe as YAML, with every default written out; `load` reads it."""
    document = recipe.model_dump(mode="json")
    for name in ("versions", "evaluate"):
        if not document[name]:
            del document[name]
    text: str = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    return text


def _make_absolute(recipe: Recipe) -> None:
    model, data = recipe.model, recipe.data
    model.path = _absolute(model.path)
    if model.tokenizer is not None:
        model.tokenizer = _absolute(model.tokenizer)
    if isinstance(data.train, str):
        data.train = _absolute(data.train)
    else:
        for source in data.train:
            source.path = _absolute(source.path)
    if isinstance(data.held_out, str):
        data.held_out = _absolute(data.held_out)
    if data.chat_template is not None:
        data.chat_template = _absolute(data.chat_template)
    if recipe.evaluate is not None and recipe.evaluate.include is not None:
        include = Path(_absolute(str(recipe.evaluate.include)))
        recipe.evaluate = replace(recipe.evaluate, include=include)
    recipe.output.dir = str(Path(recipe.output.dir).expanduser().absolute())


def _absolute(path: str) -> str:
    """Returns a path of something that exists as absolute; others may be names of the hub."""
    expanded = Path(path).expanduser()
    if expanded.exists():
        return str(expanded.absolute())
    # Megatron's data is named by the common stem of its two files.
    return str(expanded.absolute()) if Path(f"{expanded}.idx").exists() else path


class _Tree:
    """A YAML document, with the places of its settings: a line of the file, or an option."""

    def __init__(self, name: str, text: str) -> None:
        self._name = name
        self._places: dict[tuple[str, ...], str] = {(): f"{name}, line 1"}
        try:
            for path, line in _lines_of(yaml.compose(text, Loader=yaml.SafeLoader)):
                if path in self._places:
                    raise RecipeError(
                        f"{name}, line {line}: {path[-1]} is given a second time, after "
                        f"{self._places[path].removeprefix(f'{name}, ')}; give it once"
                    )
                self._places[path] = f"{name}, line {line}"
            values = yaml.safe_load(text)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            where = f", line {mark.line + 1}" if mark else ""
            what = " ".join(str(getattr(error, "problem", None) or error).split())
            raise RecipeError(f"{name}{where} is no YAML: {what}") from None
        except RecursionError:
            raise RecipeError(f"{name}: a setting holds itself, by an alias of YAML") from None
        if not isinstance(values, dict):
            raise RecipeError(
                f"{name} holds no settings; `castor init sft --model DIR --data FILE` writes a "
                "recipe that runs"
            )
        self.values: dict[str, Any] = values

    def override(self, given: str) -> None:
        """Replaces a setting by one of --set.

        Raises:
            RecipeError: The text is not SECTION.NAME=VALUE.
        """
        name, separator, text = given.partition("=")
        keys, option = tuple(name.split(".")), f"--set {given}"
        if not separator or not all(keys):
            raise RecipeError(f"{option}: give SECTION.NAME=VALUE, such as train.epochs=1")
        try:
            value, inner = yaml.safe_load(text), yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.YAMLError:
            value, inner = text, None
        place: Any = self.values
        for depth, key in enumerate(keys[:-1], 1):
            if place.get(key) is None or (key, place[key]) == ("memory", "auto"):
                place[key] = {}
                self._places[keys[:depth]] = option
            place = place[key]
            if not isinstance(place, dict):
                raise RecipeError(f"{option}: {key} holds no settings of its own")
        place[keys[-1]] = value
        self._places = {
            path: where for path, where in self._places.items() if path[: len(keys)] != keys
        }
        self._places |= {keys: option} | {keys + path: option for path, _ in _lines_of(inner)}

    def error(self, error: ValidationError) -> RecipeError:
        """Returns the first fault of a recipe as one sentence."""
        faults = error.errors()
        # A name that is misspelled is lacking too. A choice of types has a fault for each: the one
        # that went deepest says most.
        unknown = (fault for fault in faults if fault["type"] in _UNKNOWN)
        first = next(unknown, faults[0])["loc"][:2]
        fault = max((f for f in faults if f["loc"][:2] == first), key=lambda f: len(f["loc"]))
        keys = self._known(fault["loc"])
        if fault["type"] in _UNKNOWN:
            *section, name = keys
            known = _names_of(section)
            where = f"{'.'.join(section)} has" if section else "a recipe has"
            return RecipeError(
                f"{self.place(keys)}: {where} no setting {name!r}"
                f"{did_you_mean(name, known) or '; there are ' + ', '.join(known)}"
                f"{self._made_by_another()}"
            )
        name = ".".join(keys)
        if fault["type"] == "missing":
            lacking = ".".join(str(one) for one in fault["loc"])
            return RecipeError(f"{self.place(keys)}: {lacking} is missing; give it")
        message = fault["msg"].removeprefix("Value error, ")
        message = message[:1].lower() + message[1:] if fault["type"] != "value_error" else message
        place = self.place(keys, message)
        if not keys:  # a contradiction between settings, which the message names
            return RecipeError(f"{place}: {message}")
        if keys in _SPEAKING:
            return RecipeError(f"{place}: {name}: {message}")
        return RecipeError(f"{place}: {name} is {fault['input']!r}: {message}")

    def place(self, keys: Sequence[str], message: str = "") -> str:
        """Returns where a setting is: the option, or file and line.

        Args:
            keys: Names from the section down.
            message: A text that may name the setting further.
        """
        found = tuple(keys)
        if found in ((), *_SPEAKING):
            words = message.replace(":", " ").replace("'", " ").replace("=", " ").split()
            named = {".".join(path[len(found) :]): path for path in self._places if path > found}
            found = next((named[word] for word in words if word in named), found)
        while found not in self._places:
            found = found[:-1]
        return self._places[found]

    def _made_by_another(self) -> str:
        """Says that another castor wrote the document, where it did."""
        versions = self.values.get("versions")
        made = versions.get(_OWN_NAME) if isinstance(versions, dict) else None
        if made in (None, version(_OWN_NAME)):
            return ""
        return f" (castor {made} wrote the recipe, and {version(_OWN_NAME)} is installed)"

    def _known(self, loc: Sequence[str | int]) -> tuple[str, ...]:
        """Returns the part of pydantic's place that the document has, without names of types."""
        found: tuple[str, ...] = ()
        for key in map(str, loc):
            found += (key,) if (*found, key) in self._places else ()
        return found


def _lines_of(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yields path and line of each setting inside a node of YAML, sections too."""
    if isinstance(node, yaml.MappingNode):
        inner = [(key.value, key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        inner = [(str(at), value, value) for at, value in enumerate(node.value)]
    else:
        inner = []
    for name, mark, value in inner:
        yield (*path, name), mark.start_mark.line + 1
        yield from _lines_of(value, (*path, name))


def _names_of(section: Sequence[str]) -> list[str]:
    """Returns the names of the settings in a section."""
    kind: Any = Recipe
    for name in section:
        if name.isdecimal():
            continue
        annotation = kind.model_fields[name].annotation
        kinds = [annotation, *get_args(annotation)]
        kinds += [inner for one in kinds for inner in get_args(one)]
        kind = next(one for one in kinds if isinstance(one, type) and _is_section(one))
    return [field.name for field in fields(kind)] if is_dataclass(kind) else list(kind.model_fields)


def _is_section(kind: type) -> bool:
    return issubclass(kind, BaseModel) or is_dataclass(kind)
