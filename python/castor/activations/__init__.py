"""Activations: the memory that a step needs beside the chunks, and ways to need less of it."""

from castor.activations.blocks import Blocks
from castor.activations.functions import tiled_vocab_parallel_loss
from castor.activations.fused_heads import fit_fused_heads
from castor.activations.output_embedding import DeferringForward, defer_logits, output_embedding

__all__ = [
    "Blocks",
    "DeferringForward",
    "defer_logits",
    "fit_fused_heads",
    "output_embedding",
    "tiled_vocab_parallel_loss",
]
