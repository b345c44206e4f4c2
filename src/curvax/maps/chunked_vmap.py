"""`chunked_vmap`: `jax.vmap`, one chunk at a time."""

import functools

import jax
from jax.sharding import Mesh

from curvax._errors import check_size
from curvax._tree import as_key
from curvax._types import Axes, Fun, PyTree
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
    so that the intermediates of `fun` exist for one chunk only. The result is written in place:
    besides it and the inputs, memory holds one chunk. `chunk_size` need not divide the length of
    the axis, and `fun` is traced once.

    Under `jax.grad`, the residuals of all examples are saved, as with `jax.vmap`. With
    `checkpoint=True`, each chunk is rematerialised in the backward pass instead, and the gradient
    also holds one chunk only.

    With a `mesh`, each device runs the loop over its shard, which holds successive examples. Of
    N examples on D devices, the first N % D devices have one more than the others; no example is
    computed twice.

    Arguments:
        fun: Function of one example.
        chunk_size: Number of examples to compute at once; the last chunk may be short. None
            computes all at once.
        in_axes: The axis to map over, for all positional arguments or in a tuple with an entry for
            each. An entry is an integer, None for an argument that is passed unchanged, or a
            pytree prefix of the argument. Further entries are for arguments passed by keyword, in
            the order of the parameters of `fun`; keyword arguments without an entry are mapped
            over axis 0.
        out_axes: Where the mapped axis appears in the outputs: an integer, None for an output that
            is the same for every example, or a pytree prefix of the outputs.
        checkpoint: Rematerialise each chunk in the backward pass.
        memory_budget: Bytes that a call may allocate, in place of `chunk_size`: an int, a string
            with a unit ("2GB", "50%"), or a float in (0, 1], a fraction of the available memory.
            The largest chunk is chosen with which a call, compiled by itself, allocates no more.
        plan_for: The program that must fit the budget: "value" for the call itself, "gradient" for
            its reverse-mode derivative with respect to all arrays it depends on.
        objective: "memory" chooses the largest chunk that fits. "time" chooses one that is fast by
            a heuristic: on a CPU its temporaries stay in the cache, elsewhere it is the largest.
        mesh: Mesh to shard the examples over. `chunk_size` and `memory_budget` are then per device.
            Arguments that are not mapped are replicated.
        axis: Name of the mesh axis to shard along, or of several that count as one; optional for a
            mesh with a single axis. Along other axes nothing changes: parameters may be sharded
            there.
        replicated: Whether to replicate the result on every device. By default it is sharded along
            its `out_axes` if the number of devices divides the number of examples (JAX has no
            uneven shards), and replicated otherwise.

    Returns:
        A function of batched arguments that returns batched outputs. Call it under `jax.jit`, like
        any loop in JAX; otherwise it is compiled at each call. With a `memory_budget` it is
        compiled once for each `fun` and shapes, under `jax.jit` or not.

    Raises:
        ValueError: On the call, if the batched arguments differ in length, none is batched, or an
            axis does not exist; if both a size and a budget are given; if the mesh has no such
            axis, an array is committed to other devices, or the call is inside a `jax.shard_map`
            over the axis.
        TypeError: If `chunk_size` is not an integer or `mesh` is not a mesh.
        MemoryBudgetError: If even chunks of one example exceed the budget.

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

    def run(size: int | None, *args: PyTree, **kwargs: PyTree) -> PyTree:
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
    @jax.named_scope("chunked_vmap")
    def mapped(*args: PyTree, **kwargs: PyTree) -> PyTree:
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
