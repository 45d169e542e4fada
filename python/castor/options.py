"""Options of sub-commands, which are fields of dataclasses: each is declared once."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.models import ParameterInfo

from castor.config import GeminiArguments, parse_bytes
from castor.config.declared import texts_of


@dataclass(frozen=True)
class Read:
    """Says in a field's Annotated how its value is read from one text of the command line.

    Attributes:
        text: Returns the value of a text.
    """

    text: Callable[[str], Any]


def read_size(option: str) -> Read:
    """Returns how the bytes of an option are read, such as "4MiB"."""
    return Read(partial(parse_bytes, name=option))


def from_fields(command: Callable[..., None]) -> Callable[..., None]:
    """Makes a sub-command of a function whose parameters are dataclasses, or options of their own.

    Each field of a dataclass becomes an option with its type and default. Its help is the string
    below the field. What an option has besides is in the field's Annotated: a typer.Option or
    typer.Argument, and `Read`, which a field with a default_factory needs. A flag that is off by
    default has one name.
    """
    hints = get_type_hints(command, include_extras=True)
    kinds = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    options = dict[str, inspect.Parameter]()
    for name, parameter in inspect.signature(command).parameters.items():
        if name in kinds:
            options |= _options_of(kinds[name])
        else:
            options[name] = parameter.replace(
                kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name]
            )

    @wraps(command)
    def run(**given: Any) -> None:
        made = {name: _made(kind, given) for name, kind in kinds.items()}
        command(**made, **given)

    run.__signature__ = inspect.Signature(list(options.values()))  # type: ignore[attr-defined]
    run.__annotations__ = {name: one.annotation for name, one in options.items()}
    return run


def _options_of(kind: Any) -> dict[str, inspect.Parameter]:
    hints, texts = get_type_hints(kind, include_extras=True), texts_of(kind)
    return {one.name: _option(one, hints[one.name], texts[one.name]) for one in fields(kind)}


def _option(field: Field[Any], hint: Any, text: str) -> inspect.Parameter:
    """Returns a field as a parameter of a function that typer reads."""
    marks = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    kind = get_args(hint)[0] if marks else hint
    required = field.default is MISSING and field.default_factory is MISSING
    default = field.default
    if any(isinstance(mark, Read) for mark in marks):
        kind, default = str if required else str | None, None
    if required:
        default = inspect.Parameter.empty
    flags = [f"--{field.name.replace('_', '-')}"] if kind is bool and default is False else []
    own = next((mark for mark in marks if isinstance(mark, ParameterInfo)), None)
    option: Any = typer.Option(*flags) if own is None else own
    option.help = option.help or text
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, option],
    )


def _made(kind: Any, given: dict[str, Any]) -> Any:
    """Takes the values of a dataclass's fields out of those of a command line."""
    hints = get_type_hints(kind, include_extras=True)
    values = {}
    for field in fields(kind):
        value = given.pop(field.name)
        read = next((mark for mark in get_args(hints[field.name]) if isinstance(mark, Read)), None)
        if read is None:
            values[field.name] = value
        elif value is not None:
            values[field.name] = read.text(value)
    return kind(**values)


def help_of(name: str) -> str:
    """Returns the help of an option: the first sentence of the argument's text."""
    return re.split(r"(?<=\.) ", texts_of(GeminiArguments)[name], maxsplit=1)[0]


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The arguments of GeminiPlugin that a command line gives."""

    device_memory: Annotated[str | None, typer.Option(help=help_of("device_memory"))] = None
    host_memory: Annotated[str | None, typer.Option(help=help_of("host_memory"))] = None
    device: Annotated[str | None, typer.Option(help=help_of("device"))] = None
    precision: Annotated[
        str | None,
        typer.Option(help=f"{help_of('precision')} Default: that of the script or the weights."),
    ] = None
    nvme: Annotated[
        list[str] | None, typer.Option(help=f"{help_of('nvme_path')} May be given several times.")
    ] = None
    config: Path | None = None
    """GeminiPlugin's arguments, JSON or YAML: a run's castor.json."""
    settings: Annotated[list[str] | None, typer.Option("--set")] = None
    """Another of its arguments: NAME=VALUE; may be given several times."""

    def arguments(self, **more: str | None) -> dict[str, Any] | None:
        """Returns GeminiPlugin's arguments from the file, the options, and NAME=VALUE.

        Args:
            more: Arguments with an option of their own besides; None: the option was not given.

        Returns:
            The arguments, whose values are not checked yet; None if nothing was given.

        Raises:
            UsageError: A setting cannot be read, is given twice, is a size without a unit, or is a
                path that does not exist.
            OSError: The file cannot be read.
        """
        from castor import launch

        nvme = self.nvme or []
        options = {
            "device_memory": self.device_memory, "host_memory": self.host_memory,
            "device": self.device, "precision": self.precision,
            "nvme_path": nvme[0] if len(nvme) == 1 else nvme or None,
        }  # fmt: skip
        settings = launch.read_settings(self.config, options | more, self.settings or [])
        launch.check_paths(settings or {})
        return settings


Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Replaces a recipe's setting: SECTION.NAME=VALUE, such as train.epochs=1; may be "
        "given several times.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class ModelPaths:
    """The folders of a trained model."""

    path: Annotated[Path, typer.Argument()]
    """A model folder, a folder of adapters, or a run (its last step)."""
    base: Path | None = None
    """Model folder of adapters. Default: the one that they name."""
    tokenizer: Path | None = None
    """Folder of the tokenizer. Default: the model's."""
