"""Optimizers: HybridAdam and Lion, and the steps of boosted optimizers."""

from castor.optim.hybrid_adam import HybridAdam
from castor.optim.lion import Lion

__all__ = ["HybridAdam", "Lion"]
