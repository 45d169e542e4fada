"""The policy of a boosted model for its blocks' activations, as an interface to the engine."""

from __future__ import annotations

from castor.runtime.report import BlockFigures


class BlockPolicy:
    """The policy that leaves activations as they are; see castor.activations.Blocks."""

    logit_rows = 0
    """Number of rows of logits that the budget has room for; 0: not known."""

    def explain(self, error: BaseException | None) -> None:
        """Adds advice to the device budget's error, with which a forward or a backward failed.

        Args:
            error: Error of the pass; None: it has not failed.
        """

    def figures(self) -> BlockFigures:
        """Returns the figures so far."""
        return BlockFigures()

    def step_ended(self) -> None:
        """Ends an optimizer step; later passes belong to the next one."""
