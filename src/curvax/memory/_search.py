"""The largest size that fits, found with few questions; in plain Python.

What a program needs is close to affine in its batch size, so a line through two sizes says where
the budget is met. Asking there gives a third point, and usually the answer. Where the line lies,
the search goes on between what fits and what does not: by the line through these two at first, and
by cutting the interval in two when that does not narrow it down.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence

__all__ = ["largest_that_fits"]

CLOSE = 1.05
"""A size that fits will do if one larger by this factor does not, as far as is known."""

MARGIN = 0.005
"""How far below the answer of a line to ask: a size just above the budget is a question wasted."""

TRUST = 0.97
"""A line that meets the budget so close below a size is not taken to exclude it."""

LINES = 4
"""After so many questions lines are no longer believed."""


def largest_that_fits(
    measure: Callable[[int], int], sizes: Sequence[int], budget: int
) -> int | None:
    """A size of `sizes` with `measure(size) <= budget` where nothing much larger fits.

    `sizes` are ascending. The answer is None if nothing that was tried fits; the smallest was.
    `measure` is asked about each size once at most.
    """
    needs: dict[int, int] = {}
    guess: int | None = None
    for size in _probes(sizes):
        needs[size] = measure(size)
    while (guess := _next(needs, sizes, budget)) is not None:
        needs[guess] = measure(guess)
    return max((size for size, need in needs.items() if need <= budget), default=None)


def _probes(sizes: Sequence[int]) -> Sequence[int]:
    """Two sizes to begin with: small, but not one by one, which programs are special for."""
    last = sizes[-1]
    small, large = (
        sizes[min(bisect_left(sizes, max(least, last // parts)), len(sizes) - 1)]
        for least, parts in ((2, 64), (4, 8))
    )
    return (small, large) if small < large else (large,)


def _next(needs: Mapping[int, int], sizes: Sequence[int], budget: int) -> int | None:
    """What to ask next, or None if enough is known."""
    fitting = max((size for size, need in needs.items() if need <= budget), default=0)
    too_large = min((size for size in needs if size > fitting), default=sizes[-1] + 1)
    first, end = bisect_right(sizes, fitting), bisect_left(sizes, too_large)
    if first == end or (fitting and too_large <= CLOSE * fitting):
        return None
    meetings = _meetings(needs, budget, fitting) if len(needs) <= LINES else ()
    if not meetings:
        wanted = math.sqrt(max(1, fitting) * too_large)
    elif fitting and max(meetings) < max(sizes[first] * TRUST, CLOSE * fitting):
        # Two points are always on a line. And between a size that fits and one that does not, needs
        # may stay below it: what says that this is all has to come from smaller sizes as well.
        if len(needs) > 2 and min(needs) < fitting:
            return None
        wanted = CLOSE * fitting
    else:
        nearest = meetings[-1]
        wanted = nearest * (1 - MARGIN) if nearest > 1 / MARGIN else nearest
    return sizes[min(max(bisect_right(sizes, wanted) - 1, first), end - 1)]


def _meetings(needs: Mapping[int, int], budget: int, fitting: int) -> Sequence[float]:
    """Where lines through two known points, on either side of what fits, meet the budget.

    The last is the best guess: if it can be, from the points on both sides of the budget.
    """
    known = sorted(needs)
    here = known.index(fitting) if fitting else 0
    pairs = [(i, i + 1) for i in (here - 1, here) if 0 <= i < len(known) - 1]
    return [_meeting(needs, known[left], known[right], budget) for left, right in pairs]


def _meeting(needs: Mapping[int, int], left: int, right: int, budget: int) -> float:
    slope = (needs[right] - needs[left]) / (right - left)
    if slope <= 0:
        return math.inf if needs[right] <= budget else 0.0
    return left + (budget - needs[left]) / slope
