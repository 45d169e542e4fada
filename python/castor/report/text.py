"""The report as text, for a terminal or a log."""

from __future__ import annotations

from torch import nn

from castor.booster import Booster
from castor.report.source import source_of


def summary(target: Booster | nn.Module, *, width: int = 100) -> str:
    """Describes the model's memory and time so far, and the waits of the last step.

    Args:
        target: A Booster (the model it boosted last) or a boosted model.
        width: Columns of the text, at least 40.

    Returns:
        Several lines, without colours.

    Raises:
        UsageError: Nothing is boosted, or no step has finished.
        ValueError: `width` is below 40.
    """
    if width < 40:
        raise ValueError(f"width is {width}; a summary needs at least 40 columns")
    source = source_of(target)
    from castor.report.tables import render  # rich takes 20 ms, and few imports of castor need it

    return render(source, width)
