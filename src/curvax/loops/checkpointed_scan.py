"""`checkpointed_scan`: scans inside scans, so that a gradient remembers very little of each.

A loop of N steps is a loop of n₁ rounds, each of them a loop of n₂ rounds, and so on down to nₖ
steps. Every round is checkpointed: the gradient remembers the carry it starts from, and runs the
round again when it gets there. At any time it holds the carries of one loop at each level, and the
steps of one innermost loop: n₁ + n₂ + … + nₖ in place of their product, for k - 1 more forward
passes.

A number of steps that is not such a product is written like a number in a mixed base. With
lengths (10, 10, 10), 987 steps are 9 rounds of 100 steps, then 8 rounds of 10, then 7 steps. Each
digit is one nest of loops, so there are at most k bodies to compile and no step is padded. Only
the first digit keeps as many carries as it has rounds; each other one is a checkpoint of its own.
"""

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from curvax import _jax, _slicing
from curvax._errors import check_size
from curvax._tree import as_key
from curvax._types import Array, Carry, PyTree, Size
from curvax.loops.scan_program import Outputs, ScanProgram, scan_length, unroll_within
from curvax.memory.budget import Budget
from curvax.memory.compiled import Objective, PlanFor, check_budget, plan_call

DEFAULT_LEVELS = 2

State: TypeAlias = tuple[Carry, PyTree]
"""Of the outermost loop: the carry, and the buffers for the outputs."""


def checkpointed_scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: PyTree,
    xs: PyTree,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    levels: int | None = None,
    memory_budget: Budget | None = None,
    plan_for: PlanFor = "gradient",
    objective: Objective = "memory",
) -> tuple[PyTree, PyTree]:
    """Scan, with checkpoints inside checkpoints.

    Equal to

        jax.lax.scan(f, init, xs, length, reverse, unroll)

    except for what its gradient remembers. N steps are run as scans nested `levels` deep, each of
    about N^(1/levels) rounds, and the gradient holds the carries of one scan at each level and the
    steps of one innermost scan: O(levels · N^(1/levels)) instead of O(N), for `levels - 1` more
    forward passes. Forward mode and second derivatives work too.

    One level is `jax.lax.scan`, which remembers every step. Two are `checkpoint_chunked_scan` with
    chunks of about √N. The gradient with respect to `xs` is as large as `xs`, and adds up the rows
    of one round at a time.

    Arguments:
        f: the body, `(carry, x) -> (carry, y)`. It is traced once.
        init: the first carry.
        xs: what to scan over, along leading axes, or None.
        length: the number of steps; needed if `xs` has no leaves.
        reverse: run from the last position to the first.
        unroll: the most steps to unroll in the innermost loop.
        levels: how deep the scans are nested. None is two levels. The number of steps need not be
            a power or a product of anything; few steps may need fewer levels than that.
        memory_budget: bytes, in place of `levels`, in any form that `parse_memory` takes. The
            fewest levels are taken, and so the fewest passes, with which the gradient through the
            scan, compiled by itself, allocates no more.
        plan_for: whether the budget is for the "gradient" through the scan, with respect to all
            arrays that it depends on, or for its "value".
        objective: "memory" and "time" both take the fewest levels that fit: with each level more,
            the steps are computed once more.

    Returns:
        The last carry, and all outputs.

    Raises:
        ValueError: if sizes disagree, `levels` is not positive, or a budget is given as well.
        TypeError: if the body changes the type of the carry, or a number is no integer.
        MemoryBudgetError: if no number of levels fits the budget.

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

    # With a budget there is a compiled program, which must not be of what `f` was before.
    body = f if budget is None else _jax.untraced(f)

    def run(levels: int, init: PyTree, xs: PyTree) -> tuple[PyTree, PyTree]:
        program = ScanProgram.of(body, init, xs, length, reverse)
        with program.mesh():
            return run_nested(program, nested_lengths(program.length, levels), unroll)

    if budget is None:
        return run(levels or DEFAULT_LEVELS, init, xs)
    # What is planned is the length of the innermost loop: the longer, the fewer levels.
    steps = scan_length(xs, length)
    most_levels = range(max(1, steps.bit_length()), 0, -1)
    levels_of = {nested_lengths(steps, levels)[-1]: levels for levels in most_levels}
    build = lambda size: lambda init, xs: run(levels_of[_at_most(levels_of, size)], init, xs)
    key = "checkpointed_scan", length, bool(reverse), as_key(unroll)
    largest = replace(budget, objective="memory")
    plan = plan_call(largest, f, build, (init, xs), {}, sorted(levels_of), key=key)
    return plan(init, xs)


def _at_most(sizes: Iterable[int], size: int) -> int:
    return max(given for given in sizes if given <= max(size, min(sizes)))


def nested_lengths(length: int, levels: int) -> tuple[int, ...]:
    """The lengths of at most `levels` nested loops over so many steps, outermost first.

    They are about equal, which makes their sum small. Among lengths within a quarter of that one
    is preferred that leaves no remainder, which would be one more body to compile. Else the product
    exceeds `length`, and the outermost loop ends early.
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


def _root(number: int, degree: int) -> int:
    """The least integer whose power of that degree is at least a positive number."""
    root = max(1, round(number ** (1 / degree)) - 1)
    while root**degree < number:
        root += 1
    return root


def run_nested(
    program: ScanProgram, lengths: tuple[int, ...], unroll: int | bool
) -> tuple[Carry, PyTree]:
    """All steps of a program, in nested loops of these lengths, outermost first.

    The first length is only a guide: the outermost loop has as many rounds as the steps fill, be it
    more or fewer. What is left runs after it.
    """
    unroll_within(unroll, program.length)
    nest = _Nest(lengths, unroll)
    if len(lengths) == 1:
        return nest.run(program, program.init, 0, 0, program.length)
    outputs = Outputs(program, program.length)

    # Only at the top are outputs written into buffers: further down no steps are left over, and
    # stacked outputs are in their places.
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
        # By way of what is left, or the gradient would add up an array like `xs` for every digit.
        done = program.length - rest
        last, _ = _narrowed(last, done, rest)
        count, rest = divmod(rest, nest.size(depth))
        if count:
            state = run_and_write(last, state, done, depth, count, alone=True)
    carry, buffers = state
    return carry, outputs.finish(buffers)


@dataclass(frozen=True)
class _Nest:
    """Loops inside loops, of these lengths, outermost first."""

    lengths: tuple[int, ...]
    unroll: int | bool

    def size(self, depth: int) -> int:
        """The steps that one round of the loop at that depth takes."""
        return math.prod(self.lengths[depth + 1 :])

    def run(
        self, program: ScanProgram, carry: Carry, time: Size, depth: int, count: int
    ) -> tuple[Carry, PyTree]:
        """`count` rounds of the loop at that depth, and all they put out, by position."""
        within, xs = _narrowed(program, time, count * self.size(depth))
        if depth == len(self.lengths) - 1:
            most = unroll_within(self.unroll, count)
            return lax.scan(program.f, carry, xs, count, program.reverse, most)
        # In a loop the compiler cannot merge the two passes; outside it must be kept from it.
        run_round = jax.checkpoint(
            lambda carry, time: self.run(within, carry, time, depth + 1, self.lengths[depth + 1]),
            prevent_cse=count == 1,
        )
        if count == 1:
            return run_round(carry, time)
        times = time + self.size(depth) * jnp.arange(count)
        # Scanned over by position, so that outputs are stacked by position.
        times = times[::-1] if program.reverse else times
        carry, ys = lax.scan(run_round, carry, times, reverse=program.reverse)
        return carry, jax.tree.map(lambda leaf: lax.collapse(leaf, 0, 2), ys)


def _narrowed(program: ScanProgram, time: Size, count: int) -> tuple[ScanProgram, PyTree]:
    """The program for use in a loop over so many successive steps, and what these read of `xs`.

    The derivative with respect to `xs` goes by way of the rows of each enclosing loop in turn, for
    the reason that `ScanProgram.within` gives. The values come from `xs` in place: only the
    innermost loop makes use of the rows, so only there are they read.
    """
    if program.span is None:
        narrowed = program.within(time, count)
    else:
        begin, span = program.span
        rows = program.rows(time, count)
        rows_of_span = _slicing.Rows(rows.start - begin, count)

        def read(leaf: Array, spanned: Array) -> Array:
            value = _slicing.read(leaf, rows, 0)
            if not jnp.issubdtype(leaf.dtype, jnp.inexact):
                return value
            return _slicing.differentiated_as(value, _slicing.read(spanned, rows_of_span, 0))

        narrowed = replace(program, span=(rows.start, jax.tree.map(read, program.xs, span)))
    assert narrowed.span is not None
    return narrowed, narrowed.span[1]


def checkpoint_chunked_scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: PyTree,
    xs: PyTree,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    chunk_size: int | None = None,
    memory_budget: Budget | None = None,
    plan_for: PlanFor = "gradient",
    objective: Objective = "memory",
) -> tuple[PyTree, PyTree]:
    """Scan, with a checkpoint every `chunk_size` steps.

    Equal to

        jax.lax.scan(f, init, xs, length, reverse, unroll)

    except for what its gradient remembers: the carry at the start of each chunk, instead of all
    that every step computed. The backward pass runs the steps of one chunk again at a time. So N
    steps in chunks of c hold N/c carries and c steps: chunks of √N need O(√N) instead of O(N),
    for one more forward pass. Forward mode and second derivatives work too.

    Arguments:
        f: the body, `(carry, x) -> (carry, y)`. It is traced once.
        init: the first carry.
        xs: what to scan over, along leading axes, or None.
        length: the number of steps; needed if `xs` has no leaves.
        reverse: run from the last position to the first.
        unroll: the most steps to unroll.
        chunk_size: steps from one checkpoint to the next, the first being before the first step.
            It need not divide the number of steps. None is one chunk of all steps.
        memory_budget: bytes, in place of `chunk_size`, in any form that `parse_memory` takes. The
            largest chunk is taken with which the gradient through the scan, compiled by itself,
            allocates no more.
        plan_for: whether the budget is for the "gradient" through the scan, with respect to all
            arrays that it depends on, or for its "value".
        objective: "memory" takes the largest chunk that fits; "time" one that is fast by a
            rule: on a CPU its temporaries stay in the cache, elsewhere it is the largest.

    Returns:
        The last carry, and all outputs.

    Raises:
        ValueError: if sizes disagree, `chunk_size` is not positive, or a budget is given as well.
        TypeError: if the body changes the type of the carry, or a size is no integer.
        MemoryBudgetError: if no chunk size fits the budget.

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
    # With a budget there is a compiled program, which must not be of what `f` was before.
    body = f if budget is None else _jax.untraced(f)

    def run(size: int | None, init: PyTree, xs: PyTree) -> tuple[PyTree, PyTree]:
        program = ScanProgram.of(body, init, xs, length, reverse)
        with program.mesh():
            chunk = max(1, min(size or program.length, program.length))
            return run_nested(program, (1, chunk), unroll)  # Two levels: chunks, and their steps.

    if budget is None:
        return run(chunk_size, init, xs)
    build = lambda size: functools.partial(run, size)
    steps = scan_length(xs, length)
    # The gradient holds a carry for each chunk, and the steps of one: small chunks need the most.
    sizes = range(max(1, math.isqrt(steps) // 4), max(1, steps) + 1)
    key = "checkpoint_chunked_scan", length, bool(reverse), as_key(unroll)
    plan = plan_call(budget, f, build, (init, xs), {}, sizes, key=key)
    return plan(init, xs)


_ADVICE = "What else helps: checkpointed_scan, whose nested checkpoints need less."
