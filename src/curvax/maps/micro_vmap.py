"""`micro_vmap`: `jax.vmap` one microbatch at a time, with reductions over examples."""

import functools

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
    """Vectorise `fun` over examples, one microbatch at a time, and combine the outputs.

    Equal to

        outputs = jax.vmap(fun, in_axes, out_axes)(*args, **kwargs)
        result = outputs  # CONCAT; or their SUM, MEAN, … over the examples

    except that the intermediates of `fun`, and outputs that are reduced, exist for one microbatch
    at a time.
    `fun` is traced once, whether or not `microbatch_size` divides the number of examples.

    With a `mesh`, each device runs the loop over its shard, which holds successive examples, and
    sums and means are over all devices. Devices communicate once, at the end.

    Arguments:
        fun: Function of one example.
        in_axes: The axis to map over, for all positional arguments or in a tuple with an entry for
            each. An entry is an integer, None for an argument that is passed unchanged, or a
            pytree prefix of the argument. Further entries are for arguments passed by keyword, in
            the order of the parameters of `fun`; keyword arguments without an entry are mapped
            over axis 0.
        out_axes: Where the mapped axis appears in concatenated outputs: an integer, None for an
            output that is the same for every example, or a pytree prefix of the outputs. Reduced
            outputs have no such axis: their entry is ignored, but must be an integer.
        microbatch_size: Maximum number of examples to compute at once. None computes all.
        vmap_fn: A function with the signature of `jax.vmap`, called as
            `vmap_fn(f, in_axes, out_axes)`; for example
            `functools.partial(jax.vmap, spmd_axis_name="data")`. `f` takes the batched leaves as
            separate arguments, `in_axes` is a tuple of their axes, and `out_axes` has the structure
            of yours with every integer replaced by 0.
        accumulator: An `AccumulationType` (MEAN, SUM, CONCAT, or RUNNING_MEAN: a mean that never
            holds the growing sum), an `Accumulator`, or a pytree of these that is a prefix of the
            outputs.
        num_real_microbatches: Number of microbatches to run, the first ones in the given order.
            The others are padding, and are skipped: SUM and the means are over the examples of real
            microbatches, and CONCAT returns zeros for the other examples. A Python int shortens the
            program. A traced value lets one program serve every number, but has no reverse-mode
            derivative. On a mesh of D devices, microbatch i is the union of microbatch i of every
            device, as on one device with D times the `microbatch_size`. This requires a "strided"
            order and a number of examples that is divisible by D times the microbatch size.
            Ignored if there are no microbatches: without a size or a budget.
        order: "strided": of M microbatches, microbatch i holds examples i, i + M, i + 2M, …, so
            that a sharded batch axis stays sharded. "contiguous": successive examples.
        memory_budget: Bytes that a call may allocate, in place of `microbatch_size`: an int, a
            string with a unit ("2GB", "50%"), or a float in (0, 1], a fraction of the available
            memory. The largest microbatch size is chosen (to within 5 %) for which the call,
            compiled by itself, stays within it.
        plan_for: The program that must fit the budget: "value" for the call itself, "gradient" for
            its reverse-mode derivative with respect to all arrays it depends on.
        objective: "memory" chooses the largest microbatch that fits. "time" chooses one that is
            fast by a heuristic: on a CPU its temporaries stay in the cache, elsewhere it is the
            largest.
        mesh: Mesh to shard the examples over. `microbatch_size` and `memory_budget` are then per
            device. An `Accumulator` needs its `combine`.
        axis: Name of the mesh axis to shard along, or of several that count as one; optional for a
            mesh with a single axis. Along other axes nothing changes: parameters may be sharded
            there.
        replicated: Whether to replicate concatenated results on every device. By default they are
            sharded along their `out_axes` if the number of devices divides the number of examples.
            Reduced results are always replicated.

    Returns:
        A function of batched arguments that returns the combined outputs. Call it under `jax.jit`,
        like any loop in JAX.

    Raises:
        ValueError: If the batched arguments differ in length, none is batched, an axis does not
            exist, the accumulator does not fit the outputs, or `num_real_microbatches` exceeds the
            number of microbatches; if both a size and a budget are given; if the mesh has no such
            axis, an array is committed to other devices, or the call is inside a `jax.shard_map`
            over the axis.
        TypeError: If a size is not an integer, or integer outputs are to be averaged.
        MemoryBudgetError: If even microbatches of one example exceed the budget.

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

    def run(size: int | None, limit: Size | None, *args: PyTree, **kwargs: PyTree) -> PyTree:
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
    @jax.named_scope("micro_vmap")
    def mapped(*args: PyTree, **kwargs: PyTree) -> PyTree:
        limit = num_real_microbatches
        if budget is None:
            limit = None if microbatch_size is None else limit
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
