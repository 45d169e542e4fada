"""Divides a plugin's host memory where the system page-locks less of it than a model takes."""

from __future__ import annotations

import warnings
import weakref
from dataclasses import dataclass, replace

import torch

from castor import _C
from castor.config import GeminiConfig
from castor.distributed import ParallelGroups
from castor.errors import OutOfMemoryError
from castor.plugins.budgets import replace_budgets
from castor.runtime.device import make_backend
from castor.runtime.report import size

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
