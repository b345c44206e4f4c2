"""`checkpoint_chunked_scan`: a scan whose gradient remembers one carry for each chunk of steps."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from curvax import _compat
from curvax._checks import check_size
from curvax._tree import as_key
from curvax._types import Carry, PyTree, Size
from curvax.loops._program import Outputs, ScanProgram, scan_length, unroll_within
from curvax.memory import Budget, BudgetRequest, Objective, PlanFor

__all__ = ["checkpoint_chunked_scan"]


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
        objective: "memory" takes the largest chunk that fits, "time" the fastest of some.

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
    where = "curvax.checkpoint_chunked_scan"
    chunk_size = check_size("chunk_size", chunk_size, where)
    sizes = {"chunk_size": chunk_size}
    budget = BudgetRequest.of(
        memory_budget, sizes, where, plan_for=plan_for, objective=objective, advice=_ADVICE
    )
    if budget is None:
        program = ScanProgram.of(f, init, xs, length, reverse, where)
        return _run_chunks(program, chunk_size or max(1, program.length), unroll, where)

    body = _compat.untraced(f)  # A compiled program must not be of what `f` was before.

    def build(size: int) -> Callable[..., tuple[PyTree, PyTree]]:
        return lambda init, xs: _run_chunks(
            ScanProgram.of(body, init, xs, length, reverse, where), size, unroll, where
        )

    steps = scan_length(xs, length, where)
    # The gradient holds a carry for each chunk, and the steps of one: small chunks need the most.
    sizes = range(max(1, math.isqrt(steps) // 4), max(1, steps) + 1)
    key = where, length, bool(reverse), as_key(unroll)
    return budget.run(f, build, (init, xs), {}, sizes, key=key)


_ADVICE = "What else helps: checkpointed_scan, whose nested checkpoints need less."


def _run_chunks(
    program: ScanProgram, size: int, unroll: int | bool, where: str
) -> tuple[PyTree, PyTree]:
    size = min(size, max(1, program.length))
    within = unroll_within(unroll, size, where)
    outputs = Outputs(program, program.length)
    num_full, rest = divmod(program.length, size)

    def chunk(state: tuple[Carry, PyTree], time: Size, count: int, alone: bool) -> Any:
        carry, buffers = state
        # In a loop the compiler cannot merge the two passes; outside it must be kept from it.
        run = jax.checkpoint(
            lambda carry, time: program.steps(carry, time, count, min(within, count)),
            prevent_cse=alone,
        )
        carry, ys = run(carry, time)
        return carry, outputs.write(buffers, ys, program.rows(time, count))

    state = program.init, outputs.allocate()
    if num_full > 1:
        body = lambda state, number: (chunk(state, number * size, size, alone=False), None)
        state = lax.scan(body, state, jnp.arange(num_full))[0]
    elif num_full == 1:
        state = chunk(state, 0, size, alone=True)
    if rest:
        state = chunk(state, num_full * size, rest, alone=True)
    carry, buffers = state
    return carry, outputs.finish(buffers)
