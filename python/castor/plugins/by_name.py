"""The plugin that arguments by name mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from castor.plugins.gemini import GeminiPlugin
from castor.plugins.hybrid import HybridParallelPlugin
from castor.plugins.machine import named_device
from castor.plugins.not_yet import NOT_YET, arguments_of


def plugin_of(arguments: Mapping[str, Any]) -> GeminiPlugin:
    """A HybridParallelPlugin where one of its own is among them, else a GeminiPlugin.

    Raises:
        As theirs.
    """
    kind = HybridParallelPlugin if _HYBRID & arguments.keys() else GeminiPlugin
    return kind(**arguments)


def checked_plugin(arguments: Mapping[str, Any]) -> GeminiPlugin:
    """Checks GeminiPlugin's arguments as it does, and takes nothing of the machine for that.

    Returns:
        A plugin whose device and budgets have not been chosen; it boosts nothing.

    Raises:
        As GeminiPlugin.
    """
    checked: Any = type(GeminiPlugin.__name__, (_Unplaced, GeminiPlugin), {})
    plugin: GeminiPlugin = checked(**arguments)
    return plugin


class _Unplaced:
    """Leaves the choice of a plugin's device and budgets to the process that will train."""

    def _place(
        self, device: str | torch.device | None, device_bytes: int | None, host_bytes: int | None
    ) -> tuple[torch.device, int, int]:
        return named_device(device), device_bytes or _SOME, host_bytes or _SOME


_SOME = 2**40
"""Bytes of a budget that nobody has named."""
_HYBRID = arguments_of(HybridParallelPlugin) - arguments_of(GeminiPlugin)
PLUGIN_ARGUMENTS = arguments_of(HybridParallelPlugin) | NOT_YET.keys()
"""All that a plugin knows, at least at the value that asks for nothing."""
