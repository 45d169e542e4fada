"""castor: trains unmodified PyTorch models that do not fit the device."""

import torch  # noqa: F401  its libraries must be loaded before castor._C

from castor import report
from castor._C import __version__
from castor.booster import Booster
from castor.errors import Error, IoError, NonFiniteGradientError, OutOfMemoryError, UsageError
from castor.optim import HybridAdam
from castor.plugins import GeminiPlugin
from castor.runtime.report import MemoryReport, MemoryUse

__all__ = [
    "Booster",
    "Error",
    "GeminiPlugin",
    "HybridAdam",
    "IoError",
    "MemoryReport",
    "MemoryUse",
    "NonFiniteGradientError",
    "OutOfMemoryError",
    "UsageError",
    "__version__",
    "report",
]
