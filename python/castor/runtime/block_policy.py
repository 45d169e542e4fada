"""What a boosted model does about the activations of its blocks, as the engine sees it."""

from __future__ import annotations

from castor.runtime.report import BlockFigures


class BlockPolicy:
    """Leaves them as they are; see castor.activations.Blocks."""

    def figures(self) -> BlockFigures:
        """As they are now."""
        return BlockFigures()

    def step_ended(self) -> None:
        """An optimizer step is over, and what follows is the next one's."""
