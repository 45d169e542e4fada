"""Recipes: from data to a served model. Needs the libraries of castor-torch[recipes]."""

from __future__ import annotations

import importlib.util


def require(command: str, *libraries: str) -> None:
    """Checks that the libraries of a command are installed, without importing them.

    Args:
        command: The command, such as "castor train".
        libraries: Names that it imports.

    Raises:
        ModuleNotFoundError: Some are lacking.
    """
    lacking = [name for name in libraries if importlib.util.find_spec(name) is None]
    if lacking:
        raise ModuleNotFoundError(
            f"{command} needs {' and '.join(lacking)}: pip install 'castor-torch[recipes]'",
            name=lacking[0],
        )
