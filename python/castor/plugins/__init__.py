"""Ways to train: each plugin sets a model and its optimizer up for one."""

from castor.plugins.gemini import GeminiPlugin

__all__ = ["GeminiPlugin"]
