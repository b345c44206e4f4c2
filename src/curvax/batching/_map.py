"""A vectorised function over chunks: `map_chunks`, which every map of examples is made of.

`map_indices` and `reduce_indices` are for what is told apart by its number alone.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from curvax._types import Array, Axes, Order, PyTree, Size, VmapFn
from curvax.batching._accumulators import AccumulationType, Accumulator, Reduction
from curvax.batching._arguments import Batch
from curvax.batching._loop import reduce_chunks, trace_once
from curvax.batching._on_mesh import reduce_batch
from curvax.batching._plan import ChunkPlan, check_limit
from curvax.batching._reducers import Reducer
from curvax.batching._shares import Share

__all__ = ["map_chunks", "map_indices", "reduce_indices"]


def map_chunks(
    example: Callable[[Batch, Sequence[Array]], Any],
    batch: Batch,
    size: int | None,
    *,
    where: str,
    order: Order = "contiguous",
    out_axes: Axes = 0,
    accumulator: PyTree = AccumulationType.CONCAT,
    vmap_fn: VmapFn = jax.vmap,
    limit: Size | None = None,
    checkpoint: bool = False,
    share: Share | None = None,
) -> PyTree:
    """Call `example`, vectorised, on each chunk of the batch's arrays; combine the outputs.

    It gets the batch, whose other arrays it may use, and an example of each of the arrays.
    """
    if share is None:
        plan = ChunkPlan.of(batch.length, size, order)
    else:
        plan, batch = share.plan(size, order), batch.with_shared()
        share.check_limit(limit, plan, where)
        vmap_fn = _on_each(vmap_fn, share)
    limit = check_limit(limit, plan, where)
    plan = _fastest(plan, accumulator, limit, share)
    # Examples come out along axis 0; where they go in the result is the reducer's business.
    examples_first = jax.tree.map(lambda axis: 0, out_axes)
    once = trace_once(
        lambda shared, *arrays: example(replace(batch, shared=shared), arrays), plan, limit, share
    )

    def compute(shared: Sequence[Array], arrays: Sequence[Array]) -> PyTree:
        vectorised = vmap_fn(lambda *row: once(shared, *row), batch.axes, examples_first)
        return vectorised(*arrays)

    reduction = Reduction(accumulator, out_axes, plan, True, limit, where, share)
    return reduce_batch(compute, batch, reduction, checkpoint=checkpoint)


def map_indices(
    fun: Callable[[Array], PyTree],
    length: int,
    size: int,
    *,
    where: str,
    out_axes: Axes = 0,
    limit: int | None = None,
    each_chunk: Callable[[], None] | None = None,
) -> PyTree:
    """`fun` of each number below `length`, for `size` of them at a time, collected."""
    plan = ChunkPlan.of(length, size)
    kind = AccumulationType.CONCAT
    reduction = Reduction(kind, out_axes, plan, per_example=True, limit=limit, where=where)
    return reduce_indices(fun, length, size, reduction.reducer, limit=limit, each_chunk=each_chunk)


def reduce_indices(
    fun: Callable[[Array], PyTree],
    length: int,
    size: int,
    make_reducer: Callable[[PyTree], Reducer],
    *,
    limit: int | None = None,
    each_chunk: Callable[[], None] | None = None,
) -> PyTree:
    """`fun` of each number below `length`, for `size` of them at a time, given to a reducer.

    `each_chunk` is called with each chunk, when that is traced.
    """
    plan = ChunkPlan.of(length, size)
    limit = None if limit is None or limit >= plan.num_chunks else limit
    vectorised = jax.vmap(trace_once(fun, plan, limit))

    def compute(arrays: Sequence[Array]) -> PyTree:
        if each_chunk is not None:
            each_chunk()
        return vectorised(*arrays)

    numbers = jnp.arange(length, dtype=jnp.int32)
    return reduce_chunks(compute, (numbers,), (0,), plan, make_reducer, limit=limit)


def _fastest(
    plan: ChunkPlan, accumulator: PyTree, limit: Size | None, share: Share | None
) -> ChunkPlan:
    """The plan itself, or one that gives the same result sooner.

    Which examples are computed together can only be told from where a loop stops early or from an
    accumulator that sees it run. Otherwise a strided plan, whose rows are scattered, may as well be
    contiguous, unless it keeps a sharded axis sharded: it does if it is even and there is more
    than one device, of which each does not just have its share.
    """
    told = limit is not None or any(
        isinstance(kind, Accumulator) for kind in jax.tree.leaves(accumulator)
    )
    stays_sharded = len(plan.runs()) == 1 and jax.device_count() > 1 and share is None
    if plan.order == "contiguous" or told or stays_sharded:
        return plan
    return ChunkPlan(plan.length, plan.size).balanced()


def _on_each(vmap_fn: VmapFn, share: Share) -> VmapFn:
    """`vmap_fn` as devices use it that have a share of the examples each.

    With `spmd_axis_name` it says that examples are split along an axis of the mesh. Of what a
    device has, nothing is split along the axes that made the shares.
    """
    if not isinstance(vmap_fn, functools.partial):
        return vmap_fn
    name = vmap_fn.keywords.get("spmd_axis_name")
    names = {name} if isinstance(name, str) else set(name or ())
    if not names or not names <= set(share.devices.names):
        return vmap_fn
    return functools.partial(vmap_fn, spmd_axis_name=None)
