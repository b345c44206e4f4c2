"""`micro_vmap`: `jax.vmap` a microbatch at a time, with reductions over examples."""

import functools
from typing import Any

import jax
from jax.sharding import Mesh

from curvax._errors import check_size
from curvax._tree import as_key
from curvax._types import Axes, Fun, Order, PyTree, Size, VmapFn
from curvax.devices.mesh_axis import Axis, MeshAxis
from curvax.maps.accumulators import AccumulationType
from curvax.maps.arguments import mapped_arguments
from curvax.maps.chunk_plan import check_order, even_sizes
from curvax.maps.chunking import map_chunks
from curvax.maps.sharding import BatchSharding, examples_per_device
from curvax.memory.budget import Budget
from curvax.memory.compiled import Objective, PlanFor, check_budget, plan_call


def micro_vmap(
    fun: Fun,
    in_axes: Axes = 0,
    out_axes: Axes = 0,
    *,
    microbatch_size: int | None = None,
    vmap_fn: VmapFn = jax.vmap,
    accumulator: PyTree = AccumulationType.CONCAT,
    num_real_microbatches: Size | None = None,
    order: Order = "strided",
    memory_budget: Budget | None = None,
    plan_for: PlanFor = "value",
    objective: Objective = "memory",
    mesh: Mesh | None = None,
    axis: Axis | None = None,
    replicated: bool = False,
) -> Fun:
    """Vectorise `fun` over examples, a microbatch at a time, and combine the outputs.

    Equal to

        outputs = jax.vmap(fun, in_axes, out_axes)(*args, **kwargs)
        result = accumulator over the examples of outputs (CONCAT: outputs as they are)

    except that only one microbatch of outputs, and of what `fun` computes on the way, exists at a
    time. `fun` is traced once, whether or not `microbatch_size` divides the number of examples.

    With a `mesh`, each device does so with its shard of the examples, as in `chunked_vmap`, and
    sums and means are over all. Devices meet once, at the end.

    Arguments:
        fun: the function of one example.
        in_axes: as in `jax.vmap`; keyword arguments are mapped over axis 0.
        out_axes: as in `jax.vmap`, for outputs that are concatenated. A reduced output has no
            such axis; which integer is given for it does not matter.
        microbatch_size: the most examples to compute at once. None takes all.
        vmap_fn: a function with the signature of `jax.vmap`, called by position with a function
            of the batched leaves alone, a tuple of their axes, and `out_axes`; for example
            `functools.partial(jax.vmap, spmd_axis_name="data")`.
        accumulator: an `AccumulationType`, an `Accumulator`, or a pytree of these that is a
            prefix of the outputs.
        num_real_microbatches: run only that many microbatches, the first in the given order. SUM
            and the means are then over the examples that ran, and CONCAT gives zeros for the
            others. As a Python int it makes a shorter program; traced, one program serves every
            number, but cannot be differentiated in reverse mode. On a mesh of D devices the
            microbatches are those of one device with a `microbatch_size` D times as large; this
            takes a "strided" order and a number of examples that D times the size of the
            microbatches divides.
        order: "strided": with M microbatches, microbatch i holds examples i, i + M, i + 2M, …, so
            that a sharded batch axis stays sharded. "contiguous": successive examples.
        memory_budget: bytes, in place of `microbatch_size`, in any form that `parse_memory` takes.
            The largest microbatch is taken with which a call, compiled by itself, allocates no
            more.
        plan_for: whether the budget is for the "value" or for the "gradient" through the map,
            with respect to all arrays that it depends on.
        objective: "memory" takes the largest microbatch that fits; "time" one that is fast by a
            rule: on a CPU its temporaries stay in the cache, elsewhere it is the largest.
        mesh: shard the examples over the devices of a mesh. `microbatch_size` and `memory_budget`
            are then for each device. An `Accumulator` needs its `combine`.
        axis: along which axis of the mesh, or several; a mesh with one axis needs no name. Along
            other axes nothing changes: parameters may be sharded there.
        replicated: whether to replicate the result on every device. By default CONCAT is sharded
            along its `out_axes`, if the number of devices divides that of examples; what is
            reduced is always replicated.

    Returns:
        A function like `fun` of batched arguments. Call it under `jax.jit`.

    Raises:
        ValueError: if the batched arguments have no common length, none is batched, an axis does
            not exist, the accumulator does not fit the outputs, or more microbatches are asked
            for than there are; if both a size and a budget are given; if the mesh
            has no such axis, an array is committed to devices elsewhere, or the call is inside a
            `jax.shard_map` over the axis.
        TypeError: if a size is no integer, or a mean is asked for of integers.
        MemoryBudgetError: if not even microbatches of one fit the budget.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from curvax import AccumulationType, micro_vmap
        >>> moments = micro_vmap(
        ...     lambda x: (x, x**2), microbatch_size=3, accumulator=AccumulationType.MEAN
        ... )
        >>> jax.jit(moments)(jnp.arange(10.0))
        (Array(4.5, dtype=float32), Array(28.5, dtype=float32))
    """
    microbatch_size = check_size("microbatch_size", microbatch_size)
    order = check_order(order)
    sizes = {"microbatch_size": microbatch_size}
    mesh_axis = MeshAxis.of(mesh, axis, replicated)
    budget = check_budget(
        memory_budget,
        sizes,
        plan_for=plan_for,
        objective=objective,
        is_multi_process=bool(mesh_axis and mesh_axis.is_multi_process),
    )

    def run(size: int | None, limit: Size | None, *args: Any, **kwargs: Any) -> Any:
        batch = mapped_arguments(fun, args, kwargs, in_axes)
        return map_chunks(
            lambda batch, arrays: batch.call(fun, arrays),
            batch,
            size,
            order=order,
            out_axes=out_axes,
            accumulator=accumulator,
            vmap_fn=vmap_fn,
            limit=limit,
            sharding=BatchSharding.of(mesh_axis, batch.length, replicated),
        )

    @functools.wraps(fun)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        limit = num_real_microbatches
        if budget is None:
            return run(microbatch_size, limit, *args, **kwargs)
        length = mapped_arguments(fun, args, kwargs, in_axes).length
        options = as_key((in_axes, out_axes, accumulator, vmap_fn))
        plan = plan_call(
            budget,
            fun,
            lambda size: functools.partial(run, size),
            (limit, *args),
            kwargs,
            even_sizes(examples_per_device(mesh_axis, length)),
            key=("micro_vmap", options, order, mesh_axis, replicated),
        )
        return plan(limit, *args, **kwargs)

    return mapped
