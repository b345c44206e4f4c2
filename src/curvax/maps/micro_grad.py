"""`micro_grad`: per-example gradients, transformed and accumulated one microbatch at a time."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from curvax._errors import check_size, where
from curvax._tree import as_key
from curvax._types import Array, Axes, Fun, Order, PyTree, Size, VmapFn
from curvax.devices.mesh_axis import Axis, MeshAxis
from curvax.maps.accumulators import AccumulationType
from curvax.maps.arguments import Batch, batched_arguments
from curvax.maps.chunk_plan import check_order, even_sizes
from curvax.maps.chunking import map_chunks
from curvax.maps.sharding import BatchSharding, examples_per_device
from curvax.memory.budget import Budget
from curvax.memory.compiled import Objective, PlanFor, check_budget, plan_call


class PerExample(NamedTuple):
    """Per-example results of `micro_grad`, with examples along the leading axis, in batch order.

    Attributes:
        values: Value of the function.
        metrics: Output of `metrics_fn` on the gradient.
        aux: Auxiliary output of the function, None without `has_aux`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from curvax import micro_grad
        >>> loss = lambda w, x: jnp.sum((x @ w) ** 2)
        >>> _, per_example = micro_grad(loss, metrics_fn=jnp.max)(jnp.ones(2), 2 * jnp.eye(3, 2))
        >>> print(per_example.values, per_example.metrics, per_example.aux)
        [4. 4. 0.] [8. 8. 0.] None
    """

    values: PyTree
    metrics: PyTree
    aux: PyTree


def _identity(gradient: PyTree) -> PyTree:
    return gradient


def _nothing(gradient: PyTree) -> None:
    del gradient


def micro_grad(
    fun: Fun,
    has_aux: bool = False,
    argnums: int | Sequence[int] = 0,
    batch_argnums: int | Sequence[int] = 1,
    keep_batch_dim: bool = True,
    microbatch_size: int | None = None,
    accumulator: PyTree = AccumulationType.SUM,
    transform_fn: Callable[[PyTree], PyTree] = _identity,
    metrics_fn: Callable[[PyTree], PyTree] = _nothing,
    num_real_microbatches: Size | None = None,
    *,
    in_axes: Axes = 0,
    vmap_fn: VmapFn = jax.vmap,
    order: Order = "strided",
    memory_budget: Budget | None = None,
    plan_for: PlanFor = "value",
    objective: Objective = "memory",
    mesh: Mesh | None = None,
    axis: Axis | None = None,
    replicated: bool = False,
) -> Callable[..., tuple[PyTree, PerExample]]:
    """Transform and accumulate the per-example gradients of `fun`, one microbatch at a time.

    Equal to

        for each example:
            value, aux, gradient = value and gradient of fun at the example alone
            transformed = transform_fn(gradient)
            metrics = metrics_fn(gradient)
        result = accumulator over transformed
        return result, PerExample(values, metrics, aux), each stacked over examples

    except that the examples of a microbatch are vectorised, and only one microbatch of gradients
    exists at a time. With a `transform_fn` that clips, the result is the gradient sum of
    differentially private SGD (Abadi et al. 2016, "Deep Learning with Differential Privacy"). With
    one that returns `(g, g**2)`, it is the first two moments if the accumulator is
    `AccumulationType.MEAN`, and the sums of both over examples if it is `SUM`.

    Arguments:
        fun: Scalar function of parameters and a batch.
        has_aux: Whether `fun` returns `(value, aux)`.
        argnums: Indices of the arguments to differentiate with respect to. For an int the gradient
            is that of one argument, for a sequence a tuple of gradients.
        batch_argnums: Indices of the arguments that are batches.
        keep_batch_dim: Whether `fun` receives an example as a batch of one, or without batch axis.
        microbatch_size: Maximum number of examples to compute at once. None computes all.
        accumulator: An `AccumulationType`, an `Accumulator`, or a pytree of these that is a
            prefix of the output of `transform_fn`.
        transform_fn: Function applied to the gradient of each example before accumulation.
        metrics_fn: Function applied to the untransformed gradient of each example.
        num_real_microbatches: Number of microbatches to run, the first ones in the given order.
            SUM and the means are then over the examples that ran, and `PerExample` has zeros for
            the others. A Python int shortens the program. A traced value lets one program serve
            every number, but has no reverse-mode derivative. On a mesh of D devices the
            microbatches are those of one device with a `microbatch_size` D times as large; this
            requires a "strided" order and a number of examples that is divisible by D times the
            microbatch size.
            Ignored if there are no microbatches: without a size or a budget.
        in_axes: The batch axis of all batch arguments, or a sequence with an entry for each of
            `batch_argnums`; an entry may be a pytree prefix of the argument, with None for leaves
            that are not batched.
        vmap_fn: A function with the signature of `jax.vmap`, called by position with a function
            of the batched leaves alone, a tuple of their axes, and `out_axes`; for example
            `functools.partial(jax.vmap, spmd_axis_name="data")`.
        order: "strided": of M microbatches, microbatch i holds examples i, i + M, i + 2M, …, so
            that a sharded batch axis stays sharded. "contiguous": successive examples.
        memory_budget: Bytes that a call may allocate, in place of `microbatch_size`: an int, a
            string with a unit ("2GB", "50%"), or a float in (0, 1], a fraction of the available
            memory. The largest microbatch is chosen with which a call, compiled by itself,
            allocates no more.
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
        replicated: Whether to replicate `PerExample` and concatenated results on every device. By
            default they are sharded along the example axis if the number of devices divides the
            number of examples. Reduced results are always replicated.

    Returns:
        A function of the arguments of `fun`, by position or by keyword, that returns
        `(result, PerExample)`. Call it under `jax.jit`, like any loop in JAX.

    Raises:
        ValueError: If batch arguments differ in length or are missing, an axis does not exist, the
            accumulator does not fit the gradients, or `num_real_microbatches` exceeds the number of
            microbatches; if both a size and a budget are given; if the mesh has no such axis, an
            array is committed to other devices, or the call is inside a `jax.shard_map` over the
            axis.
        TypeError: If a size is not an integer, `transform_fn` or `metrics_fn` is not callable, or
            integers are to be averaged.
        MemoryBudgetError: If even microbatches of one example exceed the budget.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from curvax import micro_grad
        >>> loss = lambda w, x: jnp.sum((x @ w) ** 2)
        >>> clip = lambda g: g / jnp.maximum(1.0, jnp.linalg.norm(g))
        >>> clipped = micro_grad(
        ...     loss, microbatch_size=2, transform_fn=clip, metrics_fn=jnp.linalg.norm
        ... )
        >>> result, per_example = jax.jit(clipped)(jnp.ones(2), jnp.eye(3, 2))
        >>> result
        Array([1., 1.], dtype=float32)
        >>> per_example.metrics
        Array([2., 2., 0.], dtype=float32)
    """
    microbatch_size = check_size("microbatch_size", microbatch_size)
    order = check_order(order)
    for name, function in {"transform_fn": transform_fn, "metrics_fn": metrics_fn}.items():
        if not callable(function):
            raise TypeError(
                f"{where()}: {name} must be a function of the gradient of an example, got "
                f"{function!r}. Leave it out for none."
            )
    sizes = {"microbatch_size": microbatch_size}
    mesh_axis = MeshAxis.of(mesh, axis, replicated)
    budget = check_budget(
        memory_budget,
        sizes,
        plan_for=plan_for,
        objective=objective,
        is_multi_process=bool(mesh_axis and mesh_axis.is_multi_process),
    )
    value_and_grad = jax.value_and_grad(fun, argnums, has_aux=has_aux)

    def batch_of(args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> Batch:
        return batched_arguments(fun, args, kwargs, batch_argnums, (), in_axes)

    def run(
        size: int | None, limit: Size | None, *args: PyTree, **kwargs: PyTree
    ) -> tuple[PyTree, PerExample]:
        batch = batch_of(args, kwargs)

        def example(batch: Batch, arrays: Sequence[Array]) -> tuple[PyTree, PerExample]:
            if keep_batch_dim:
                arrays = tuple(map(jnp.expand_dims, arrays, batch.axes))
            output, gradient = batch.call(value_and_grad, arrays)
            value, aux = output if has_aux else (output, None)
            return transform_fn(gradient), PerExample(value, metrics_fn(gradient), aux)

        return map_chunks(
            example,
            batch,
            size,
            order=order,
            accumulator=(accumulator, AccumulationType.CONCAT),
            vmap_fn=vmap_fn,
            limit=limit,
            sharding=BatchSharding.of(mesh_axis, batch.length, replicated),
        )

    @functools.wraps(fun)
    @jax.named_scope("micro_grad")
    def gradients(*args: PyTree, **kwargs: PyTree) -> tuple[PyTree, PerExample]:
        args, kwargs = _by_position(fun, args, kwargs)
        limit = num_real_microbatches
        if budget is None:
            limit = None if microbatch_size is None else limit
            return run(microbatch_size, limit, *args, **kwargs)
        length = batch_of(args, kwargs).length
        options = argnums, batch_argnums, accumulator, transform_fn, metrics_fn, in_axes, vmap_fn
        plan = plan_call(
            budget,
            fun,
            lambda size: functools.partial(run, size),
            (limit, *args),
            kwargs,
            even_sizes(examples_per_device(mesh_axis, length)),
            key=(
                "micro_grad",
                as_key(options),
                has_aux,
                keep_batch_dim,
                order,
                mesh_axis,
                replicated,
            ),
        )
        return plan(limit, *args, **kwargs)

    return gradients


def _by_position(
    fun: Fun, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
    """Return the call with arguments passed by position where possible, as `argnums` need them."""
    if not kwargs:
        return args, kwargs
    try:
        bound = inspect.signature(fun).bind(*args, **kwargs)
    except (TypeError, ValueError):  # No signature, or one that does not match the function.
        return args, kwargs
    return bound.args, bound.kwargs
