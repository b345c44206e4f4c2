"""`reduce_batch`: the loop over the chunks of a batch, on one device or on all those of a mesh.

On a mesh the loop is that of one device, run by each on its share of the examples. Batched arrays
are split along their own axes; the others are there whole on every device. How a result is split
depends on what becomes of it. So the reducer is asked first, and for that the function is traced
in the place where it will run, which is the only time that it is.
"""

from collections.abc import Callable, Sequence

import jax
from jax.sharding import PartitionSpec

from curvax._types import Array, PyTree, Size
from curvax.batching._accumulators import Reduction
from curvax.batching._arguments import Batch
from curvax.batching._loop import first_value, reduce_chunks

__all__ = ["reduce_batch"]

Arrays = Sequence[Array]


def reduce_batch(
    compute: Callable[[Arrays, Arrays], PyTree],
    batch: Batch,
    reduction: Reduction,
    *,
    checkpoint: bool = False,
) -> PyTree:
    """Reduce `compute(shared, chunk of arrays)` over the chunks of the batch.

    The first are the batch's shared arrays, as the device has them that computes.
    """
    plan, share, where = reduction.plan, reduction.share, reduction.where

    def reduce(arrays: Arrays, shared: Arrays, limit: Size | None) -> PyTree:
        return reduce_chunks(
            lambda chunk: compute(shared, chunk),
            arrays,
            batch.axes,
            plan,
            reduction.reducer,
            limit=limit,
            checkpoint=checkpoint,
            share=share,
        )

    if share is None:
        return reduce(batch.arrays, batch.shared, reduction.limit)

    traced_limit = reduction.limit if isinstance(reduction.limit, jax.Array) else None
    devices = share.devices
    in_specs = tuple(map(devices.spec, batch.axes)), PartitionSpec(), PartitionSpec()

    def first(arrays: Arrays, shared: Arrays, limit: Size | None) -> PyTree:
        del limit
        return first_value(lambda chunk: compute(shared, chunk), arrays, batch.axes, plan)

    def part(arrays: Arrays, shared: Arrays, limit: Size | None) -> PyTree:
        return reduce(arrays, shared, reduction.limit if limit is None else limit)

    def on_all(arrays: Arrays, *others: PyTree) -> PyTree:
        dealt = tuple(map(share.deal, arrays, batch.axes))
        value = jax.eval_shape(devices.on_all(first, in_specs, PartitionSpec()), dealt, *others)
        specs = reduction.reducer(value).specs(share)
        return devices.on_all(part, in_specs, specs)(dealt, *others)

    devices.check_outside(where)
    for name, leaf in zip(batch.names, batch.leaves, strict=True):
        devices.check_placement(name, leaf, where)
    return jax.jit(on_all)(batch.arrays, batch.shared, traced_limit)
