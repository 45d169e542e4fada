"""Ways to train: each plugin sets a model and its optimizer up for one."""

from castor.plugins.gemini import GeminiPlugin
from castor.plugins.hybrid import HybridParallelPlugin
from castor.plugins.low_level_zero import LowLevelZeroPlugin
from castor.plugins.protocol import Plugin
from castor.plugins.torch_ddp import TorchDDPPlugin
from castor.plugins.torch_fsdp import TorchFSDPPlugin

__all__ = [
    "GeminiPlugin",
    "HybridParallelPlugin",
    "LowLevelZeroPlugin",
    "Plugin",
    "TorchDDPPlugin",
    "TorchFSDPPlugin",
]
