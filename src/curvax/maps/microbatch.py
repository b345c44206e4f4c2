"""`microbatch`: a function of a batch, run on one microbatch after the other."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from curvax._errors import check_count, check_divides, check_size
from curvax._tree import as_key, leaf_name
from curvax._types import Array, Axes, Fun, Order, PyTree, Size
from curvax.devices.mesh_axis import Axis, MeshAxis
from curvax.maps.accumulators import AccumulationType, Reduction
from curvax.maps.arguments import Batch, batched_arguments, normal_axis
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
    """Split the batch arguments of `fun` into microbatches, run it on each, combine the outputs.

    Equal to

        outputs = [fun(… microbatch i in place of the batch …) for i in range(M)]
        result = accumulator over outputs

    in a loop, so that what `fun` computes on the way exists for one microbatch only. For a `fun`
    that sums over its batch, SUM gives `fun` of the whole batch; for one that averages, MEAN and
    RUNNING_MEAN do; for one that returns a row for each example, CONCAT does.

    `fun` is traced once, and once more if the microbatches are of two sizes because
    `microbatch_size` does not divide the batch. MEAN and RUNNING_MEAN then weight each microbatch
    by its examples.

    With a `mesh` of D devices, device d has the examples from d * N / D on, makes microbatches of
    them, and the result is over those of all devices; devices meet once, at the end. D must divide
    the number N of examples.

    Arguments:
        fun: a function of a batch, and of anything else.
        argnums: which positional arguments are batches. They may be passed by name too.
        microbatch_size: the most examples in a microbatch. None takes all.
        accumulator: an `AccumulationType`, an `Accumulator`, or a pytree of these that is a
            prefix of the outputs.
        argnames: which arguments are batches, by name. They may be passed by position too.
        in_axes: the batch axis of all batch arguments, or a sequence with an entry for each of
            `argnums` and then of `argnames`; an entry may be a pytree prefix of the argument,
            with None for leaves that are not batched.
        num_real_microbatches: run only that many microbatches, the first in the given order. SUM
            and the means are then over those, and CONCAT gives zeros for the other examples. As a
            Python int it makes a shorter program; traced, one program serves every number, but
            cannot be differentiated in reverse mode. On a mesh each device runs as many of its
            own; this takes a "strided" order, and microbatches that come out even.
        order: "strided": with M microbatches, microbatch i holds examples i, i + M, i + 2M, …, so
            that a sharded batch axis stays sharded. "contiguous": successive examples.
        memory_budget: bytes, in place of `microbatch_size`, in any form that `parse_memory` takes.
            The largest microbatch is taken with which a call, compiled by itself, allocates no
            more.
        plan_for: whether the budget is for the "value" or for the "gradient" through the map,
            with respect to all arrays that it depends on.
        objective: "memory" takes the largest microbatch that fits; "time" one that is fast by a
            rule: on a CPU its temporaries stay in the cache, elsewhere it is the largest.
        mesh: shard the batch over the devices of a mesh. `microbatch_size` and `memory_budget`
            are then for each device. An `Accumulator` needs its `combine`.
        axis: along which axis of the mesh, or several; a mesh with one axis needs no name. Along
            other axes nothing changes: parameters may be sharded there.
        replicated: whether to replicate the result on every device. By default CONCAT is sharded
            along axis 0; what is reduced is always replicated.

    Returns:
        A function like `fun`. Call it under `jax.jit`.

    Raises:
        ValueError: if the batch arguments have no common length or are missing, an axis does not
            exist, outputs do not fit their accumulator, or more microbatches are asked for than
            there are; if both a size and a budget are given; if devices do not divide the batch;
            if the mesh has no such axis, an array is committed to devices elsewhere, or the call
            is inside a `jax.shard_map` over the axis.
        TypeError: if a size is no integer, or a mean is asked for of integers.
        MemoryBudgetError: if not even microbatches of one fit the budget.

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

    def batch_of(args: Sequence[Any], kwargs: dict[str, Any]) -> Batch:
        batch = batched_arguments(fun, args, kwargs, argnums, argnames, in_axes)
        if mesh_axis is not None:
            mesh_axis.check_divides(batch.length, "the batch")
        return batch

    def run(size: int | None, limit: Size | None, *args: Any, **kwargs: Any) -> Any:
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
    def microbatched(*args: Any, **kwargs: Any) -> Any:
        limit = num_real_microbatches
        if budget is None:
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
    """Split the batch axis of each leaf in two: microbatches, then the examples of each.

    An axis of N becomes two of `(M, microbatch_size)` in column-major order: microbatch i holds
    examples i, i + M, i + 2M, …, as in `microbatch` with `order="strided"`. So

        reshape_batch_axis(x, size)[i] == x[i::M]

    A batch axis that is sharded over devices becomes sharded over the second of the two axes, and
    each microbatch has examples of every device.

    Arguments:
        tree: a pytree of arrays.
        microbatch_size: examples in a microbatch. It must divide the batch axis.
        axis: the batch axis of every leaf; it may be negative.

    Returns:
        A pytree like `tree` whose leaves have one axis more.

    Raises:
        ValueError: if a leaf has no such axis or `microbatch_size` does not divide it;
            `microbatch` and `micro_vmap` take any size.

    Examples:
        >>> import jax.numpy as jnp
        >>> from curvax import reshape_batch_axis
        >>> reshape_batch_axis(jnp.arange(6), 2)
        Array([[0, 3],
               [1, 4],
               [2, 5]], dtype=int32)
    """
    size = check_count("microbatch_size", microbatch_size)

    def split(path: tuple[Any, ...], leaf: Any) -> Array:
        name = leaf_name("tree", path)
        leaf = jnp.asarray(leaf)
        place = normal_axis(axis, leaf.ndim, f"{name} of shape {leaf.shape}")
        length = leaf.shape[place]
        what = f"axis {axis} of {name}"
        check_divides(size, length, what, f"into microbatches of {size}")
        before, after = leaf.shape[:place], leaf.shape[place + 1 :]
        folded = leaf.reshape(*before, size, length // size, *after)
        return jnp.swapaxes(folded, place, place + 1)

    return jax.tree_util.tree_map_with_path(split, tree)
