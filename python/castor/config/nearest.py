"""Suggests the known name that an unknown one probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns ": did you mean 'OTHER'?", or nothing where no known name is like the given one.

    Args:
        name: An unknown name.
        known: The names that there are.
    """
    alike = difflib.get_close_matches(name.replace("-", "_").lower(), list(known), n=1)
    return f": did you mean {alike[0]!r}?" if alike else ""
