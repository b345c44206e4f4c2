"""A vectorised function over chunks: `map_chunks`, which every map of examples is made of.

`map_indices` and `reduce_indices` are for what is told apart by its number alone.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from curvax import _jax, _slicing
from curvax._types import Array, Axes, Carry, Fun, Order, PyTree, Size, VmapFn
from curvax.maps.accumulators import AccumulationType, Accumulator, Reducer, Reduction
from curvax.maps.arguments import Batch
from curvax.maps.chunk_plan import Chunk, ChunkPlan, Run, check_limit
from curvax.maps.sharding import BatchSharding

Compute = Callable[[Sequence[Array]], PyTree]


def trace_once(
    fun: Fun, plan: ChunkPlan, limit: Size | None, sharding: BatchSharding | None = None
) -> Fun:
    """`fun`, traced once for each shape of its array arguments, however often it is called.

    The loop asks for the shape of a value before it computes any, and a plan with chunks of two
    sizes has two bodies; the user's function shall not notice. Where there is no loop, on one
    device, it is called directly.
    """
    return fun if sharding is None and _no_loop(plan, limit) else _jax.inlined(fun)


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
    sharding: BatchSharding | None = None,
) -> PyTree:
    """Reduce `compute(chunk of arrays)` over the chunks of `plan`.

    `make_reducer` gets the shapes of the first value. Only the first `limit` chunks are run if it
    is given; a traced limit gives a loop that cannot be differentiated in reverse. `checkpoint`
    computes each chunk again in the backward pass instead of saving what that needs. With a
    `sharding`, under `shard_map`, the arrays are local shards, and the result is of all devices.

    This is the one loop behind every map. Chunks run one after the other. Successive chunks of one
    size share one loop body; a chunk that stands alone is run without a loop. Inputs are read, and
    collected outputs written, in place (`curvax._slicing`), so that besides the inputs and the
    result only one chunk exists at a time.
    """
    value_of = _values(compute, arrays, axes, plan)

    def forgetful_value_of(chunk: Chunk) -> PyTree:
        policy = None if checkpoint else _slicing.save_all_but_reads
        # In a loop the compiler cannot merge the two passes; outside it must be kept from it.
        prevent_cse = checkpoint and chunk.run.count == 1
        compute_at = lambda index: value_of(replace(chunk, index=index))
        checkpointed = jax.checkpoint(compute_at, policy=policy, prevent_cse=prevent_cse)
        return jax.tree.map(jnp.asarray, checkpointed(chunk.index))

    first = _first(plan)
    if _no_loop(plan, limit):
        value = forgetful_value_of(first) if checkpoint else value_of(first)
        reducer = make_reducer(jax.eval_shape(lambda: value))
        carry = reducer.update(reducer.init(), value, first)
        return reducer.finalize(carry, plan.length, sharding)

    with _jax.mesh_of(arrays):
        # JAX cannot checkpoint side effects; a function that has some remembers what it read.
        effects = _jax.has_effects(lambda: value_of(first))
        value_in_loop = value_of if effects and not checkpoint else forgetful_value_of
        reducer = make_reducer(jax.eval_shape(lambda: value_in_loop(first)))
        has_optional = (
            sharding.has_optional() if sharding is not None and plan.optional_last else None
        )
        carry = _run_all(value_in_loop, reducer, plan, limit, has_optional)
        return reducer.finalize(carry, _examples(plan, limit, has_optional), sharding)


def _values(
    compute: Compute, arrays: Sequence[Array], axes: Sequence[int], plan: ChunkPlan
) -> Callable[[Chunk], PyTree]:
    """The value of each chunk."""
    sources = [(plan.lay_out(x, axis), axis) for x, axis in zip(arrays, axes, strict=True)]

    def value_of(chunk: Chunk) -> PyTree:
        value = compute([_slicing.read(x, chunk.rows, axis) for x, axis in sources])
        return jax.tree.map(jnp.asarray, value)

    return value_of


def _first(plan: ChunkPlan) -> Chunk:
    return Chunk(plan, plan.runs()[0], 0)


def _no_loop(plan: ChunkPlan, limit: Size | None) -> bool:
    return plan.num_chunks == 1 and limit is None and not plan.optional_last


def _run_all(
    value_of: Callable[[Chunk], PyTree],
    reducer: Reducer,
    plan: ChunkPlan,
    limit: Size | None,
    has_optional: Array | None,
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
                number = number + 1 + (_slicing.zero_after(value) if run.count == 1 else 0)
            return number, reducer.update(carry, value, chunk)

        last = run.first + run.count
        if isinstance(limit, jax.Array):
            last = jnp.clip(limit, run.first, last)
            number, carry = lax.fori_loop(run.first, last, body, (number, carry))
        elif run.count > 1:
            number, carry = lax.fori_loop(run.first, last, body, (number, carry))
        elif has_optional is not None and run is runs[-1]:
            # Not a loop of at most one step, which has no reverse derivative.
            step = lambda state, run=run, body=body: body(run.first, state)
            number, carry = lax.cond(has_optional, step, lambda state: state, (number, carry))
        else:
            number, carry = body(run.first, (number, carry))
    return carry


def _examples(plan: ChunkPlan, limit: Size | None, has_optional: Array | None) -> Size:
    """How many examples the first `limit` chunks hold."""
    if has_optional is not None:
        return plan.length - 1 + has_optional.astype(jnp.int32)
    if isinstance(limit, jax.Array):
        return sum(jnp.clip(limit - run.first, 0, run.count) * run.size for run in plan.runs())
    return sum(run.count * run.size for run in plan.runs(limit))


Arrays = Sequence[Array]


def reduce_batch(
    compute: Callable[[Arrays, Arrays], PyTree],
    batch: Batch,
    reduction: Reduction,
    *,
    checkpoint: bool = False,
) -> PyTree:
    """Reduce `compute(unbatched, chunk of arrays)` over the chunks of the batch.

    `unbatched` are the batch's other arrays, as the device has them that computes.

    On a mesh every device runs that loop on its shard of the examples, under `shard_map`. Batched
    arrays are sharded along their batch axes, others replicated. How a result is sharded is up to
    the reducer, which is made for the shapes of a value; so the function is traced first, where it
    will run, and that is the only time that it is.
    """
    plan, sharding = reduction.plan, reduction.sharding

    def reduce(arrays: Arrays, unbatched: Arrays, limit: Size | None) -> PyTree:
        return reduce_chunks(
            lambda chunk: compute(unbatched, chunk),
            arrays,
            batch.axes,
            plan,
            reduction.reducer,
            limit=limit,
            checkpoint=checkpoint,
            sharding=sharding,
        )

    if sharding is None:
        return reduce(batch.arrays, batch.unbatched, reduction.limit)

    traced_limit = reduction.limit if isinstance(reduction.limit, jax.Array) else None
    axis = sharding.axis
    in_specs = tuple(map(axis.spec, batch.axes)), PartitionSpec(), PartitionSpec()

    def first(arrays: Arrays, unbatched: Arrays, limit: Size | None) -> PyTree:
        del limit
        return first_value(lambda chunk: compute(unbatched, chunk), arrays, batch.axes, plan)

    def on_device(arrays: Arrays, unbatched: Arrays, limit: Size | None) -> PyTree:
        return reduce(arrays, unbatched, reduction.limit if limit is None else limit)

    def run(arrays: Arrays, *others: PyTree) -> PyTree:
        padded = tuple(map(sharding.pad, arrays, batch.axes))
        value = jax.eval_shape(axis.shard_map(first, in_specs, PartitionSpec()), padded, *others)
        specs = reduction.reducer(value).specs(sharding)
        return axis.shard_map(on_device, in_specs, specs)(padded, *others)

    axis.check_outside()
    for name, leaf in zip(batch.names, batch.leaves, strict=True):
        axis.check_placement(name, leaf)
    return jax.jit(run)(batch.arrays, batch.unbatched, traced_limit)


def map_chunks(
    example: Callable[[Batch, Sequence[Array]], Any],
    batch: Batch,
    size: int | None,
    *,
    order: Order = "contiguous",
    out_axes: Axes = 0,
    accumulator: PyTree = AccumulationType.CONCAT,
    vmap_fn: VmapFn = jax.vmap,
    limit: Size | None = None,
    checkpoint: bool = False,
    sharding: BatchSharding | None = None,
) -> PyTree:
    """Call `example`, vectorised, on each chunk of the batch's arrays; combine the outputs.

    It gets the batch, whose other arrays it may use, and an example of each of the arrays.
    """
    if sharding is None:
        plan = ChunkPlan.of(batch.length, size, order)
    else:
        plan, batch = sharding.plan(size, order), batch.with_unbatched()
        sharding.check_limit(limit, plan)
        vmap_fn = _on_local_shard(vmap_fn, sharding)
    limit = check_limit(limit, plan)
    plan = _without_scattered_rows(plan, accumulator, limit, sharding)
    # Examples come out along axis 0; where they go in the result is the reducer's business.
    examples_first = jax.tree.map(lambda axis: 0, out_axes)
    once = trace_once(
        lambda unbatched, *arrays: example(replace(batch, unbatched=unbatched), arrays),
        plan,
        limit,
        sharding,
    )

    def compute(unbatched: Sequence[Array], arrays: Sequence[Array]) -> PyTree:
        vectorised = vmap_fn(lambda *row: once(unbatched, *row), batch.axes, examples_first)
        return vectorised(*arrays)

    reduction = Reduction(accumulator, out_axes, plan, True, limit, sharding)
    return reduce_batch(compute, batch, reduction, checkpoint=checkpoint)


def map_indices(
    fun: Callable[[Array], PyTree],
    length: int,
    size: int,
    *,
    out_axes: Axes = 0,
    each_chunk: Callable[[], None] | None = None,
) -> PyTree:
    """`fun` of each number below `length`, for `size` of them at a time, collected."""
    plan = ChunkPlan.of(length, size)
    kind = AccumulationType.CONCAT
    reduction = Reduction(kind, out_axes, plan, per_example=True, limit=None)
    return reduce_indices(fun, length, size, reduction.reducer, each_chunk=each_chunk)


def reduce_indices(
    fun: Callable[[Array], PyTree],
    length: int,
    size: int,
    make_reducer: Callable[[PyTree], Reducer],
    *,
    each_chunk: Callable[[], None] | None = None,
) -> PyTree:
    """`fun` of each number below `length`, for `size` of them at a time, given to a reducer.

    `each_chunk` is called with each chunk, when that is traced.
    """
    plan = ChunkPlan.of(length, size)
    vectorised = jax.vmap(trace_once(fun, plan, None))

    def compute(arrays: Sequence[Array]) -> PyTree:
        if each_chunk is not None:
            each_chunk()
        return vectorised(*arrays)

    numbers = jnp.arange(length, dtype=jnp.int32)
    return reduce_chunks(compute, (numbers,), (0,), plan, make_reducer)


def _without_scattered_rows(
    plan: ChunkPlan, accumulator: PyTree, limit: Size | None, sharding: BatchSharding | None
) -> ChunkPlan:
    """Return a contiguous plan in place of a strided one that gives the same result.

    Which examples are computed together shows only where a loop stops early, or to an
    `Accumulator`. But an even strided plan keeps a sharded batch axis sharded, and while a program
    is traced nobody knows whether it is, unless the arrays are local shards under `shard_map`.
    """
    is_seen = limit is not None or any(
        isinstance(kind, Accumulator) for kind in jax.tree.leaves(accumulator)
    )
    keeps_sharded = len(plan.runs()) == 1 and sharding is None
    if plan.order == "contiguous" or is_seen or keeps_sharded:
        return plan
    return ChunkPlan(plan.length, plan.size).balanced()


def _on_local_shard(vmap_fn: VmapFn, sharding: BatchSharding) -> VmapFn:
    """Return `vmap_fn` for use under `shard_map`.

    Its `spmd_axis_name` says that examples are sharded along an axis of the mesh. A local shard is
    not sharded any further along the axes of the `shard_map`.
    """
    if not isinstance(vmap_fn, functools.partial):
        return vmap_fn
    name = vmap_fn.keywords.get("spmd_axis_name")
    names = {name} if isinstance(name, str) else set(name or ())
    if not names or not names <= set(sharding.axis.names):
        return vmap_fn
    return functools.partial(vmap_fn, spmd_axis_name=None)
