"""`plan_batch_size`: the largest size of a program that fits a budget, by compiling a few sizes.

`build(size)` returns the function for a size; its compiler reports the memory it needs. Nothing is
run. Memory is close to affine in the size, so a few compilations find the largest size that fits
(`largest_that_fits`). The program of the chosen size is among those compiled, and is kept.
"""

import functools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import jax

from curvax._errors import check_count, where
from curvax._types import Array, Fun, PyTree
from curvax.memory.budget import Budget, MemoryBudgetError, format_bytes, parse_memory
from curvax.memory.usage import Executable, MemoryUsage, Program

if TYPE_CHECKING:
    from matplotlib.axes import Axes
else:
    Axes = Any  # Matplotlib is optional, and slow to import.

CLOSE = 1.05
"""The search ends at a size that fits if none larger by this factor is known or expected to fit."""

MARGIN = 0.005
"""Relative margin below a predicted size: measuring just above the budget wastes a compilation."""

EXCLUSION_RATIO = 0.97
"""A size is excluded only if the predicted size is below this fraction of it."""

MAX_LINEAR_FITS = 4
"""Number of measurements after which the search bisects instead of extrapolating linearly."""


def largest_that_fits(
    measure: Callable[[int], int], sizes: Sequence[int], budget: int
) -> int | None:
    """Return a size with `measure(size) <= budget` such that nothing much larger fits.

    The memory of a program is close to affine in its batch size, so a line through two measurements
    predicts the size at which the budget is reached. Measuring there gives a third point, and
    usually the answer. If the prediction is wrong, the search continues between the largest size
    that fits and the next measured one: by the line through these two at first, then by bisection.

    Arguments:
        measure: Return the memory of a size. It is called at most once for each size.
        sizes: The candidates, ascending.
        budget: The memory budget.

    Returns:
        The size, or None if no measured size fits; the smallest candidate is then among these.
    """
    needs: dict[int, int] = {}
    for size in _probes(sizes):
        needs[size] = measure(size)
    while (guess := _next_size(needs, sizes, budget)) is not None:
        needs[guess] = measure(guess)
    return max((size for size, need in needs.items() if need <= budget), default=None)


def _probes(sizes: Sequence[int]) -> Sequence[int]:
    """Return the two sizes to measure first: small, but not 1, whose program is often special."""
    last = sizes[-1]
    small, large = (
        sizes[min(bisect_left(sizes, max(least, last // parts)), len(sizes) - 1)]
        for least, parts in ((2, 64), (4, 8))
    )
    return (small, large) if small < large else (large,)


def _next_size(needs: Mapping[int, int], sizes: Sequence[int], budget: int) -> int | None:
    """Return the size to measure next, or None if the search is over.

    `needs` has the memory of the sizes that were measured. The next size lies between the largest
    that fits and the smallest that does not: where lines through measurements reach the budget or,
    after `MAX_LINEAR_FITS` measurements, at the geometric mean of the two.
    """
    fitting = max((size for size, need in needs.items() if need <= budget), default=0)
    too_large = min((size for size in needs if size > fitting), default=sizes[-1] + 1)
    first, end = bisect_right(sizes, fitting), bisect_left(sizes, too_large)
    if first == end or (fitting and too_large <= CLOSE * fitting):
        return None
    predictions = _predictions(needs, budget, fitting) if len(needs) <= MAX_LINEAR_FITS else ()
    if not predictions:
        wanted = math.sqrt(max(1, fitting) * too_large)
    elif fitting and max(predictions) < max(sizes[first] * EXCLUSION_RATIO, CLOSE * fitting):
        # Two measurements always lie on a line, and the memory between them may be below it. So
        # "nothing larger fits" is believed only after three measurements, one of them of a size
        # smaller than `fitting`.
        if len(needs) > 2 and min(needs) < fitting:
            return None
        wanted = CLOSE * fitting
    else:
        best = predictions[-1]
        wanted = best * (1 - MARGIN) if best > 1 / MARGIN else best
    return sizes[min(max(bisect_right(sizes, wanted) - 1, first), end - 1)]


def _predictions(needs: Mapping[int, int], budget: int, fitting: int) -> Sequence[float]:
    """Return the sizes at which lines through adjacent measurements reach the budget.

    The lines are those on either side of the largest size that fits. The last is the best guess:
    it interpolates if there is a measured size above `fitting`, and extrapolates otherwise.
    """
    known = sorted(needs)
    here = known.index(fitting) if fitting else 0
    pairs = [(i, i + 1) for i in (here - 1, here) if 0 <= i < len(known) - 1]
    return [_predicted_size(needs, known[left], known[right], budget) for left, right in pairs]


def _predicted_size(needs: Mapping[int, int], left: int, right: int, budget: int) -> float:
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
    """A compiled size and its memory usage."""

    size: int
    usage: MemoryUsage


@dataclass(frozen=True)
class MemoryPlan:
    """The size chosen for a memory budget, and the measurements behind it.

    A plan is returned by `plan_batch_size`. It can be printed, compared and plotted. Calling it
    runs the compiled program on arguments with the shapes and dtypes that it was planned for.

    Attributes:
        batch_size: The chosen size: the largest found to fit, or one that is expected to be fast.
        num_batches: Number of batches of that size that cover `max_size`.
        usage: Memory usage of the program of that size.
        budget_bytes: The memory budget, an upper bound on `usage.added_bytes`.
        trials: All compiled sizes, each with its `size` and `usage`, in the order of compilation.
        max_size: The `max_size` that was given.
        executable: The compiled program, as a function of the leaves of its arguments.

    Examples:
        >>> import jax.numpy as jnp
        >>> from curvax import chunked_vmap, plan_batch_size
        >>> build = lambda size: chunked_vmap(lambda x: jnp.sum(jnp.outer(x, x) ** 2), size)
        >>> rows = jnp.ones((8, 4))
        >>> plan = plan_batch_size(build, (rows,), max_size=8, memory_budget="1MB")
        >>> plan.batch_size, plan.num_batches
        (8, 1)
        >>> print(plan(rows))
        [16. 16. 16. 16. 16. 16. 16. 16.]
    """

    batch_size: int
    num_batches: int
    usage: MemoryUsage
    budget_bytes: int
    trials: tuple[Trial, ...]
    max_size: int
    executable: Executable | None = field(default=None, compare=False, repr=False)

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Run the compiled program.

        Arguments:
            args: Positional arguments with the shapes and dtypes that the plan was made for.
            kwargs: Keyword arguments of the same kind.

        Returns:
            The outputs of the program.

        Raises:
            TypeError: If shapes or dtypes differ, or the plan was made inside a transformation for
                a function that closes over tracers.
        """
        if self.executable is None or not self.executable.runs:
            raise TypeError(
                "curvax.MemoryPlan: this plan was made inside a transformation, for a function "
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

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot memory against size for all compiled sizes, with the budget. Needs matplotlib.

        Arguments:
            ax: Matplotlib axes to draw on, None for those of a new figure.

        Returns:
            The axes.

        Examples:
            >>> import matplotlib
            >>> matplotlib.use("Agg")
            >>> import jax.numpy as jnp
            >>> from curvax import chunked_vmap, plan_batch_size
            >>> build = lambda size: chunked_vmap(jnp.sin, size)
            >>> plan = plan_batch_size(build, (jnp.ones(8),), max_size=8, memory_budget="1MB")
            >>> plan.plot().get_xlabel()
            'batch size'
        """
        from curvax._reports import plot_memory_plan

        return plot_memory_plan(self, ax)


def plan_batch_size(
    build: Callable[[int], Fun],
    args: Sequence[PyTree],
    *,
    max_size: int,
    memory_budget: Budget,
    kwargs: Mapping[str, PyTree] | None = None,
) -> MemoryPlan:
    """Find the largest size of a program that fits a memory budget.

    Equal to

        max(s for s in range(1, max_size + 1)
            if memory_usage(build(s), *args, **kwargs).added_bytes <= memory_budget)

    except that it compiles a few sizes only: two to measure how memory grows, the size that these
    predict, and some more if memory does not grow linearly. The size is within a few percent of the
    largest that fits. It does fit: its program has been compiled and measured.

    Arguments:
        build: Return the function to compile, given a size.
        args: Positional arguments of that function: arrays, `jax.ShapeDtypeStruct`s, tracers, or
            pytrees of these. Nothing is run.
        max_size: The largest size to consider, such as the number of examples.
        memory_budget: Bytes that a call may allocate besides its arguments: an int, a string
            with a unit ("2GB", "50%"), or a float in (0, 1], a fraction of the available memory.
        kwargs: Keyword arguments of that function, of the same kinds.

    Returns:
        The plan. Call it to run the compiled program.

    Raises:
        MemoryBudgetError: If nothing fits. Its message says which budget would suffice.
        ValueError: If the budget or the size is out of range.
        TypeError: If the budget or the size is of another type, or `args` is not a sequence.

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
    if not isinstance(args, Sequence):  # An array would be unpacked into its rows.
        raise TypeError(
            f"{where()}: args must be a tuple of the arguments, got {type(args).__name__}. For a "
            f"single one, write (x,)."
        )
    leaves, structure = jax.tree.flatten((tuple(args), dict(kwargs or {})))
    budget = parse_memory(memory_budget)
    max_size = check_count("max_size", max_size)

    def compile(size: int) -> Executable:
        def call(*leaves: Array) -> PyTree:
            args, kwargs = jax.tree.unflatten(structure, leaves)
            return build(size)(*args, **kwargs)

        return Program.of(call, leaves).compile()

    return plan_size(compile, range(1, max_size + 1), budget)


def plan_size(
    compile: Callable[[int], Executable],
    sizes: Sequence[int],
    budget: int,
    advice: str = ADVICE,
) -> MemoryPlan:
    """Return the plan for the largest size whose program fits the budget; `sizes` are ascending."""
    trials: list[Trial] = []
    best: tuple[int, Executable] | None = None

    def measure(size: int) -> int:
        nonlocal best
        executable = compile(size)
        trials.append(Trial(size, executable.usage))
        needs = executable.usage.added_bytes
        if needs <= budget and (best is None or size > best[0]):
            best = size, executable
        return needs

    largest_that_fits(measure, sizes, budget)
    if best is None:
        # Size 1 can need more than 2 or 3. The error message names the minimum.
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
    """Return `plan` changed to another size with this program."""
    return replace(
        plan,
        batch_size=size,
        num_batches=-(-plan.max_size // size),
        usage=executable.usage,
        trials=(*plan.trials, Trial(size, executable.usage)),
        executable=executable,
    )


CACHE_BYTES = 10_000_000
"""Target size of a fast batch's temporaries: about a third of a last-level cache of 32 MiB."""

PROBES = 16, 64
"""The two sizes that are compiled; most results are powers of 2 near them."""

SMALLEST, LARGEST = 8, 128
"""Bounds on the result: sizes outside are not faster, whatever their temporaries."""


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

    This is a heuristic for CPUs: a batch should be large enough to amortise the work done once per
    batch, and its temporaries should stay in the last-level cache. Two compiled programs show how
    temporaries grow with the size; nothing is timed. docs/design.md compares the heuristic with
    timed sizes.

    Arguments:
        temporaries: Return the bytes of the temporaries of a size.
        sizes: The candidates, ascending.

    Returns:
        One of `sizes`.
    """
    at_most = lambda wanted: sizes[max(0, bisect_right(sizes, wanted) - 1)]
    small, large = map(at_most, PROBES)
    if small == large:
        return large
    bytes_per_example = (temporaries(large) - temporaries(small)) / (large - small)
    wanted = LARGEST if bytes_per_example <= 0 else CACHE_BYTES / bytes_per_example
    return at_most(min(max(2 ** round(math.log2(wanted)), SMALLEST), LARGEST))
