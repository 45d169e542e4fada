"""The plugin that arguments by name mean."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from castor.plugins.gemini import GeminiPlugin
from castor.plugins.hybrid import HybridParallelPlugin
from castor.plugins.not_yet import NOT_YET


def plugin_of(arguments: Mapping[str, Any]) -> GeminiPlugin:
    """A HybridParallelPlugin where one of its own is among them, else a GeminiPlugin.

    Raises:
        As theirs.
    """
    kind = HybridParallelPlugin if _HYBRID & arguments.keys() else GeminiPlugin
    return kind(**arguments)


def _names(kind: type) -> frozenset[str]:
    parameters = inspect.signature(kind).parameters.values()
    return frozenset(one.name for one in parameters if one.kind is one.KEYWORD_ONLY)


_HYBRID = _names(HybridParallelPlugin)
PLUGIN_ARGUMENTS = _names(GeminiPlugin) | _HYBRID | NOT_YET.keys()
"""All that a plugin knows, at least at the value that asks for nothing."""
