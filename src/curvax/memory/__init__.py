"""Bytes: what there is, what a program needs, and the largest program that fits."""

from curvax.memory._available import available_memory as available_memory
from curvax.memory._bytes import Budget as Budget, parse_memory as parse_memory
from curvax.memory._cache import FunctionCache as FunctionCache
from curvax.memory._errors import MemoryBudgetError as MemoryBudgetError
from curvax.memory._memory_usage import memory_usage as memory_usage
from curvax.memory._plan import MemoryPlan as MemoryPlan, plan_batch_size as plan_batch_size
from curvax.memory._planned import (
    BudgetRequest as BudgetRequest,
    Objective as Objective,
    PlanFor as PlanFor,
    Rehearsal as Rehearsal,
    record as record,
    recorded_plans as recorded_plans,
    run_compiled as run_compiled,
)
from curvax.memory._usage import MemoryUsage as MemoryUsage
