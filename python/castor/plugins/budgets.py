"""The budgets that the models of one plugin take from together."""

from __future__ import annotations

import gc
import weakref

from castor import _C
from castor.config import GeminiConfig

_ALL_OF_THE_DISKS = 2**62
"""More than any disk holds."""
_budgets: weakref.WeakKeyDictionary[object, _C.SharedBudgets] = weakref.WeakKeyDictionary()
"""By plugin. Not in it: a copy of it, also in another process, has budgets of its own."""


def nvme_bytes(config: GeminiConfig) -> int:
    """Returns the bytes of NVMe that a plugin's models may take."""
    return _ALL_OF_THE_DISKS if config.nvme_bytes is None else config.nvme_bytes


def budgets_of(plugin: object, config: GeminiConfig) -> _C.SharedBudgets:
    """Returns the budgets of a plugin, for one more model.

    Args:
        plugin: Whose models share them.
        config: Its settings; their sizes are those that it had for its first model.
    """
    budgets = _budgets.get(plugin)
    if budgets is None:
        budgets = _budgets[plugin] = _C.SharedBudgets(
            device_bytes=config.device_bytes,
            host_bytes=config.host_bytes,
            nvme_bytes=nvme_bytes(config),
        )
    elif budgets.num_models:
        gc.collect()  # a model that is gone, but for cycles in it, gives its memory back
    return budgets
