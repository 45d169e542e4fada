"""The policy of a boosted model for its blocks' activations, as the engine sees it."""

from __future__ import annotations

from castor.runtime.report import BlockFigures


class BlockPolicy:
    """Leaves them as they are; see castor.activations.Blocks."""

    logit_rows = 0
    """So many rows of logits at once are what the budget has room for; 0: nobody has looked."""

    def explain(self, error: BaseException | None) -> None:
        """A forward or a backward has failed: an error of the device's budget says what would do.

        Args:
            error: Why; None: it has not failed.
        """

    def figures(self) -> BlockFigures:
        """The figures so far."""
        return BlockFigures()

    def step_ended(self) -> None:
        """An optimizer step is over, and what follows is the next one's."""
