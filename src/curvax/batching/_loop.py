"""The one loop behind every map.

`reduce_chunks` runs a function on the chunks of a plan, one after the other, and gives each value
to a reducer. Successive chunks of one size share one loop body; a chunk that stands alone is run
without a loop. Inputs are read, and collected outputs written, in place (`curvax._rows`), so that
beside the inputs and the result only one chunk exists at a time.

On a mesh, each device runs the loop on its share of the examples.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from curvax import _compat, _rows
from curvax._types import Array, Carry, Fun, PyTree, Size
from curvax.batching._plan import Chunk, ChunkPlan, Run
from curvax.batching._reducers import Reducer, SharedReducer
from curvax.batching._shares import Share

__all__ = ["first_value", "reduce_chunks", "trace_once"]

Compute = Callable[[Sequence[Array]], PyTree]


def trace_once(fun: Fun, plan: ChunkPlan, limit: Size | None, share: Share | None = None) -> Fun:
    """`fun`, traced once for each shape of its array arguments, however often it is called.

    The loop asks for the shape of a value before it computes any, and a plan with chunks of two
    sizes has two bodies; the user's function shall not notice. Where there is no loop, on one
    device, it is called directly.
    """
    return fun if share is None and _no_loop(plan, limit) else _compat.inlined(fun)


def first_value(
    compute: Compute, arrays: Sequence[Array], axes: Sequence[int], plan: ChunkPlan
) -> PyTree:
    """`compute(chunk of arrays)` for the first chunk of `plan`."""
    return _values(compute, arrays, axes, plan)(_first(plan))


def reduce_chunks(
    compute: Compute,
    arrays: Sequence[Array],
    axes: Sequence[int],
    plan: ChunkPlan,
    make_reducer: Callable[[PyTree], Reducer],
    *,
    limit: Size | None = None,
    checkpoint: bool = False,
    share: Share | None = None,
) -> PyTree:
    """Reduce `compute(chunk of arrays)` over the chunks of `plan`.

    `make_reducer` gets the shapes of the first value. Only the first `limit` chunks are run if it
    is given; a traced limit gives a loop that cannot be differentiated in reverse. `checkpoint`
    computes each chunk again in the backward pass instead of saving what that needs. With a
    `share`, the arrays are what one device has of them, and the result is of all devices.
    """
    value_of = _values(compute, arrays, axes, plan)

    def forgetful_value_of(chunk: Chunk) -> PyTree:
        policy = None if checkpoint else _rows.save_all_but_reads
        # In a loop the compiler cannot merge the two passes; outside it must be kept from it.
        prevent_cse = checkpoint and chunk.run.count == 1
        compute_at = lambda index: value_of(replace(chunk, index=index))
        checkpointed = jax.checkpoint(compute_at, policy=policy, prevent_cse=prevent_cse)
        return jax.tree.map(jnp.asarray, checkpointed(chunk.index))

    first = _first(plan)
    if _no_loop(plan, limit):
        value = forgetful_value_of(first) if checkpoint else value_of(first)
        reducer = make_reducer(jax.eval_shape(lambda: value))
        return _result(reducer, reducer.update(reducer.init(), value, first), plan.length, share)

    with _compat.mesh_of(arrays):
        # JAX cannot checkpoint side effects; a function that has some remembers what it read.
        effects = _compat.has_effects(lambda: value_of(first))
        value_in_loop = value_of if effects and not checkpoint else forgetful_value_of
        reducer = make_reducer(jax.eval_shape(lambda: value_in_loop(first)))
        has_last = share.has_last() if share is not None and plan.optional_last else None
        carry = _run_all(value_in_loop, reducer, plan, limit, has_last)
        return _result(reducer, carry, _examples(plan, limit, has_last), share)


def _values(
    compute: Compute, arrays: Sequence[Array], axes: Sequence[int], plan: ChunkPlan
) -> Callable[[Chunk], PyTree]:
    """The value of each chunk."""
    sources = [(plan.lay_out(x, axis), axis) for x, axis in zip(arrays, axes, strict=True)]

    def value_of(chunk: Chunk) -> PyTree:
        value = compute([_rows.read(x, chunk.rows, axis) for x, axis in sources])
        return jax.tree.map(jnp.asarray, value)

    return value_of


def _first(plan: ChunkPlan) -> Chunk:
    return Chunk(plan, plan.runs()[0], 0)


def _result(reducer: Reducer, carry: Carry, examples: Size, share: Share | None) -> PyTree:
    if share is None:
        return reducer.finalize(carry, examples)
    assert isinstance(reducer, SharedReducer)
    return reducer.finalize_all(carry, examples, share)


def _no_loop(plan: ChunkPlan, limit: Size | None) -> bool:
    return plan.num_chunks == 1 and limit is None and not plan.optional_last


def _run_all(
    value_of: Callable[[Chunk], PyTree],
    reducer: Reducer,
    plan: ChunkPlan,
    limit: Size | None,
    has_last: Array | None,
) -> Carry:
    runs = plan.runs(limit)
    carry = reducer.init()
    # The number of the next chunk is handed on from run to run, and the compiler is kept from
    # seeing that it knows it. Else it computes a chunk that stands alone beside the loop or beside
    # another one, and holds two at a time.
    handed_on = len(runs) > 1
    number = lax.optimization_barrier(jnp.int32(0)) if handed_on else 0
    for run in runs:

        def body(index: Size, state: tuple[Size, Carry], run: Run = run) -> tuple[Size, Carry]:
            number, carry = state
            chunk = Chunk(plan, run, number if handed_on else index)
            value = value_of(chunk)
            if handed_on:
                number = number + 1 + (_rows.zero_after(value) if run.count == 1 else 0)
            return number, reducer.update(carry, value, chunk)

        last = run.first + run.count
        if isinstance(limit, jax.Array):
            last = jnp.clip(limit, run.first, last)
            number, carry = lax.fori_loop(run.first, last, body, (number, carry))
        elif run.count > 1:
            number, carry = lax.fori_loop(run.first, last, body, (number, carry))
        elif has_last is not None and run is runs[-1]:
            # Not a loop of at most one step, which has no reverse derivative.
            step = lambda state, run=run, body=body: body(run.first, state)
            number, carry = lax.cond(has_last, step, lambda state: state, (number, carry))
        else:
            number, carry = body(run.first, (number, carry))
    return carry


def _examples(plan: ChunkPlan, limit: Size | None, has_last: Array | None) -> Size:
    """How many examples the first `limit` chunks hold."""
    if has_last is not None:
        return plan.length - 1 + has_last.astype(jnp.int32)
    if isinstance(limit, jax.Array):
        return sum(jnp.clip(limit - run.first, 0, run.count) * run.size for run in plan.runs())
    return sum(run.count * run.size for run in plan.runs(limit))
