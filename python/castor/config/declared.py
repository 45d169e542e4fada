"""Settings that are declared once, as fields of a frozen dataclass.

A field's type says which values it takes. Annotated adds checks: functions of a value and its name.
The string below a field is its text, which IDEs and Sphinx show as well.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
import textwrap
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Class = TypeVar("Class", bound=type)

_LISTED = re.compile(r"^ +\*\*arguments: .*$", re.MULTILINE)
"""Line of a docstring that `documented` replaces."""


@functools.cache
def types_of(kind: type) -> Mapping[str, Any]:
    """Returns the types of a dataclass's fields, with their checks: its own fields come first."""
    known = hints_of(kind, include_extras=True)
    return {name: known[name] for name in names_of(kind)}


def hints_of(kind: type, *, include_extras: bool = False) -> dict[str, Any]:
    """Returns typing.get_type_hints of a class of settings, whose module does not import torch."""
    import torch

    named = {"torch": torch, "nn": torch.nn}
    return get_type_hints(kind, localns=named, include_extras=include_extras)


def names_of(kind: type) -> dict[str, str]:
    """Returns the types of a dataclass's fields as the source has them, in the order of types_of.

    Nothing is imported for it.
    """
    found: dict[str, str] = {}
    for base in kind.__mro__:
        for name, written in inspect.get_annotations(base).items():
            found.setdefault(name, written)
    return found


@functools.cache
def texts_of(kind: type) -> Mapping[str, str]:
    """Returns the texts of a dataclass's fields, each on one line, in the order of `types_of`.

    They are read from the sources; an application that was frozen without those has none.
    """
    texts = dict.fromkeys(names_of(kind), "")
    for base in filter(is_dataclass, reversed(kind.__mro__)):
        for field, text in pairwise(_classes_of(base.__module__).get(base.__name__, [])):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                    value=ast.Constant(value=str(said))
                ):
                    texts[name] = " ".join(said.split())
    return texts


@functools.cache
def _classes_of(module: str) -> Mapping[str, list[ast.stmt]]:
    try:
        source = ast.parse(inspect.getsource(sys.modules[module]))
    except OSError:
        return {}
    return {node.name: node.body for node in source.body if isinstance(node, ast.ClassDef)}


def documented(kind: type, *, besides: type = object) -> Callable[[Class], Class]:
    """Makes the docstring of a class list the fields of a dataclass as arguments.

    Args:
        kind: Dataclass whose texts replace the line that begins with "**arguments:".
        besides: Class whose fields are left out.
    """

    def list_arguments(target: Class) -> Class:
        listed = [
            textwrap.fill(
                f"{name}: {text}",
                width=100,
                initial_indent=8 * " ",
                subsequent_indent=12 * " ",
                break_on_hyphens=False,
            )
            for name, text in texts_of(kind).items()
            if name not in names_of(besides)
        ]
        if target.__doc__ is not None:  # None: python -OO
            target.__doc__ = _LISTED.sub(lambda _: "\n".join(listed), target.__doc__)
        return target

    return list_arguments


def values_of(settings: object, kind: type) -> dict[str, Any]:
    """Returns those settings that are fields of `kind`, by name."""
    return {name: getattr(settings, name) for name in names_of(kind)}


@dataclass(frozen=True, kw_only=True)
class Declared:
    """Base of dataclasses whose fields are settings: each must have a value of its type."""

    def __post_init__(self) -> None:
        """Raises TypeError or ValueError, naming the setting, where a value is wrong."""
        kind: type = type(self)
        for name, declared in types_of(kind).items():
            _check(getattr(self, name), name, declared)


def _check(value: Any, name: str, kind: Any) -> None:
    kinds = [one for one in get_args(kind) if one is not type(None)]
    if get_origin(kind) in (Union, types.UnionType):
        if len(kinds) == 1 and value is not None:
            _check(value, name, kinds[0])
    elif get_origin(kind) is Annotated:
        _check(value, name, kinds[0])
        for check in kinds[1:]:
            check(value, name)
    elif get_origin(kind) is Literal:
        _check_choice(value, name, kinds)
    elif kind in _WORDS and (
        not isinstance(value, (int, float) if kind is float else kind)
        or isinstance(value, bool) != (kind is bool)
    ):
        raise TypeError(f"{name} is {value!r}; give {_WORDS[kind]}")


_WORDS = {bool: "True or False", int: "an int", float: "a number", str: "a string"}


def _check_choice(value: object, name: str, choices: list[Any]) -> None:
    if any(type(value) is type(choice) and value == choice for choice in choices):
        return
    mistyped = type(value) not in map(type, choices) or str(value) in map(str, choices)
    error = TypeError if mistyped else ValueError
    raise error(f"{name} is {value!r}; choose one of {', '.join(map(repr, choices))}")


def at_least(minimum: float) -> Callable[[Any, str], None]:
    """Returns a check of a number's least value."""

    def check(value: Any, name: str) -> None:
        if not value >= minimum:
            raise ValueError(f"{name} is {value}; it must be at least {minimum}")

    return check


def check_fraction(value: Any, name: str) -> None:
    """Raises ValueError unless a number lies in [0, 1]."""
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} is {value}; it must lie in [0, 1]")
