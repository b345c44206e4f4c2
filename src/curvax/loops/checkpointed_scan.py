"""`checkpointed_scan` and `checkpoint_chunked_scan`: scans whose gradient saves few residuals.

Checkpointing of loops: see Griewank & Walther 2000, "Algorithm 799: revolve", for the optimal
schedule, and Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", for chunks of √N.
Here checkpoints are at the boundaries of nested loops, which compile to small programs.

A loop of N steps is a loop of n₁ rounds, each of them a loop of n₂ rounds, and so on down to
nₖ steps. Every round is checkpointed: the forward pass saves its initial carry, and the backward
pass rematerialises the rest. At any time, the carries of one loop at each level and the residuals
of one innermost loop are alive: n₁ + n₂ + … + nₖ in place of their product, for k - 1 additional
forward passes.

A number of steps that is not such a product is written in a mixed radix. With lengths
(10, 10, 10), 987 steps are 9 rounds of 100 steps, then 8 rounds of 10, then 7 steps. Each digit is
one nest of loops, so at most k bodies are compiled and no step is padded. The first digit saves one
carry for each of its rounds; each of the others is a single checkpoint.
"""

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from curvax import _jax, _slicing
from curvax._errors import check_size
from curvax._tree import as_key
from curvax._types import Array, Carry, PyTree, Size
from curvax.loops.scan_program import Outputs, ScanProgram, Span, scan_length, unroll_within
from curvax.memory.budget import Budget
from curvax.memory.compiled import Objective, PlanFor, check_budget, plan_call

C = TypeVar("C")
X = TypeVar("X")
Y = TypeVar("Y")

DEFAULT_LEVELS = 2

State: TypeAlias = tuple[Carry, PyTree]
"""The state of the outermost loop: the carry, and the buffers for the outputs."""


def checkpointed_scan(
    f: Callable[[C, X], tuple[C, Y]],
    init: C,
    xs: X,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    levels: int | None = None,
    memory_budget: Budget | None = None,
    plan_for: PlanFor = "gradient",
    objective: Objective = "memory",
) -> tuple[C, Y]:
    """Scan, with nested checkpoints.

    Equal to

        jax.lax.scan(f, init, xs, length, reverse, unroll)

    except for the residuals that its gradient saves. N steps run as scans nested `levels` deep,
    each of about N^(1/levels) rounds. The gradient holds the carries of one scan at each level and
    the residuals of one innermost scan: O(levels · N^(1/levels)) instead of O(N), for `levels - 1`
    additional forward passes. Forward mode and second derivatives also work.

    One level is `jax.lax.scan`, which saves the residuals of every step. Two levels are
    `checkpoint_chunked_scan` with chunks of about √N. The gradient with respect to `xs` is as large
    as `xs`, and is accumulated one round at a time.

    Arguments:
        f: Body of the scan, `(carry, x) -> (carry, y)`. It is traced once.
        init: Initial carry, a pytree of arrays.
        xs: Pytree of arrays to scan over along their leading axes, or None.
        length: Number of steps; required if `xs` has no leaves.
        reverse: Whether to run from the last position to the first.
        unroll: Maximum number of steps to unroll in the innermost loop; True unrolls all.
        levels: Depth of the nested scans, None for two. The number of steps need not be a power or
            a product of anything; for few steps fewer levels may be used.
        memory_budget: Bytes that the program may allocate, in place of `levels`: an int, a string
            with a unit ("2GB", "50%"), or a float in (0, 1], a fraction of the available memory.
            The fewest levels are chosen, and so the fewest forward passes, with which the program,
            compiled by itself, allocates no more.
        plan_for: The program that must fit the budget: "gradient" for the reverse-mode derivative
            of the scan with respect to all arrays it depends on, "value" for the scan itself.
        objective: "memory" and "time" both choose the fewest levels that fit, because each
            additional level computes all steps once more.

    Returns:
        The final carry, and the stacked outputs.

    Raises:
        ValueError: If sizes disagree, `levels` is not positive, or both `levels` and a budget are
            given.
        TypeError: If the body changes the type of the carry, or a size is not an integer.
        MemoryBudgetError: If no number of levels fits the budget.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from curvax import checkpointed_scan
        >>> decay = lambda rate: checkpointed_scan(
        ...     lambda y, _: (y - rate * y, None), 1.0, None, length=100, levels=3
        ... )[0]
        >>> round(float(jax.grad(decay)(0.01)), 3)  # -100 * 0.99**99
        -36.973
    """
    levels = check_size("levels", levels)
    budget = check_budget(memory_budget, {"levels": levels}, plan_for=plan_for, objective=objective)

    # A compiled program is cached by what `f` computes now, so JAX must not reuse an older trace.
    body = f if budget is None else _jax.untraced(f)

    def run(levels: int, init: Carry, xs: PyTree) -> tuple[Carry, PyTree]:
        program = ScanProgram.of(body, init, xs, length, reverse)
        with program.mesh():
            return run_nested(program, nested_lengths(program.length, levels), unroll)

    if budget is None:
        return run(levels or DEFAULT_LEVELS, init, xs)
    # The planned size is the length of the innermost loop: the longer, the fewer levels.
    steps = scan_length(xs, length)
    most_levels = range(max(1, steps.bit_length()), 0, -1)
    levels_of = {nested_lengths(steps, levels)[-1]: levels for levels in most_levels}
    build = lambda size: lambda init, xs: run(levels_of[_at_most(levels_of, size)], init, xs)
    key = "checkpointed_scan", length, bool(reverse), as_key(unroll)
    largest = replace(budget, objective="memory")
    plan = plan_call(largest, f, build, (init, xs), {}, sorted(levels_of), key=key)
    return plan(init, xs)


def _at_most(sizes: Iterable[int], size: int) -> int:
    """Return the largest of `sizes` that is at most `size`, or the smallest if there is none."""
    return max(given for given in sizes if given <= max(size, min(sizes)))


def nested_lengths(length: int, levels: int) -> tuple[int, ...]:
    """Return the lengths of at most `levels` nested loops over `length` steps, outermost first.

    They are about equal, which minimises their sum. Among lengths within a quarter of the optimum,
    one without remainder is preferred, because a remainder is one more body to compile. If there is
    none, the product exceeds `length` and the outermost loop ends early.
    """
    inner: list[int] = []
    for level in range(levels, 1, -1):
        if length <= 1:
            break
        root = _root(length, level)
        near = range(-(-4 * root // 5), 5 * root // 4 + 1)
        divisors = [size for size in near if size > 1 and length % size == 0]
        inner.append(min(divisors, key=lambda size: abs(size - root), default=root))
        length = -(-length // inner[-1])
    if length > 1 or not inner:
        inner.append(max(1, length))
    return tuple(reversed(inner))


def _root(n: int, degree: int) -> int:
    """Return the smallest integer r with `r**degree >= n`, for a positive `n`."""
    root = max(1, round(n ** (1 / degree)) - 1)
    while root**degree < n:
        root += 1
    return root


def run_nested(
    program: ScanProgram, lengths: tuple[int, ...], unroll: int | bool
) -> tuple[Carry, PyTree]:
    """Run all steps of a program in nested loops of these lengths, outermost first.

    The first length is not used: the outermost loop has as many rounds as the steps fill. The
    remaining steps run after it.
    """
    unroll_within(unroll, program.length)
    nest = _Nest(lengths, unroll)
    if len(lengths) == 1:
        return nest.run(program, program.init, 0, 0, program.length)
    outputs = Outputs(program, program.length)

    # Outputs are written into buffers at the outermost level only. Inner loops have no remainder,
    # so stacking by `lax.scan` puts their outputs where they belong.
    def run_and_write(
        program: ScanProgram, state: State, time: Size, depth: int, count: int, alone: bool
    ) -> State:
        carry, buffers = state
        run = jax.checkpoint(
            lambda carry, time: nest.run(program, carry, time, depth, count), prevent_cse=alone
        )
        carry, ys = run(carry, time)
        return carry, outputs.write(buffers, ys, program.rows(time, count * nest.size(depth)))

    rounds, rest = divmod(program.length, nest.size(0))
    state = program.init, outputs.allocate()
    if rounds == 1:
        state = run_and_write(program, state, 0, 1, lengths[1], alone=True)
    elif rounds:
        body = lambda state, time: (
            run_and_write(program, state, time, 1, lengths[1], alone=False),
            None,
        )
        state = lax.scan(body, state, nest.size(0) * jnp.arange(rounds))[0]
    last = program
    for depth in range(1, len(lengths)):
        if not rest:
            break
        # Narrow to the remaining rows; otherwise each digit's backward pass would accumulate a
        # cotangent of all of `xs`.
        done = program.length - rest
        last, _ = _narrowed(last, done, rest)
        count, rest = divmod(rest, nest.size(depth))
        if count:
            state = run_and_write(last, state, done, depth, count, alone=True)
    carry, buffers = state
    return carry, outputs.finish(buffers)


@dataclass(frozen=True)
class _Nest:
    """Nested loops of these lengths, outermost first."""

    lengths: tuple[int, ...]
    unroll: int | bool

    def size(self, depth: int) -> int:
        """Return the number of steps in one round of the loop at `depth`."""
        return math.prod(self.lengths[depth + 1 :])

    def run(
        self, program: ScanProgram, carry: Carry, time: Size, depth: int, count: int
    ) -> tuple[Carry, PyTree]:
        """Run `count` rounds of the loop at `depth` from `time` on; stack outputs by position."""
        within, xs = _narrowed(program, time, count * self.size(depth))
        if depth == len(self.lengths) - 1:
            steps_unrolled = unroll_within(self.unroll, count)
            return lax.scan(program.f, carry, xs, count, program.reverse, steps_unrolled)
        # XLA cannot merge the forward and the backward pass of a loop by common-subexpression
        # elimination, but it can outside of one.
        run_round = jax.checkpoint(
            lambda carry, time: self.run(within, carry, time, depth + 1, self.lengths[depth + 1]),
            prevent_cse=count == 1,
        )
        if count == 1:
            return run_round(carry, time)
        times = time + self.size(depth) * jnp.arange(count)
        # Scan in the order of positions, so that outputs are stacked by position.
        times = times[::-1] if program.reverse else times
        carry, ys = lax.scan(run_round, carry, times, reverse=program.reverse)
        return carry, jax.tree.map(lambda leaf: lax.collapse(leaf, 0, 2), ys)


def _narrowed(program: ScanProgram, time: Size, count: int) -> tuple[ScanProgram, PyTree]:
    """Return the program for a loop over `count` steps from `time` on, and their rows of `xs`.

    The cotangent of `xs` is accumulated into the rows of each enclosing loop, from the innermost to
    the outermost, for the reason given in `ScanProgram.within`. Values are read from `xs` in place:
    the innermost loop alone uses the rows, so the others never read them.
    """
    if program.span is None:
        narrowed = program.within(time, count)
    else:
        outer = program.span
        rows = program.rows(time, count)
        rows_in_outer = _slicing.Rows(rows.start - outer.start, count)

        def read(leaf: Array, outer_leaf: Array) -> Array:
            value = _slicing.read(leaf, rows, 0)
            if not jnp.issubdtype(leaf.dtype, jnp.inexact):
                return value
            return _slicing.differentiated_as(value, _slicing.read(outer_leaf, rows_in_outer, 0))

        span = Span(rows.start, jax.tree.map(read, program.xs, outer.rows))
        narrowed = replace(program, span=span)
    assert narrowed.span is not None
    return narrowed, narrowed.span.rows


def checkpoint_chunked_scan(
    f: Callable[[C, X], tuple[C, Y]],
    init: C,
    xs: X,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    chunk_size: int | None = None,
    memory_budget: Budget | None = None,
    plan_for: PlanFor = "gradient",
    objective: Objective = "memory",
) -> tuple[C, Y]:
    """Scan, with a checkpoint every `chunk_size` steps.

    Equal to

        jax.lax.scan(f, init, xs, length, reverse, unroll)

    except for the residuals that its gradient saves: the carry at the start of each chunk, instead
    of all intermediates of every step. The backward pass rematerialises one chunk at a time. So N
    steps in chunks of c hold N/c carries and the residuals of c steps: chunks of √N need O(√N)
    memory instead of O(N), for one additional forward pass. Forward mode and second derivatives
    also work.

    Arguments:
        f: Body of the scan, `(carry, x) -> (carry, y)`. It is traced once.
        init: Initial carry, a pytree of arrays.
        xs: Pytree of arrays to scan over along their leading axes, or None.
        length: Number of steps; required if `xs` has no leaves.
        reverse: Whether to run from the last position to the first.
        unroll: Maximum number of steps to unroll; True unrolls all.
        chunk_size: Number of steps from one checkpoint to the next, the first one being `init`. It
            need not divide the number of steps. None is one chunk of all steps.
        memory_budget: Bytes that the program may allocate, in place of `chunk_size`: an int, a
            string with a unit ("2GB", "50%"), or a float in (0, 1], a fraction of the available
            memory. The largest chunk is chosen with which the program, compiled by itself,
            allocates no more.
        plan_for: The program that must fit the budget: "gradient" for the reverse-mode derivative
            of the scan with respect to all arrays it depends on, "value" for the scan itself.
        objective: "memory" chooses the largest chunk that fits. "time" chooses one that is fast by
            a heuristic: on a CPU its temporaries stay in the cache, elsewhere it is the largest.

    Returns:
        The final carry, and the stacked outputs.

    Raises:
        ValueError: If sizes disagree, `chunk_size` is not positive, or both `chunk_size` and a
            budget are given.
        TypeError: If the body changes the type of the carry, or a size is not an integer.
        MemoryBudgetError: If no chunk size fits the budget.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from curvax import checkpoint_chunked_scan
        >>> decay = lambda rate: checkpoint_chunked_scan(
        ...     lambda y, _: (y - rate * y, None), 1.0, None, length=100, chunk_size=10
        ... )[0]
        >>> round(float(jax.grad(decay)(0.01)), 3)  # -100 * 0.99**99
        -36.973
    """
    chunk_size = check_size("chunk_size", chunk_size)
    sizes = {"chunk_size": chunk_size}
    budget = check_budget(
        memory_budget, sizes, plan_for=plan_for, objective=objective, advice=_ADVICE
    )
    # A compiled program is cached by what `f` computes now, so JAX must not reuse an older trace.
    body = f if budget is None else _jax.untraced(f)

    def run(size: int | None, init: Carry, xs: PyTree) -> tuple[Carry, PyTree]:
        program = ScanProgram.of(body, init, xs, length, reverse)
        with program.mesh():
            chunk = max(1, min(size or program.length, program.length))
            return run_nested(program, (1, chunk), unroll)  # Two levels: chunks and their steps.

    if budget is None:
        return run(chunk_size, init, xs)
    build = lambda size: functools.partial(run, size)
    steps = scan_length(xs, length)
    # The gradient holds one carry for each chunk and the residuals of one chunk. Below about √N
    # the carries dominate, so that smaller chunks need more memory, not less.
    sizes = range(max(1, math.isqrt(steps) // 4), max(1, steps) + 1)
    key = "checkpoint_chunked_scan", length, bool(reverse), as_key(unroll)
    plan = plan_call(budget, f, build, (init, xs), {}, sizes, key=key)
    return plan(init, xs)


_ADVICE = "What else helps: checkpointed_scan, whose nested checkpoints need less."
