"""`map_chunks`: a vectorised function over chunks, which every map of examples is made of."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from curvax._types import Array, Axes, PyTree, Size, VmapFn
from curvax.batching._accumulators import AccumulationType, Reduction
from curvax.batching._arguments import Batch
from curvax.batching._loop import reduce_chunks, trace_once
from curvax.batching._plan import ChunkPlan, check_limit

__all__ = ["map_chunks"]


def map_chunks(
    example: Callable[..., Any],
    batch: Batch,
    plan: ChunkPlan,
    *,
    where: str,
    out_axes: Axes = 0,
    accumulator: PyTree = AccumulationType.CONCAT,
    vmap_fn: VmapFn = jax.vmap,
    limit: Size | None = None,
    checkpoint: bool = False,
) -> PyTree:
    """Call `example`, vectorised, on each chunk of the batch's arrays; combine the outputs."""
    limit = check_limit(limit, plan, where)
    # Examples come out along axis 0; where they go in the result is the reducer's business.
    examples_first = jax.tree.map(lambda axis: 0, out_axes)
    vectorised = vmap_fn(trace_once(example, plan, limit), batch.axes, examples_first)

    def compute(arrays: Sequence[Array]) -> PyTree:
        return vectorised(*arrays)

    reduction = Reduction(accumulator, out_axes, plan, per_example=True, limit=limit, where=where)
    return reduce_chunks(
        compute,
        batch.arrays,
        batch.axes,
        plan,
        reduction.reducer,
        limit=limit,
        checkpoint=checkpoint,
    )
