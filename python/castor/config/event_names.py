"""Names of the events of a trace, and of causes of transfers, which castor._C gives."""

from __future__ import annotations

from castor import _C

EVENT_KINDS = _C.NAMES["event_kind"]
"""Kinds of the events of a step; traces and timelines have positions in it."""
FORWARD_ENTER, FORWARD_EXIT, BACKWARD_ENTER, GRAD_READY = map(
    EVENT_KINDS.index, ("forward_enter", "forward_exit", "backward_enter", "grad_ready")
)
TRANSFER_CAUSES = _C.NAMES["transfer_cause"]
