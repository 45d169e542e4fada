"""castor: trains unmodified PyTorch models that do not fit the device."""

# First: it loads castor._C, with torch's libraries before it, and says what is wrong if it cannot.
from castor import _loader  # noqa: F401

# isort: split
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
]
