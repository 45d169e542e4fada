"""Finds the largest number whose need fits a budget."""

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
    """Returns the largest number in [least, most] that needs at most `budget`; 0: none does.

    `needed` has been called with that number, and with the next one if that is in the interval.

    Args:
        needed: Gives the need of a number. It must grow with the number, nearly in proportion. The
            last two needs give the next guess by a straight line. Every sixth guess halves the
            interval, so that the search stays short on a curve.
        budget: The budget.
        fixed: About the need of 0, for the second guess.
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
        # The search ends once neighbours are known to fit and not to fit.
        guess = max(low + 1, min(guess, high - 1))
    return low if low >= least else 0
