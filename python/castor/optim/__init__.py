"""Optimizers: HybridAdam, and the step of boosted ones."""

from castor.optim.hybrid_adam import HybridAdam

__all__ = ["HybridAdam"]
