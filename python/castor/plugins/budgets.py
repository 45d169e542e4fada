"""Memory budgets that the models of one plugin share."""

from __future__ import annotations

import gc
import weakref

from castor import _C
from castor.config import GeminiConfig

_ALL_OF_THE_DISKS = 2**62
"""More than any disk holds."""
_budgets: weakref.WeakKeyDictionary[object, _C.SharedBudgets] = weakref.WeakKeyDictionary()
"""Budgets by plugin. The plugin does not hold them: a copy of it, also one in another process, has
budgets of its own."""


def nvme_bytes(config: GeminiConfig) -> int:
    """Returns the bytes of NVMe that a plugin's models may take."""
    return _ALL_OF_THE_DISKS if config.nvme_bytes is None else config.nvme_bytes


def budgets_of(plugin: object, config: GeminiConfig) -> _C.SharedBudgets:
    """Returns a plugin's budgets, for one more of its models.

    Args:
        plugin: Plugin whose models share the budgets.
        config: Settings of the plugin; the sizes of the first call count for all later models.
    """
    budgets = _budgets.get(plugin)
    if budgets is None:
        budgets = _budgets[plugin] = _C.SharedBudgets(
            device_bytes=config.device_bytes,
            host_bytes=config.host_bytes,
            nvme_bytes=nvme_bytes(config),
        )
    elif budgets.num_models:
        gc.collect()  # frees the memory of models that only reference cycles keep alive
    return budgets


def replace_budgets(plugin: object, config: GeminiConfig, *, nvme: int) -> bool:
    """Gives a plugin other budgets.

    Args:
        plugin: Plugin whose models share the budgets.
        config: Settings with the sizes.
        nvme: Bytes of payloads outside page-locked memory; 0: those of the settings' NVMe.

    Returns:
        False where a model has taken of the budgets, and nothing has changed.
    """
    budgets = _budgets.get(plugin)
    if budgets is not None and budgets.num_models:
        return False
    _budgets[plugin] = _C.SharedBudgets(
        device_bytes=config.device_bytes,
        host_bytes=config.host_bytes,
        nvme_bytes=nvme or nvme_bytes(config),
    )
    return True
