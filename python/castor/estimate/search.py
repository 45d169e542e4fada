"""Finds the largest of what fits."""

from __future__ import annotations

from collections.abc import Callable


def largest(
    needed: Callable[[int], int],
    budget: int,
    *,
    fixed: int,
    start: int,
    most: int,
    least: int = 1,
) -> int:
    """The largest number in [least, most] that needs at most `budget`; 0 if `least` needs more.

    It was asked what that number needs, and the next one, if there is one.

    Args:
        needed: By a number. It grows with the number, nearly in proportion: what it needs twice
            gives the next guess, and every sixth guess halves the interval, so that a curve cannot
            make the search long.
        budget: What there is.
        fixed: About what 0 would need, for the second guess.
        start: The first guess.
        most: The largest number.
        least: The smallest number.
    """
    low, high = least - 1, most + 1  # low fits, high does not
    last = 0, fixed
    guess, asked = min(start, most), 0
    while high - low > 1:
        need = needed(guess)
        asked += 1
        if need <= budget:
            low = guess
        else:
            high = guess
        (before, needed_before), last = last, (guess, need)
        slope = (need - needed_before) / (guess - before)
        if asked % 6 == 0 or slope <= 0:
            guess = 2 * low if high > most else (low + high) // 2
        else:
            guess += int((budget - need) / slope)
        # The first neighbour of a bound that fits or does not ends the search.
        guess = max(low + 1, min(guess, high - 1))
    return low if low >= least else 0
