"""Among sizes that fit, the fastest.

On a CPU a small batch stays in the caches, and the largest that fits is often far from the fastest.
Time has one valley over the sizes, so the search walks downhill over sizes a factor of two apart,
from a middling one. It times few of them, and stops when that has taken long enough.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax

from curvax import _jax
from curvax.memory.plan import MemoryPlan, Trial, plan_at
from curvax.memory.usage import Executable, Program

__all__ = ["fastest"]


FIRST = 32
MOST_SIZES = 8
MOST_SECONDS = 20.0
RUN_SECONDS = 0.5
MOST_RUNS = 10
BETTER = 0.98
"""A size has to be this much faster than the one before it: the rest is noise."""


def fastest(
    plan: MemoryPlan,
    program: Callable[[int], Program],
    timed: Callable[[int], tuple[Program, float]],
    leaves: Sequence[Any] | None,
    sent: Callable[[float], Any] = float,
) -> MemoryPlan:
    """The plan with the fastest size that is not larger than the one it has.

    `timed` are the programs to time, each with the share that it does of the work. They run on
    `leaves`, or on made-up numbers where these are not known. Where several processes run them
    together, `sent` makes seconds those of the first, so that all go the same way.
    """
    begin = time.perf_counter()
    sizes = sorted(
        {max(1, plan.batch_size >> shift) for shift in range(plan.batch_size.bit_length())}
    )
    seconds: dict[int, float] = {}

    def measure(index: int) -> float:
        if not 0 <= index < len(sizes):
            return float("inf")
        if index not in seconds:
            spent = float(sent(time.perf_counter() - begin))
            if seconds and (len(seconds) >= MOST_SIZES or spent > MOST_SECONDS):
                return float("inf")
            part, share = timed(sizes[index])
            seconds[index] = _seconds(part, leaves, sent) / share
        return seconds[index]

    here = min(range(len(sizes)), key=lambda i: abs(sizes[i].bit_length() - FIRST.bit_length()))
    measure(here)
    while True:
        there = min((here - 1, here + 1), key=measure)
        if measure(there) >= BETTER * measure(here):
            break
        here = there
    return _at(plan, program, sizes[here])


def _at(plan: MemoryPlan, program: Callable[[int], Program], size: int) -> MemoryPlan:
    """The plan for a smaller size, if it fits; it nearly always does."""
    if size == plan.batch_size:
        return plan
    executable = program(size).compile()
    if executable.usage.added_bytes > plan.budget_bytes:
        return replace(plan, trials=(*plan.trials, Trial(size, executable.usage)))
    return plan_at(plan, size, executable)


def _seconds(program: Program, leaves: Sequence[Any] | None, sent: Callable[[float], Any]) -> float:
    """The best of some runs, after one to warm up."""
    executable = program.compile()
    given = [*executable.consts, *(leaves or ())]
    if leaves is None or any(map(_jax.is_tracer, given)):
        given = _made_up(executable, program)
    times: list[float] = []
    while len(times) < 3 or (sum(times) < RUN_SECONDS and len(times) < MOST_RUNS):
        begin = time.perf_counter()
        jax.block_until_ready(executable.compiled(*given))
        times.append(float(sent(time.perf_counter() - begin)))
    return min(times[1:])


def _made_up(executable: Executable, program: Program) -> list[Any]:
    shapes = [*map(_jax.shape_of, executable.consts), *program.leaves]
    return [_jax.made_up(shape) for shape in shapes]
