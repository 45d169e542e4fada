"""Data of recipes: rows of many formats become token ids, labels and packed rows."""

from typing import Final

IGNORED: Final = -100
"""Label of tokens that the loss does not count."""
