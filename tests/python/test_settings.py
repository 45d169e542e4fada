"""Settings that are declared once: all that follows from the fields of a dataclass."""

import inspect
import pydoc
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer

import castor
from castor import cli
from castor.config import GeminiArguments, GeminiConfig
from castor.config.declared import (
    Declared,
    at_least,
    documented,
    texts_of,
    types_of,
)
from castor.config.settings import SIZES
from castor.options import help_of


@dataclass(frozen=True, kw_only=True)
class Base(Declared):
    steps: Annotated[int, at_least(1)] | None = None
    """Number of steps. Default: all."""


@dataclass(frozen=True, kw_only=True)
class Settings(Base):
    rate: float = 0.5
    """Share of rows that a
    step takes."""
    mode: Literal["fast", 1] = "fast"
    """Way to take them."""
    shuffle: bool = False
    """Whether they come in random order."""
    others: Sequence[str] | None = None


def test_own_fields_come_before_those_of_bases() -> None:
    assert list(types_of(Settings)) == ["rate", "mode", "shuffle", "others", "steps"]
    assert list(texts_of(Settings).values()) == [
        "Share of rows that a step takes.",
        "Way to take them.",
        "Whether they come in random order.",
        "",
        "Number of steps. Default: all.",
    ]


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"steps": 0}, ValueError, "steps is 0; it must be at least 1"),
        ({"steps": True}, TypeError, "steps is True; give an int"),
        ({"steps": 1.5}, TypeError, "steps is 1.5; give an int"),
        ({"rate": "1"}, TypeError, "rate is '1'; give a number"),
        ({"rate": None}, TypeError, "rate is None; give a number"),
        ({"shuffle": 1}, TypeError, "shuffle is 1; give True or False"),
        ({"mode": "slow"}, ValueError, "mode is 'slow'; choose one of 'fast', 1"),
        ({"mode": "1"}, TypeError, "mode is '1'; choose one of 'fast', 1"),
        ({"mode": True}, TypeError, "mode is True; choose one of 'fast', 1"),
    ],
)
def test_values_are_checked_by_the_types(
    given: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error) as raised:
        Settings(**given)
    assert str(raised.value) == said
    Settings(steps=3, rate=1, mode=1, shuffle=True, others=["any"])


def test_a_docstring_lists_the_fields_in_place_of_one_line() -> None:
    @documented(Settings, besides=Base)
    class Takes:
        """Takes settings.

        Args:
        **arguments: The fields.
        """

    assert "        rate: Share of rows that a step takes.\n" in (Takes.__doc__ or "")
    assert "steps" not in (Takes.__doc__ or "")
    assert "**arguments" not in (Takes.__doc__ or "")


def test_every_argument_of_the_plugin_has_its_default_and_its_text() -> None:
    shown = inspect.signature(castor.GeminiPlugin).parameters
    declared = {field.name: field.default for field in fields(GeminiArguments)}
    assert {name: one.default for name, one in shown.items() if name != "not_yet"} == declared
    assert len(declared) == 45
    help_text = " ".join(pydoc.render_doc(castor.GeminiPlugin, renderer=pydoc.plaintext).split())
    for name, text in texts_of(GeminiArguments).items():
        assert text
        assert text.split()[0] in help_text
        assert f"{name}: {' '.join(text.split()[:5])}" in help_text.replace(" | ", " ")


def test_settings_and_arguments_share_only_what_means_the_same() -> None:
    both = types_of(GeminiConfig).keys() & types_of(GeminiArguments).keys()
    assert not {"device_memory", "host_memory", "nvme_path", "nvme_memory"} & both
    texts = texts_of(GeminiArguments)
    assert [
        n
        for n in both
        if n in GeminiConfig.__annotations__ and texts_of(GeminiConfig)[n] == texts[n]
    ] == []


def test_without_sources_there_are_no_texts_and_castor_works(tmp_path: Path) -> None:
    code = (
        "import inspect\n"
        "read = inspect.getsource\n"
        "def missing(module):\n"
        "    if module.__name__.startswith('castor'): raise OSError('no source')\n"
        "    return read(module)\n"
        "inspect.getsource = missing\n"
        "import castor\n"
        "print(castor.GeminiPlugin(device='cpu', device_memory='1GiB').config.device_bytes)\n"
    )
    command = [sys.executable, "-OO", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.split() == [str(2**30)], done.stderr


@pytest.mark.parametrize("command", ["run", "chat", "evaluate", "serve"])
def test_options_of_commands_say_what_the_arguments_do(command: str) -> None:
    options: Any = typer.main.get_command(cli.app).commands[command].params  # type: ignore[attr-defined]
    helps = {option.name.replace("nvme", "nvme_path"): option.help for option in options}
    shared = [name for name in types_of(GeminiArguments) if name in helps and name != "seed"]
    assert {"device_memory", "host_memory", "device", "precision", "nvme_path"} <= set(shared)
    assert help_of("max_norm") == "L2 norm to which step clips gradients; 0: no clipping."
    for name in shared:
        assert helps[name].startswith(help_of(name))


def test_sizes_are_the_arguments_that_a_unit_belongs_to() -> None:
    assert set(SIZES) == {
        *("device_memory", "host_memory", "nvme_memory", "chunk_bytes", "link_bandwidth")
    }
