"""Messages about gradients that are not finite."""

from __future__ import annotations

import warnings

from castor.errors import NonFiniteGradientError


def nonfinite_error(name: str, norm: float | None) -> NonFiniteGradientError:
    """Makes the error of a step that nonfinite="raise" refuses.

    Args:
        name: Name of a parameter with a non-finite gradient.
        norm: L2 norm of all gradients; None: it was not measured.
    """
    return NonFiniteGradientError(
        f"the gradient of parameter '{name}' is not finite (total norm {norm}); no weight was "
        "changed. Lower the learning rate, check the batch, or skip such steps with "
        "nonfinite='skip'"
    )


def warn_of_skip(name: str, what_next: str = "", *, stacklevel: int) -> None:
    """Warns of the first step that is skipped.

    Args:
        name: Name of a parameter with a non-finite gradient.
        what_next: Further consequences, appended to the message.
        stacklevel: As warnings.warn counts, from the caller of this function.
    """
    warnings.warn(
        f"castor skipped an optimizer step: the gradient of parameter '{name}' is not "
        f"finite{what_next}. Further skips are counted in booster.report().skipped_steps without "
        "a warning",
        RuntimeWarning,
        stacklevel=stacklevel + 1,
    )
