"""Memory budgets that the models of one plugin share."""

from __future__ import annotations

import gc
import warnings
import weakref
from dataclasses import dataclass, replace

import torch

from castor import _C
from castor.config import GeminiConfig
from castor.distributed import ParallelGroups
from castor.errors import OutOfMemoryError
from castor.runtime.device import make_backend
from castor.runtime.report import size

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


# --- Divides a plugin's host memory where the system page-locks less of it than a model takes -----

_BEYOND_PAYLOADS = 16
"""One part in so many of what may be locked is left for the rounding of blocks to pages."""
_CHUNKS = 16
"""Regular chunks that locked memory holds: windows of parameters, gradients and states."""


@dataclass(frozen=True, kw_only=True)
class LockedPages:
    """Division of host memory into memory that is page-locked, and memory that is not."""

    limit: int
    """Bytes that the system page-locks."""
    pageable: int
    """Bytes that payloads may take in memory that is not page-locked; 0: they go to NVMe."""

    def divide(self, config: GeminiConfig) -> GeminiConfig:
        """Returns the settings with budgets of page-locked memory."""
        return replace(
            config,
            host_bytes=self.limit - self.limit // _BEYOND_PAYLOADS,
            chunk_bytes=config.chunk_bytes or self.limit // _CHUNKS,
        )


_found: weakref.WeakKeyDictionary[object, LockedPages] = weakref.WeakKeyDictionary()
"""By plugin, as its budgets."""


def locked_pages_of(plugin: object) -> LockedPages | None:
    """Returns the division of a plugin's host memory; None: no limit was met."""
    return _found.get(plugin)


def find_locked_pages(
    plugin: object,
    config: GeminiConfig,
    groups: ParallelGroups,
    error: OutOfMemoryError,
    *,
    stacklevel: int,
) -> LockedPages | None:
    """Tries how much memory the system page-locks, and divides the plugin's budgets.

    Args:
        plugin: The plugin, no model of which is boosted.
        config: Settings of the plugin.
        groups: Process groups of the ranks.
        error: Error of a boost.
        stacklevel: As warnings.warn counts, from the caller of this function.

    Returns:
        The division. None where the error stands: the system refused nothing, a model of the
        plugin is boosted, or data-parallel ranks, which have no parameters elsewhere, train it.
    """
    device = torch.device(config.device)
    refused = error.tier == "host" and error.budget != config.host_bytes
    if not refused or device.type == "cpu" or groups.dp or plugin in _found:
        return None
    limit = _C.lockable_bytes(make_backend(device, 0), config.host_bytes)
    if not _BEYOND_PAYLOADS <= limit < config.host_bytes:
        return None
    found = LockedPages(limit=limit, pageable=0 if config.nvme_paths else config.host_bytes - limit)
    if not replace_budgets(plugin, found.divide(config), nvme=found.pageable):
        return None
    _found[plugin] = found
    elsewhere = "on NVMe" if config.nvme_paths else "in memory that is not page-locked"
    warnings.warn(
        f"the system page-locks {size(limit)} of host memory for {device}, less than the model's "
        f"payloads take: the others are {elsewhere}, and reach the GPU through page-locked "
        "windows, which takes longer. Raise the limit (`ulimit -l`, a container's --ulimit "
        "memlock=-1, free memory)",
        RuntimeWarning,
        stacklevel=stacklevel + 1,
    )
    return found
