"""`plan_batch_size`: the largest size of a program that fits a budget, by asking its compiler.

`build(size)` is a function for each size; compiled, it says what it needs. Nothing is run. What is
needed is close to affine in the size, so a few compilations find the largest that fits
(`largest_that_fits`). The one that was chosen has been compiled and checked, and is kept.
"""

import functools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from curvax._errors import check_count, where
from curvax._types import Fun
from curvax.memory.budget import Budget, MemoryBudgetError, format_bytes, parse_memory
from curvax.memory.usage import Executable, MemoryUsage, Program

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

    What a program needs is close to affine in its batch size, so a line through two sizes says
    where the budget is met. Asking there gives a third point, and usually the answer. Where the
    line lies, the search goes on between what fits and what does not: by the line through these two
    at first, and by cutting the interval in two when that does not narrow it down.
    """
    needs: dict[int, int] = {}
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


ADVICE = (
    "What else helps: checkpoint=True where there is such an option, a smaller dtype, or streaming "
    "the result to disk."
)


@dataclass(frozen=True)
class Trial:
    """A size that was compiled, and what it needs."""

    size: int
    usage: MemoryUsage


@dataclass(frozen=True)
class MemoryPlan:
    """The size that was chosen for a memory budget, and how.

    It prints, compares and plots. Called, it runs the program that was compiled and checked, on
    arguments like those it was planned for.
    """

    batch_size: int
    """The size that was chosen: the largest found to fit, or one that is expected to be fast."""

    num_batches: int
    """How many batches of that size make up the largest size there could be."""

    usage: MemoryUsage
    """What the program of that size needs."""

    budget_bytes: int
    """What it may need: `usage.added_bytes` is not more."""

    trials: tuple[Trial, ...]
    """All sizes that were compiled, in the order of asking."""

    max_size: int
    """The largest size there could be."""

    executable: Executable | None = field(default=None, compare=False, repr=False)
    """The compiled program, on the leaves of its arguments."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled program."""
        if self.executable is None or not self.executable.runs:
            raise TypeError(
                "curvax.MemoryPlan: this plan was made inside of a transformation, for a function "
                "that closes over traced values, and cannot be run by itself."
            )
        return self.executable(*jax.tree.leaves((args, kwargs)))

    def __str__(self) -> str:
        batches = "1 batch" if self.num_batches == 1 else f"{self.num_batches} batches"
        lines = [
            f"batch size {self.batch_size} of {self.max_size} ({batches})",
            f"needs {format_bytes(self.usage.added_bytes)} of {format_bytes(self.budget_bytes)}",
            "compiled:",
        ]
        for trial in sorted(self.trials, key=lambda trial: trial.size):
            mark = "<- chosen" if trial.size == self.batch_size else ""
            fits = trial.usage.added_bytes <= self.budget_bytes
            mark = mark or ("" if fits else "too large")
            size = f"{trial.size:>8}"
            lines.append(f"{size} {format_bytes(trial.usage.added_bytes):>12} {mark}".rstrip())
        return "\n".join(lines)

    def plot(self, ax: Any = None) -> Any:
        """Plot memory against size, with the budget. Needs matplotlib.

        Arguments:
            ax: matplotlib axes to plot into; new ones by default.

        Returns:
            The axes.
        """
        from curvax._reports import plot_memory_plan

        return plot_memory_plan(self, ax)


def plan_batch_size(
    build: Callable[[int], Fun],
    args: Sequence[Any],
    *,
    max_size: int,
    memory_budget: Budget,
    kwargs: Mapping[str, Any] | None = None,
) -> MemoryPlan:
    """The largest size of a program that fits a memory budget.

    Equal to

        max(s for s in range(1, max_size + 1)
            if memory_usage(build(s), *args, **kwargs).added_bytes <= memory_budget)

    except that it compiles a few sizes only: two to see how memory grows, the one that this points
    to, and some more where it does not grow evenly. The answer is within some percent of the
    largest that fits, and it does fit: its program has been compiled and asked.

    Arguments:
        build: from a size, the function to be compiled on `args` and `kwargs`.
        args: arrays, `jax.ShapeDtypeStruct`s, tracers or pytrees of these. Nothing is run.
        max_size: the largest size there is any use for.
        memory_budget: what a call may allocate, besides its arguments; see `parse_memory`.
        kwargs: keyword arguments, the same.

    Returns:
        A `MemoryPlan`. Call it to run the compiled program.

    Raises:
        MemoryBudgetError: if nothing fits. It says what would.
        ValueError, TypeError: if the budget or the size make no sense.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from curvax import chunked_vmap, plan_batch_size
        >>> images = jax.ShapeDtypeStruct((1000, 64, 64), jnp.float32)
        >>> power = lambda image: jnp.sum(jnp.abs(jnp.fft.fft2(image)) ** 2)
        >>> build = lambda size: chunked_vmap(power, size)
        >>> plan = plan_batch_size(build, (images,), max_size=1000, memory_budget="8MB")
        >>> plan.usage.added_bytes <= plan.budget_bytes == 8_000_000
        True
    """
    if not isinstance(args, Sequence):  # An array would be taken for its rows.
        raise TypeError(
            f"{where()}: args must be a tuple of the arguments, got {type(args).__name__}. For a "
            f"single one, write (x,)."
        )
    leaves, structure = jax.tree.flatten((tuple(args), dict(kwargs or {})))
    budget = parse_memory(memory_budget)
    most = check_count("max_size", max_size)

    def compile(size: int) -> Executable:
        def call(*leaves: Any) -> Any:
            args, kwargs = jax.tree.unflatten(structure, leaves)
            return build(size)(*args, **kwargs)

        return Program.of(call, leaves).compile()

    return plan_size(compile, range(1, most + 1), budget)


def plan_size(
    compile: Callable[[int], Executable],
    sizes: Sequence[int],
    budget: int,
    advice: str = ADVICE,
) -> MemoryPlan:
    """Return the plan for the largest of `sizes`, which ascend, whose program fits the budget."""
    trials: list[Trial] = []
    best: tuple[int, Executable] | None = None

    def measure(size: int) -> int:
        nonlocal best
        executable = compile(size)
        trials.append(Trial(size, executable.usage))
        needs = executable.usage.added_bytes
        if needs <= budget and (best is None or size > best[0]):
            best = size, executable  # Others are let go.
        return needs

    largest_that_fits(measure, sizes, budget)
    if best is None:
        # One by one can need more than two at a time. The message names the least.
        tried = {trial.size for trial in trials}
        for size in [size for size in sizes[:3] if size not in tried]:
            measure(size)
    if best is None:
        smallest = min(trial.usage.added_bytes for trial in trials)
        raise MemoryBudgetError(budget, smallest, where(), advice)
    size, executable = best
    return MemoryPlan(
        batch_size=size,
        num_batches=-(-sizes[-1] // size),
        usage=executable.usage,
        budget_bytes=budget,
        trials=tuple(trials),
        max_size=sizes[-1],
        executable=executable,
    )


def plan_at(plan: MemoryPlan, size: int, executable: Executable) -> MemoryPlan:
    """Return the plan with another size, whose program this is."""
    return replace(
        plan,
        batch_size=size,
        num_batches=-(-plan.max_size // size),
        usage=executable.usage,
        trials=(*plan.trials, Trial(size, executable.usage)),
        executable=executable,
    )


CACHE_BYTES = 10_000_000
"""What the temporaries of a fast batch take: about a third of a last-level cache of 32 MiB."""

PROBES = 16, 64
"""The two sizes that are compiled; nearby powers of two are the answer for most programs."""

SMALLEST, LARGEST = 8, 128
"""Sizes beyond these are not faster, whatever their temporaries."""


def plan_fast_size(
    compile: Callable[[int], Executable],
    sizes: Sequence[int],
    budget: int,
    advice: str = ADVICE,
) -> MemoryPlan:
    """Return the plan for the `fast_size`, or for the largest below it that fits the budget."""
    if jax.default_backend() != "cpu":
        return plan_size(compile, sizes, budget, advice)
    trials: list[Trial] = []

    @functools.cache
    def compile_once(size: int) -> Executable:
        executable = compile(size)
        trials.append(Trial(size, executable.usage))
        return executable

    fast = fast_size(lambda size: compile_once(size).usage.temp_bytes, sizes)
    fits = compile_once(fast).usage.added_bytes <= budget
    smaller = sizes[: bisect_left(sizes, fast)]
    plan = plan_size(compile_once, smaller if smaller and not fits else [fast], budget, advice)
    num_batches = -(-sizes[-1] // plan.batch_size)
    return replace(plan, trials=tuple(trials), max_size=sizes[-1], num_batches=num_batches)


def fast_size(temporaries: Callable[[int], int], sizes: Sequence[int]) -> int:
    """Return the power of two whose temporaries fill the cache best, or the next smaller size.

    This is the rule for CPUs: a batch should be large enough to spread what is done once for each
    batch, and its temporaries should stay in the last-level cache. How these grow with the size is
    known from two compiled programs; nothing is timed. docs/design.md compares the rule with timed
    sizes.
    """
    at_most = lambda wanted: sizes[max(0, bisect_right(sizes, wanted) - 1)]
    small, large = map(at_most, PROBES)
    if small == large:
        return large
    added = (temporaries(large) - temporaries(small)) / (large - small)
    wanted = LARGEST if added <= 0 else CACHE_BYTES / added
    return at_most(min(max(2 ** round(math.log2(wanted)), SMALLEST), LARGEST))
