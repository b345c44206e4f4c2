"""`chunked_vmap`: `jax.vmap`, a chunk at a time."""

import functools
from typing import Any

from jax.sharding import Mesh

from curvax._errors import check_size
from curvax._tree import as_key
from curvax._types import Axes, Fun
from curvax.devices.mesh_axis import Axis, MeshAxis
from curvax.maps.arguments import mapped_arguments
from curvax.maps.chunk_plan import contiguous_sizes
from curvax.maps.chunking import map_chunks
from curvax.maps.sharding import BatchSharding, examples_per_device
from curvax.memory.budget import Budget
from curvax.memory.compiled import Objective, PlanFor, check_budget, plan_call


def chunked_vmap(
    fun: Fun,
    chunk_size: int | None = None,
    *,
    in_axes: Axes = 0,
    out_axes: Axes = 0,
    checkpoint: bool = False,
    memory_budget: Budget | None = None,
    plan_for: PlanFor = "value",
    objective: Objective = "memory",
    mesh: Mesh | None = None,
    axis: Axis | None = None,
    replicated: bool = False,
) -> Fun:
    """Vectorise `fun` over an axis of its arguments, at most `chunk_size` examples at a time.

    Equal to `jax.vmap(fun, in_axes, out_axes)`, except that a loop runs over chunks of the axis,
    so that what `fun` computes on the way exists for one chunk only. The result is written in
    place: besides it and the inputs, memory holds one chunk. `chunk_size` need not divide the
    length of the axis, and `fun` is traced once.

    Under `jax.grad`, what the backward pass needs of each example is saved for all of them, as
    with `jax.vmap`. With `checkpoint=True` each chunk is computed again in the backward pass
    instead, and the gradient too holds one chunk.

    With a `mesh`, each device runs such a loop over its shard of the examples, successive ones. Of
    N examples on D devices, the first N % D devices have one more than the others; nothing is
    computed twice.

    Arguments:
        fun: the function of one example.
        chunk_size: the number of examples to compute at once; the last chunk may be short. None
            takes all at once.
        in_axes: as in `jax.vmap`: for each positional argument an axis, None, or a pytree prefix
            of these. Keyword arguments are mapped over axis 0.
        out_axes: as in `jax.vmap`.
        checkpoint: recompute each chunk in the backward pass.
        memory_budget: bytes, in place of `chunk_size`, in any form that `parse_memory` takes. The
            largest chunk is taken with which a call, compiled by itself, allocates no more.
        plan_for: whether the budget is for the "value" or for the "gradient" through the map,
            with respect to all arrays that it depends on.
        objective: "memory" takes the largest chunk that fits; "time" one that is fast by a
            rule: on a CPU its temporaries stay in the cache, elsewhere it is the largest.
        mesh: shard the examples over the devices of a mesh. `chunk_size` and `memory_budget` are
            then for each device. Arguments that are not mapped are replicated.
        axis: along which axis of the mesh, or several; a mesh with one axis needs no name. Along
            other axes nothing changes: parameters may be sharded there.
        replicated: whether to replicate the result on every device. By default it is sharded along
            its `out_axes`, if the number of devices divides that of examples; JAX has no uneven
            shards.

    Returns:
        A function like `fun` of batched arguments. Call it under `jax.jit`, as any loop in JAX;
        called by itself it is compiled again each time. With a `memory_budget` it is compiled once
        for each `fun` and shapes, called by itself or not.

    Raises:
        ValueError: on the call, if the batched arguments have no common length, none is batched,
            or an axis does not exist; if both a size and a budget are given; if the mesh has no
            such axis, an array is committed to devices elsewhere, or the call is inside a
            `jax.shard_map` over the axis.
        TypeError: if `chunk_size` is not an integer or `mesh` no mesh.
        MemoryBudgetError: if not even chunks of one fit the budget.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from curvax import chunked_vmap
        >>> rows = jnp.arange(10.0).reshape(5, 2)
        >>> jax.jit(chunked_vmap(jnp.sum, chunk_size=2))(rows)
        Array([ 1.,  5.,  9., 13., 17.], dtype=float32)
    """
    chunk_size = check_size("chunk_size", chunk_size)
    mesh_axis = MeshAxis.of(mesh, axis, replicated)
    budget = check_budget(
        memory_budget,
        {"chunk_size": chunk_size},
        plan_for=plan_for,
        objective=objective,
        is_multi_process=bool(mesh_axis and mesh_axis.is_multi_process),
    )

    def run(size: int | None, *args: Any, **kwargs: Any) -> Any:
        batch = mapped_arguments(fun, args, kwargs, in_axes)
        return map_chunks(
            lambda batch, arrays: batch.call(fun, arrays),
            batch,
            size,
            out_axes=out_axes,
            checkpoint=checkpoint,
            sharding=BatchSharding.of(mesh_axis, batch.length, replicated),
        )

    @functools.wraps(fun)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        if budget is None:
            return run(chunk_size, *args, **kwargs)
        length = mapped_arguments(fun, args, kwargs, in_axes).length
        plan = plan_call(
            budget,
            fun,
            lambda size: functools.partial(run, size),
            args,
            kwargs,
            contiguous_sizes(examples_per_device(mesh_axis, length)),
            key=("chunked_vmap", as_key((in_axes, out_axes)), checkpoint, mesh_axis, replicated),
        )
        return plan(*args, **kwargs)

    return mapped
