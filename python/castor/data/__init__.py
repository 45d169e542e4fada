"""Batches on their way from a data loader to a boosted model."""

from castor.data.async_loader import AsyncLoader

__all__ = ["AsyncLoader"]
