"""castor: trains unmodified PyTorch models that do not fit the device."""

# First: it loads castor._C, with torch's libraries before it, and says what is wrong if it cannot.
from castor import _loader  # noqa: F401

# isort: split
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

ZeroInitContext = LazyInitContext
"""The older name, of Colossal-AI's first versions."""

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
