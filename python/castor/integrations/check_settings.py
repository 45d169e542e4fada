"""Checks the settings of `castor run` before anything of the script runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from castor.errors import UsageError
from castor.integrations.common import check_plugin
from castor.plugins.by_name import checked_plugin

_CLIPS = "the script's loop may clip"


def check_settings(settings: Mapping[str, Any]) -> None:
    """Checks what GeminiPlugin and the loops of frameworks check, without a device or a model.

    Args:
        settings: GeminiPlugin's arguments. A script may say the precision where they do not.

    Raises:
        UsageError: A name does not exist, a value has the wrong type, or a loop does the same.
        ValueError: A value is out of range, or two contradict each other.
        NotImplementedError: An argument asks for what this version lacks.
    """
    unsaid: dict[str, Any] = {} if "precision" in settings else {"precision": "bf16"}
    if "device" not in settings and "link_bandwidth" in settings:
        unsaid["device"] = "cpu"  # as such a script says itself
    try:
        plugin = checked_plugin({**unsaid, **settings})
    except TypeError as error:
        raise UsageError(str(error)) from error
    check_plugin(plugin, _CLIPS)
