"""Recipes: from data to a served model. Needs the libraries of castor-torch[recipes]."""

from __future__ import annotations

import importlib.util


def require(what: str, *libraries: str, remedy: str = "'castor-torch[recipes]'") -> None:
    """Checks that libraries are installed, without importing them.

    Args:
        what: The command or setting that needs them, such as "castor train".
        libraries: Names that it imports.
        remedy: Argument of `pip install`, and what else to do.

    Raises:
        ModuleNotFoundError: Some are lacking.
    """
    lacking = [name for name in libraries if importlib.util.find_spec(name) is None]
    if lacking:
        raise ModuleNotFoundError(
            f"{what} needs {' and '.join(lacking)}: pip install {remedy}", name=lacking[0]
        )
