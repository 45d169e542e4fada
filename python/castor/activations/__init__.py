"""What a step keeps on the device beside the chunks, and how it is made less."""

from castor.activations.blocks import Blocks
from castor.activations.output_embedding import defer_logits, output_embedding

__all__ = ["Blocks", "defer_logits", "output_embedding"]
