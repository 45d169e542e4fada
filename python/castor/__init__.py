"""castor: trains unmodified PyTorch models that do not fit the device.

`import castor` loads torch and castor._C, and says what is wrong if it cannot. Only the process of
the `castor` command does not: a sub-command imports what it needs when it runs.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from castor import report
    from castor._C import __version__
    from castor.booster import Booster, booster_of
    from castor.checkpoint import CheckpointInfo
    from castor.data import AsyncLoader
    from castor.errors import (
        CheckpointError,
        CorruptionError,
        Error,
        IoError,
        NonFiniteGradientError,
        OutOfMemoryError,
        UsageError,
    )
    from castor.lazy import LazyInitContext
    from castor.lazy import LazyInitContext as ZeroInitContext
    from castor.one_call import Config, accelerate
    from castor.optim import HybridAdam
    from castor.plugins import (
        GeminiPlugin,
        HybridParallelPlugin,
        LowLevelZeroPlugin,
        TorchDDPPlugin,
        TorchFSDPPlugin,
    )
    from castor.runtime.ranks import launch_from_torch
    from castor.runtime.report import MemoryReport, MemoryUse, TorchReport

__all__ = [
    "AsyncLoader",
    "Booster",
    "CheckpointError",
    "CheckpointInfo",
    "Config",
    "CorruptionError",
    "Error",
    "GeminiPlugin",
    "HybridAdam",
    "HybridParallelPlugin",
    "IoError",
    "LazyInitContext",
    "LowLevelZeroPlugin",
    "MemoryReport",
    "MemoryUse",
    "NonFiniteGradientError",
    "OutOfMemoryError",
    "TorchDDPPlugin",
    "TorchFSDPPlugin",
    "TorchReport",
    "UsageError",
    "ZeroInitContext",
    "__version__",
    "accelerate",
    "booster_of",
    "launch_from_torch",
    "report",
]

_PLACES = {
    "castor._C": ("__version__",),
    "castor.booster": ("Booster", "booster_of"),
    "castor.checkpoint": ("CheckpointInfo",),
    "castor.data": ("AsyncLoader",),
    "castor.errors": (
        *("CheckpointError", "CorruptionError", "Error", "IoError", "NonFiniteGradientError"),
        *("OutOfMemoryError", "UsageError"),
    ),
    "castor.lazy": ("LazyInitContext",),
    "castor.one_call": ("Config", "accelerate"),
    "castor.optim": ("HybridAdam",),
    "castor.plugins": (
        *("GeminiPlugin", "HybridParallelPlugin", "LowLevelZeroPlugin", "TorchDDPPlugin"),
        "TorchFSDPPlugin",
    ),
    "castor.runtime.ranks": ("launch_from_torch",),
    "castor.runtime.report": ("MemoryReport", "MemoryUse", "TorchReport"),
}
"""The module of each public name."""
_MODULE_OF = {name: module for module, names in _PLACES.items() for name in names}
_MODULES = {"_C": "castor._C", "report": "castor.report"}
_OTHER_NAMES = {"ZeroInitContext": "LazyInitContext"}
"""Names of Colossal-AI's first versions."""


def __getattr__(name: str) -> Any:
    """Imports a public name when it is asked for first; castor._C after torch's libraries."""
    known = _OTHER_NAMES.get(name, name)
    if known not in _MODULES and known not in _MODULE_OF:
        raise AttributeError(f"module 'castor' has no attribute {name!r}")
    importlib.import_module("castor._loader")
    if known in _MODULES:
        return importlib.import_module(_MODULES[known])
    value = globals()[name] = getattr(importlib.import_module(_MODULE_OF[known]), known)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _serves_the_command() -> bool:
    """Whether this process is the `castor` command, or `python -m castor`."""
    words = sys.orig_argv
    if sys.argv[:1] == ["-m"]:  # while Python looks for the module
        return words[words.index("-m") + 1 :][:1] == ["castor"] if "-m" in words else False
    return bool(sys.argv) and Path(sys.argv[0]).name == "castor"


def _import_all() -> None:
    for name in __all__:
        __getattr__(name)
    from castor.report.of_run import follow_run

    follow_run()


if not _serves_the_command():
    _import_all()
