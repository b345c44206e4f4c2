"""`micro_grad`: per-example gradients, transformed and accumulated a microbatch at a time."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
    """What `micro_grad` returns of each example, one row for each, in the given order."""

    values: Any
    """The value of the function."""

    metrics: Any
    """What `metrics_fn` made of the gradient."""

    aux: Any
    """The function's auxiliary output, or None."""


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
    transform_fn: Callable[[Any], Any] = _identity,
    metrics_fn: Callable[[Any], Any] = _nothing,
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
) -> Fun:
    """Accumulate the gradients of `fun` at each example, transformed, a microbatch at a time.

    Equal to

        for each example:
            value, aux, gradient = value and gradient of fun at the example alone
            transformed = transform_fn(gradient)
            metrics = metrics_fn(gradient)
        result = accumulator over transformed
        return result, PerExample(values, metrics, aux), each stacked over examples

    except that the examples of a microbatch are computed at once, and only one microbatch of
    gradients exists at a time. With a `transform_fn` that clips this is the gradient of
    differentially private training; with one that returns `(g, g**2)` it gives moments.

    Arguments:
        fun: a scalar function of parameters and a batch.
        has_aux: whether `fun` returns `(value, aux)`.
        argnums: the arguments to differentiate, as in `jax.grad`.
        batch_argnums: which arguments are batches.
        keep_batch_dim: whether `fun` sees an example as a batch of one, or without batch axis.
        microbatch_size: the most examples to compute at once. None takes all.
        accumulator: an `AccumulationType`, an `Accumulator`, or a pytree of these that is a
            prefix of what `transform_fn` returns.
        transform_fn: applied to the gradient of each example.
        metrics_fn: applied to the gradient of each example, before it is transformed.
        num_real_microbatches: run only that many microbatches, the first in the given order. SUM
            and the means are then over the examples that ran, and `PerExample` has zeros for the
            others. As a Python int it makes a shorter program; traced, one program serves every
            number, but cannot be differentiated in reverse mode. On a mesh of D devices it takes a
            "strided" order and a number of examples that D times the size of the microbatches
            divides.
        in_axes: the batch axis of all batch arguments, or a sequence with an entry for each of
            `batch_argnums`; an entry may be a pytree prefix of the argument, with None for leaves
            that are not batched.
        vmap_fn: a function with the signature of `jax.vmap`, called by position with a function
            of the batched leaves alone, a tuple of their axes, and `out_axes`; for example
            `functools.partial(jax.vmap, spmd_axis_name="data")`.
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
        replicated: whether `PerExample`, and what CONCAT collects, is replicated on every device.
            By default it is sharded along the axis of examples, if the number of devices divides
            that of examples; what is reduced is always replicated.

    Returns:
        A function of the arguments of `fun` that returns `(result, PerExample)`. Arguments may be
        passed by position or by name. Call it under `jax.jit`.

    Raises:
        ValueError: if the batch arguments have no common length or are missing, an axis does not
            exist, the accumulator does not fit the gradients, or more microbatches are asked for
            than there are; if both a size and a budget are given; if the mesh has no such axis, an
            array is committed to devices elsewhere, or the call is inside a `jax.shard_map` over
            the axis.
        TypeError: if a size is no integer, `transform_fn` or `metrics_fn` no function, or a mean
            is asked for of integers.
        MemoryBudgetError: if not even microbatches of one fit the budget.

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

    def batch_of(args: Sequence[Any], kwargs: dict[str, Any]) -> Batch:
        return batched_arguments(fun, args, kwargs, batch_argnums, (), in_axes)

    def run(size: int | None, limit: Size | None, *args: Any, **kwargs: Any) -> Any:
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
    def gradients(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _by_position(fun, args, kwargs)
        limit = num_real_microbatches
        if budget is None:
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
    fun: Fun, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call with everything by position that can be, where `jax.grad` looks for it."""
    if not kwargs:
        return args, kwargs
    try:
        bound = inspect.signature(fun).bind(*args, **kwargs)
    except (TypeError, ValueError):  # It has no signature, or one that is not its own.
        return args, kwargs
    return bound.args, bound.kwargs
