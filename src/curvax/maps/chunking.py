"""The loop over chunks: `map_chunks`, on which every map over examples is built.

`map_indices` and `reduce_indices` map a function over `0, 1, …, length - 1` instead of over arrays.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

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

Arrays = Sequence[Array]
Compute = Callable[[Arrays], PyTree]


def trace_once(
    fun: Fun, plan: ChunkPlan, limit: Size | None, sharding: BatchSharding | None = None
) -> Fun:
    """Return `fun`, traced once for each shape of its array arguments, however often it is called.

    `reduce_chunks` evaluates the shape of a value before it computes any, and a plan with chunks of
    two sizes has two loop bodies; neither should trace a user-supplied function again. Where there
    is no loop, on one device, `fun` is called directly.
    """
    return fun if sharding is None and _is_single_chunk(plan, limit) else _jax.inlined(fun)


def first_value(compute: Compute, arrays: Arrays, axes: Sequence[int], plan: ChunkPlan) -> PyTree:
    """Return `compute(chunk of arrays)` for the first chunk of `plan`."""
    return _on_chunk(compute, arrays, axes, plan)(_first_chunk(plan))


def reduce_chunks(
    compute: Compute,
    arrays: Arrays,
    axes: Sequence[int],
    plan: ChunkPlan,
    make_reducer: Callable[[PyTree], Reducer],
    *,
    limit: Size | None = None,
    checkpoint: bool = False,
    sharding: BatchSharding | None = None,
) -> PyTree:
    """Reduce `compute(chunk of arrays)` over the chunks of `plan`.

    Every map runs this loop. Chunks run sequentially. Successive chunks of equal size share one
    loop body; a chunk without such a neighbour runs outside any loop. Inputs are read, and
    collected outputs written, in place (`curvax._slicing`), so that only one chunk is alive at a
    time besides the inputs and the result.

    Arguments:
        compute: Function of one chunk of the arrays.
        arrays: The batched arrays.
        axes: The batch axis of each of them.
        plan: The chunks.
        make_reducer: Return the reducer, given the shapes of the first value.
        limit: Number of chunks to run, None for all. If traced, the loop has no reverse-mode
            derivative.
        checkpoint: Recompute each chunk in the backward pass instead of saving its residuals.
        sharding: How examples are sharded. The call is then under `shard_map`, the arrays are
            local shards, and the result is over those of all devices.

    Returns:
        What the reducer returns at the end.
    """
    value_of = _on_chunk(compute, arrays, axes, plan)

    def rematerialised_value_of(chunk: Chunk) -> PyTree:
        policy = None if checkpoint else _slicing.save_all_but_reads
        # XLA cannot merge the forward and the backward pass of a loop by common-subexpression
        # elimination, but it can outside of one.
        prevent_cse = checkpoint and chunk.run.count == 1
        compute_at = lambda index: value_of(replace(chunk, index=index))
        checkpointed = jax.checkpoint(compute_at, policy=policy, prevent_cse=prevent_cse)
        return jax.tree.map(jnp.asarray, checkpointed(chunk.index))

    first = _first_chunk(plan)
    if _is_single_chunk(plan, limit):
        value = rematerialised_value_of(first) if checkpoint else value_of(first)
        reducer = make_reducer(jax.eval_shape(lambda: value))
        carry = reducer.update(reducer.init(), value, first)
        return reducer.finalize(carry, plan.length, sharding)

    with _jax.mesh_of(arrays):
        # JAX cannot checkpoint side effects, so a function that has some saves the rows it reads.
        effects = _jax.has_effects(lambda: value_of(first))
        value_in_loop = value_of if effects and not checkpoint else rematerialised_value_of
        reducer = make_reducer(jax.eval_shape(lambda: value_in_loop(first)))
        has_optional = (
            sharding.has_optional() if sharding is not None and plan.optional_last else None
        )
        carry = _run_all(value_in_loop, reducer, plan, limit, has_optional)
        return reducer.finalize(carry, _num_examples(plan, limit, has_optional), sharding)


def _on_chunk(
    compute: Compute, arrays: Arrays, axes: Sequence[int], plan: ChunkPlan
) -> Callable[[Chunk], PyTree]:
    """Return `compute` as a function of a chunk of the plan."""
    sources = [(plan.lay_out(x, axis), axis) for x, axis in zip(arrays, axes, strict=True)]

    def value_of(chunk: Chunk) -> PyTree:
        value = compute([_slicing.read(x, chunk.rows, axis) for x, axis in sources])
        return jax.tree.map(jnp.asarray, value)

    return value_of


def _first_chunk(plan: ChunkPlan) -> Chunk:
    return Chunk(plan, plan.runs()[0], 0)


def _is_single_chunk(plan: ChunkPlan, limit: Size | None) -> bool:
    """Return whether the plan is one chunk that always runs, for which no loop is needed."""
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
    # With several runs, the index of the next chunk is part of the loop state and hidden from the
    # compiler. Otherwise XLA sees that runs are independent and schedules a single chunk
    # concurrently with a loop or with another chunk, so that two chunks are alive at a time.
    is_chained = len(runs) > 1
    next_index = lax.optimization_barrier(jnp.int32(0)) if is_chained else 0
    for run in runs:

        def body(index: Size, state: tuple[Size, Carry], run: Run = run) -> tuple[Size, Carry]:
            next_index, carry = state
            chunk = Chunk(plan, run, next_index if is_chained else index)
            value = value_of(chunk)
            if is_chained:
                next_index = next_index + 1 + (_slicing.zero_after(value) if run.count == 1 else 0)
            return next_index, reducer.update(carry, value, chunk)

        state = next_index, carry
        end = run.first + run.count
        if isinstance(limit, jax.Array):
            end = jnp.clip(limit, run.first, end)
        if run.count > 1 or isinstance(limit, jax.Array):
            next_index, carry = lax.fori_loop(run.first, end, body, state)
        elif has_optional is not None and run is runs[-1]:
            # A loop of at most one step would have no reverse-mode derivative.
            step = lambda state, run=run, body=body: body(run.first, state)
            next_index, carry = lax.cond(has_optional, step, lambda state: state, state)
        else:
            next_index, carry = body(run.first, state)
    return carry


def _num_examples(plan: ChunkPlan, limit: Size | None, has_optional: Array | None) -> Size:
    """Return the number of examples in the first `limit` chunks."""
    if has_optional is not None:
        return plan.length - 1 + has_optional.astype(jnp.int32)
    if isinstance(limit, jax.Array):
        return sum(jnp.clip(limit - run.first, 0, run.count) * run.size for run in plan.runs())
    return sum(run.count * run.size for run in plan.runs(limit))


def reduce_batch(
    compute: Callable[[Arrays, Arrays], PyTree],
    batch: Batch,
    reduction: Reduction,
    *,
    checkpoint: bool = False,
) -> PyTree:
    """Reduce `compute(unbatched, chunk of arrays)` over the chunks of the batch.

    `unbatched` are the other arrays of the batch, as the computing device sees them.

    On a mesh every device runs the loop on its shard of the examples, under `shard_map`. Batched
    arrays are sharded along their batch axes, others replicated. The reducer decides how the result
    is sharded, and it is built for the shapes of a value. So `compute` is first traced under
    `shard_map` for its shapes; with `trace_once` that is the only trace.
    """
    plan, sharding = reduction.plan, reduction.sharding
    compute = jax.named_scope("microbatch")(compute)  # For profiles.

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
    example: Callable[[Batch, Arrays], PyTree],
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
    """Vectorise `example` over each chunk of the batch's arrays and combine the outputs.

    Arguments:
        example: Function of the batch, whose unbatched arrays it may use, and of one example of
            each batched array.
        batch: The arguments of the call.
        size: Maximum number of examples in a chunk, None for all.
        order: How examples are assigned to chunks.
        out_axes: Pytree prefix of the outputs: where CONCAT puts the example axis.
        accumulator: Pytree prefix of the outputs: how each is combined.
        vmap_fn: A function with the signature of `jax.vmap`.
        limit: Number of chunks to run, None for all.
        checkpoint: Recompute each chunk in the backward pass.
        sharding: How the examples are sharded, None without a mesh.

    Returns:
        The combined outputs.
    """
    if sharding is None:
        plan = ChunkPlan.of(batch.length, size, order)
    else:
        plan, batch = sharding.plan(size, order), batch.with_unbatched()
        sharding.check_limit(limit, plan)
        vmap_fn = _on_local_shard(vmap_fn, sharding)
    limit = check_limit(limit, plan)
    plan = _contiguous_unless_observable(plan, accumulator, limit, sharding)
    # Values have examples along axis 0; the reducer moves them to `out_axes`.
    examples_first = jax.tree.map(lambda axis: 0, out_axes)
    once = trace_once(
        lambda unbatched, *arrays: example(replace(batch, unbatched=unbatched), arrays),
        plan,
        limit,
        sharding,
    )

    def compute(unbatched: Arrays, arrays: Arrays) -> PyTree:
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
    """Map `fun` over the indices `0, 1, …, length - 1`, `size` at a time, and concatenate.

    Equal to `jax.vmap(fun, out_axes=out_axes)(jnp.arange(length))`, except that memory holds the
    intermediates of one chunk only. `each_chunk` is called whenever a chunk is traced.
    """
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
    """Reduce `fun` over the indices `0, 1, …, length - 1`, vectorised over `size` at a time.

    `make_reducer` gets the shapes of the first value, with indices along axis 0. `each_chunk` is
    called whenever a chunk is traced.
    """
    plan = ChunkPlan.of(length, size)
    vectorised = jax.vmap(trace_once(fun, plan, None))

    def compute(arrays: Arrays) -> PyTree:
        if each_chunk is not None:
            each_chunk()
        return vectorised(*arrays)

    indices = jnp.arange(length, dtype=jnp.int32)
    return reduce_chunks(compute, (indices,), (0,), plan, make_reducer)


def _contiguous_unless_observable(
    plan: ChunkPlan, accumulator: PyTree, limit: Size | None, sharding: BatchSharding | None
) -> ChunkPlan:
    """Return a contiguous plan in place of a strided one where only rounding can tell them apart.

    It reads rows by a slice, not a gather. The order of examples is observable only if the loop
    stops early, or by an `Accumulator`. An even strided plan is kept nevertheless: it keeps a
    sharded batch axis sharded, and whether the axis is sharded is unknown at trace time, unless the
    arrays are local shards under `shard_map`.
    """
    is_observable = limit is not None or any(
        isinstance(kind, Accumulator) for kind in jax.tree.leaves(accumulator)
    )
    keeps_sharded = len(plan.runs()) == 1 and sharding is None
    if plan.order == "contiguous" or is_observable or keeps_sharded:
        return plan
    # Balanced, so that no chunk is larger than those of the strided plan, which differ by at most
    # one example.
    return ChunkPlan(plan.length, plan.size).balanced()


def _on_local_shard(vmap_fn: VmapFn, sharding: BatchSharding) -> VmapFn:
    """Return `vmap_fn` for use under `shard_map`: without an `spmd_axis_name` of its axes.

    A local shard is not sharded any further along the axes of the `shard_map`.
    """
    if not isinstance(vmap_fn, functools.partial):
        return vmap_fn
    name = vmap_fn.keywords.get("spmd_axis_name")
    names = {name} if isinstance(name, str) else set(name or ())
    if not names or not names <= set(sharding.axis.names):
        return vmap_fn
    return functools.partial(vmap_fn, spmd_axis_name=None)
