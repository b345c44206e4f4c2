"""`plan_batch_size`: the largest size of a program that fits a budget, by asking its compiler.

`build(size)` is a function for each size; compiled, it says what it needs. Nothing is run. What is
needed is close to affine in the size, so a few compilations find the largest that fits
(`curvax.memory._search`). The one that was chosen has been compiled and checked, and is kept.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from curvax._checks import check_size
from curvax._types import Fun
from curvax.memory._bytes import Budget, format_bytes, parse_memory
from curvax.memory._errors import MemoryBudgetError
from curvax.memory._program import Executable, Program
from curvax.memory._search import largest_that_fits
from curvax.memory._usage import MemoryUsage

__all__ = ["MemoryPlan", "Trial", "plan_at", "plan_batch_size", "plan_size"]

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
    """The largest size that fits."""

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
        from curvax.report import plot_memory_plan

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
        memory_budget: what a call may allocate, beside its arguments; see `parse_memory`.
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
    where = "curvax.plan_batch_size"
    if not isinstance(args, Sequence):  # An array would be taken for its rows.
        raise TypeError(
            f"{where}: args must be a tuple of the arguments, got {type(args).__name__}. For a "
            f"single one, write (x,)."
        )
    leaves, structure = jax.tree.flatten((tuple(args), dict(kwargs or {})))
    budget = parse_memory(memory_budget)
    most = check_size("max_size", max_size, where)
    if most is None:
        raise TypeError(f"{where}: max_size must be a Python integer, got None.")

    def program(size: int) -> Program:
        def call(*leaves: Any) -> Any:
            args, kwargs = jax.tree.unflatten(structure, leaves)
            return build(size)(*args, **kwargs)

        return Program.of(call, leaves)

    return plan_size(program, range(1, most + 1), budget, where)


def plan_size(
    program: Callable[[int], Program],
    sizes: Sequence[int],
    budget: int,
    where: str,
    advice: str = ADVICE,
) -> MemoryPlan:
    """The plan for the largest of `sizes`, which ascend, whose program fits the budget."""
    trials: list[Trial] = []
    best: tuple[int, Executable] | None = None

    def measure(size: int) -> int:
        nonlocal best
        executable = program(size).compile()
        trials.append(Trial(size, executable.usage))
        needs = executable.usage.added_bytes
        if needs <= budget and (best is None or size > best[0]):
            best = size, executable  # Others are let go.
        return needs

    largest_that_fits(measure, sizes, budget)
    if best is None:
        # One by one can be dearer than two at a time. The message shall name the least.
        tried = {trial.size for trial in trials}
        for size in [size for size in sizes[:3] if size not in tried]:
            measure(size)
    if best is None:
        smallest = min(trial.usage.added_bytes for trial in trials)
        raise MemoryBudgetError(budget, smallest, where, advice)
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
    """The plan with another size, whose program this is."""
    return replace(
        plan,
        batch_size=size,
        num_batches=-(-plan.max_size // size),
        usage=executable.usage,
        trials=(*plan.trials, Trial(size, executable.usage)),
        executable=executable,
    )
