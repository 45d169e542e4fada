"""Chooses a plugin by the names of its arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from castor.plugins.arguments import NOT_YET, arguments_of
from castor.plugins.gemini import GeminiPlugin
from castor.plugins.hybrid import HybridParallelPlugin
from castor.plugins.machine import named_device


def plugin_of(arguments: Mapping[str, Any]) -> GeminiPlugin:
    """Makes a HybridParallelPlugin if one of its own arguments is given, else a GeminiPlugin.

    Raises:
        Exception: The plugin's class raises it; see there.
    """
    kind = HybridParallelPlugin if _HYBRID & arguments.keys() else GeminiPlugin
    return kind(**arguments)


def checked_plugin(arguments: Mapping[str, Any]) -> GeminiPlugin:
    """Checks GeminiPlugin's arguments as the class does, without taking memory or a GPU.

    Returns:
        A plugin whose device and budgets have not been chosen; it boosts nothing.

    Raises:
        Exception: GeminiPlugin raises it; see there.
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
"""Bytes of a budget that was not given."""
_HYBRID = arguments_of(HybridParallelPlugin) - arguments_of(GeminiPlugin)
PLUGIN_ARGUMENTS = arguments_of(HybridParallelPlugin) | NOT_YET.keys()
"""Names of all arguments that a plugin accepts, if only at the value that asks for nothing."""
