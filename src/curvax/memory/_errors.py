"""`MemoryBudgetError`: nothing fits, and what would."""

from typing import Any

from curvax.memory._bytes import format_bytes

__all__ = ["MemoryBudgetError"]


class MemoryBudgetError(MemoryError):
    """No size of a program fits into the memory budget.

    Attributes:
        budget_bytes: the budget that was given.
        smallest_budget: the least that would do, for the smallest program that was tried.
    """

    budget_bytes: int
    smallest_budget: int

    def __init__(self, budget_bytes: int, smallest_budget: int, where: str, advice: str) -> None:
        self.budget_bytes = budget_bytes
        self.smallest_budget = smallest_budget
        self._rest = where, advice
        super().__init__(
            f"{where}: nothing fits into {format_bytes(budget_bytes)} ({budget_bytes} bytes). The "
            f"smallest budget that would do is {format_bytes(smallest_budget)} "
            f"({smallest_budget} bytes). {advice}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.budget_bytes, self.smallest_budget, *self._rest)
