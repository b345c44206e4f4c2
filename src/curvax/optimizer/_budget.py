"""The sizes of microbatches with which a whole step fits a memory budget.

Gradient, statistics and exact products plan their microbatches themselves, each for what it is
given. A step holds more: gradient and statistics beside each other, inverses, the state. How much
more is known once it is compiled. So it is compiled with all that there is left for its parts, and
only if it needs too much are the parts given less, by as much.
"""

from collections.abc import Callable, Mapping
from typing import Any

from curvax.memory import MemoryBudgetError, recorded_plans

__all__ = ["Sizes", "sizes_within"]

ATTEMPTS = 3
"""How often the parts are given less, before the smallest microbatches are tried."""

ADVICE = (
    "That is for microbatches of one example: the rest is the gradient, inverses and their "
    "temporaries, and the new state if donate_buffers=False. What else helps: donate_buffers=True, "
    "stagger_inverses=True, which inverts some layers at a time, and shard_state=True on several "
    "devices."
)

Sizes = Mapping[str, Any]


def sizes_within(budget: int, left: int, needs: Callable[[Sizes], int], where: str) -> Sizes:
    """The arguments by which a step of an optimizer stays within the budget.

    `left` is how much of it the parts can have, at most; `needs` compiles the step with some
    arguments and returns what a call of it adds.
    """
    known: dict[int, int] = {}
    for _ in range(ATTEMPTS):
        if left < 1:
            break
        sizes = {"microbatch_size": None, "memory_budget": left}
        try:
            with recorded_plans() as plans:
                needed = needs(sizes)
        except MemoryBudgetError:
            break
        if needed <= budget:
            return sizes
        known[min((plan.batch_size for plan in plans), default=1)] = needed
        left -= needed - budget + budget // 100
    one = {"microbatch_size": 1, "memory_budget": None}
    least = needs(one)
    if least > budget:
        raise MemoryBudgetError(budget, least, where, ADVICE)
    size = _between(least, known, budget)
    some = {"microbatch_size": size, "memory_budget": None}
    return some if size > 1 and needs(some) <= budget else one


def _between(least: int, known: Mapping[int, int], budget: int) -> int:
    """The size at which the line from one example to the smallest that is too large meets it."""
    if not known:
        return 1
    size = min(known)
    if size == 1 or known[size] <= least:
        return 1
    share = (budget - least) / (known[size] - least)
    return int(1 + 0.95 * share * (size - 1))
