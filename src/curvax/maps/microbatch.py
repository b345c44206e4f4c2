"""`microbatch`: a function of a batch, run on one microbatch at a time."""

import functools
from collections.abc import Hashable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import ArrayLike

from curvax._errors import check_count, check_divides, check_size
from curvax._tree import as_key, leaf_name
from curvax._types import Array, Axes, Fun, Order, PyTree, Size
from curvax.devices.mesh_axis import Axis, MeshAxis
from curvax.maps.accumulators import AccumulationType, Reduction
from curvax.maps.arguments import Batch, batched_arguments, canonicalize_axis
from curvax.maps.chunk_plan import ChunkPlan, check_limit, check_order, even_sizes
from curvax.maps.chunking import reduce_batch, trace_once
from curvax.maps.sharding import BatchSharding, examples_per_device
from curvax.memory.budget import Budget
from curvax.memory.compiled import Objective, PlanFor, check_budget, plan_call


def microbatch(
    fun: Fun,
    argnums: int | Sequence[int],
    microbatch_size: int | None = None,
    accumulator: PyTree = AccumulationType.SUM,
    *,
    argnames: str | Sequence[str] = (),
    in_axes: Axes = 0,
    num_real_microbatches: Size | None = None,
    order: Order = "strided",
    memory_budget: Budget | None = None,
    plan_for: PlanFor = "value",
    objective: Objective = "memory",
    mesh: Mesh | None = None,
    axis: Axis | None = None,
    replicated: bool = False,
) -> Fun:
    """Run `fun` on one microbatch of its batch arguments at a time and combine the outputs.

    Equal to

        outputs = [fun(… microbatch i in place of the batch …) for i in range(M)]
        result = accumulator over outputs

    in a loop, so that the intermediates of `fun` exist for one microbatch only. For a `fun` that
    sums over its batch, SUM gives `fun` of the full batch; for one that averages, MEAN and
    RUNNING_MEAN do; for one that returns a row for each example, CONCAT does.

    `fun` is traced once, or twice if the microbatches are of two sizes because `microbatch_size`
    does not divide the batch. MEAN and RUNNING_MEAN then weight each microbatch by its number of
    examples.

    With a `mesh` of D devices, the N examples are sharded contiguously, each device runs the loop
    over its shard, and the result is over the microbatches of all devices, which communicate once,
    at the end. D must divide N.

    Arguments:
        fun: Function of one or more batches, and of any other arguments.
        argnums: Indices of the positional arguments that are batches. They may also be passed by
            keyword.
        microbatch_size: Maximum number of examples in a microbatch. None runs the full batch.
        accumulator: An `AccumulationType` (MEAN, SUM, RUNNING_MEAN or CONCAT), an `Accumulator`,
            or a pytree of these that is a prefix of the outputs.
        argnames: Names of further arguments that are batches. They may also be passed by position.
        in_axes: The batch axis of all batch arguments, or a sequence with an entry for each of
            `argnums` and then of `argnames`; an entry may be a pytree prefix of the argument,
            with None for leaves that are not batched.
        num_real_microbatches: Number of microbatches to run, the first ones in the given order.
            The others are padding, and are skipped: SUM and the means are over real microbatches,
            and CONCAT returns zeros for the other examples. A Python int shortens the program. A
            traced value lets one program serve every number, but has no reverse-mode derivative. On
            a mesh each device runs that many microbatches of its shard; this requires a "strided"
            order and microbatches of equal size.
            Ignored if there are no microbatches: without a size or a budget.
        order: "strided": of M microbatches, microbatch i holds examples i, i + M, i + 2M, …, so
            that a sharded batch axis stays sharded. "contiguous": successive examples.
        memory_budget: Bytes that a call may allocate, in place of `microbatch_size`: an int, a
            string with a unit ("2GB", "50%"), or a float in (0, 1], a fraction of the available
            memory. The largest microbatch size is chosen for which the call, compiled by
            itself, stays within it.
        plan_for: The program that must fit the budget: "value" for the call itself, "gradient" for
            its reverse-mode derivative with respect to all arrays it depends on.
        objective: "memory" chooses the largest microbatch that fits. "time" chooses one that is
            fast by a heuristic: on a CPU its temporaries stay in the cache, elsewhere it is the
            largest.
        mesh: Mesh to shard the batch over. `microbatch_size` and `memory_budget` are then per
            device. An `Accumulator` needs its `combine`.
        axis: Name of the mesh axis to shard along, or of several that count as one; optional for a
            mesh with a single axis. Along other axes nothing changes: parameters may be sharded
            there.
        replicated: Whether to replicate concatenated results on every device. By default they are
            sharded along axis 0. Reduced results are always replicated.

    Returns:
        A function of the arguments of `fun` that returns the combined outputs. Call it under
        `jax.jit`, like any loop in JAX.

    Raises:
        ValueError: If batch arguments differ in length or are missing, an axis does not exist,
            outputs do not fit their accumulator, or `num_real_microbatches` exceeds the number of
            microbatches; if both a size and a budget are given; if the number of devices does not
            divide the batch; if the mesh has no such axis, an array is committed to other devices,
            or the call is inside a `jax.shard_map` over the axis.
        TypeError: If a size is not an integer, or integer outputs are to be averaged.
        MemoryBudgetError: If even microbatches of one example exceed the budget.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from curvax import AccumulationType, microbatch
        >>> loss = lambda w, x: jnp.mean((x @ w) ** 2)
        >>> gradient = microbatch(jax.grad(loss), 1, 4, AccumulationType.MEAN)
        >>> x = jnp.arange(20.0).reshape(10, 2)
        >>> jax.jit(gradient)(jnp.ones(2), x)
        Array([474., 512.], dtype=float32)
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

    def batch_of(args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> Batch:
        batch = batched_arguments(fun, args, kwargs, argnums, argnames, in_axes)
        if mesh_axis is not None:
            mesh_axis.check_divides(batch.length, "the batch")
        return batch

    def run(size: int | None, limit: Size | None, *args: PyTree, **kwargs: PyTree) -> PyTree:
        batch = batch_of(args, kwargs)
        sharding = BatchSharding.of(mesh_axis, batch.length, replicated)
        if sharding is None:
            plan = ChunkPlan.of(batch.length, size, order)
        else:
            plan, batch = sharding.plan(size, order), batch.with_unbatched()
            sharding.check_limit(limit, plan)
        limit = check_limit(limit, plan)
        once = trace_once(
            lambda unbatched, arrays: replace(batch, unbatched=unbatched).call(fun, arrays),
            plan,
            limit,
            sharding,
        )
        reduction = Reduction(accumulator, 0, plan, False, limit, sharding)
        return reduce_batch(once, batch, reduction)

    @functools.wraps(fun)
    @jax.named_scope("microbatch")
    def microbatched(*args: PyTree, **kwargs: PyTree) -> PyTree:
        limit = num_real_microbatches
        if budget is None:
            limit = None if microbatch_size is None else limit
            return run(microbatch_size, limit, *args, **kwargs)
        length = batch_of(args, kwargs).length
        options = as_key((argnums, argnames, in_axes, accumulator))
        plan = plan_call(
            budget,
            fun,
            lambda size: functools.partial(run, size),
            (limit, *args),
            kwargs,
            even_sizes(examples_per_device(mesh_axis, length)),
            key=("microbatch", options, order, mesh_axis, replicated),
        )
        return plan(limit, *args, **kwargs)

    return microbatched


def reshape_batch_axis(tree: PyTree, microbatch_size: int, axis: int = 0) -> PyTree:
    """Reshape the batch axis of each leaf into two: microbatches, then the examples of each.

    An axis of N becomes two of `(M, microbatch_size)` in column-major order: microbatch i holds
    examples i, i + M, i + 2M, …, like `microbatch` with `order="strided"`. So

        reshape_batch_axis(x, size)[i] == x[i::M]

    If the batch axis is sharded, the second of the two axes is, and each microbatch has examples
    of every device.

    Arguments:
        tree: Pytree of arrays.
        microbatch_size: Number of examples in a microbatch. It must divide the batch axis.
        axis: The batch axis of every leaf; it may be negative.

    Returns:
        A pytree like `tree` whose leaves have one more axis.

    Raises:
        ValueError: If a leaf has no such axis or `microbatch_size` does not divide it;
            `microbatch` and `micro_vmap` accept any size.

    Examples:
        >>> import jax.numpy as jnp
        >>> from curvax import reshape_batch_axis
        >>> reshape_batch_axis(jnp.arange(6), 2)
        Array([[0, 3],
               [1, 4],
               [2, 5]], dtype=int32)
    """
    size = check_count("microbatch_size", microbatch_size)

    def reshape(path: tuple[Hashable, ...], leaf: ArrayLike) -> Array:
        name = leaf_name("tree", path)
        x = jnp.asarray(leaf)
        dim = canonicalize_axis(axis, x.ndim, f"{name} of shape {x.shape}")
        length = x.shape[dim]
        check_divides(size, length, f"axis {axis} of {name}", f"into microbatches of {size}")
        folded = x.reshape(*x.shape[:dim], size, length // size, *x.shape[dim + 1 :])
        return jnp.swapaxes(folded, dim, dim + 1)

    return jax.tree_util.tree_map_with_path(reshape, tree)
