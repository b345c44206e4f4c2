"""`fisher_information`: the sum of outer products of scores, a microbatch of data at a time."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from curvax._errors import where
from curvax._tree import leaf_name
from curvax._types import Array, Fun, PyTree
from curvax.derivatives.arguments import (
    Options,
    Point,
    TracedFunction,
    check_block_size,
    check_options,
    check_scalar,
    trace_function,
)
from curvax.derivatives.columns import advised, has_derivative, plan_blocks, raised
from curvax.devices.mesh_axis import Axis
from curvax.maps.accumulators import AccumulationType
from curvax.maps.microbatch import microbatch
from curvax.memory.budget import Budget
from curvax.memory.compiled import Objective


def fisher_information(
    loglike: Fun,
    x: PyTree,
    data: PyTree,
    nbatches: int = 1,
    jit: bool = True,
    checkpoint: bool = False,
    *,
    batch_size: int | None = None,
    memory_budget: Budget | None = None,
    objective: Objective = "memory",
    mesh: Mesh | None = None,
    axis: Axis | None = None,
) -> tuple[Array, Callable[[Array], PyTree]]:
    """Compute the empirical Fisher information: the sum over data of outer products of scores.

    Equal to

        scores = jax.vmap(lambda d: ravel(jax.grad(loglike)(x, d)))(data)
        return scores.T @ scores, unflatten

    except that the scores of one microbatch exist at a time.

    Arguments:
        loglike: the log-likelihood of one example, a real scalar function of `x` and the example.
        x: a pytree of real floating-point arrays, of any dtypes.
        data: a pytree of arrays with examples along their leading axes.
        nbatches: the number of microbatches.
        jit: whether to compile.
        checkpoint: whether to recompute what `loglike` computes on the way instead of saving it:
            less memory, more time.
        batch_size: the number of examples in a microbatch, in place of `nbatches`.
        memory_budget: bytes, in place of both, in any form that `parse_memory` takes: what the
            call, compiled by itself, may allocate, the result included.
        objective: with a budget, "memory" takes the largest microbatch that fits, "time" one that
            is expected to be fast, by a rule: on a CPU a small one, whose temporaries stay in the
            cache, elsewhere the largest.
        mesh: devices among which examples are sharded, evenly. Each computes the sum over its shard
            in microbatches, and sizes and budgets are for each.
        axis: the axis of the mesh to shard along, or several. With one axis it may be left out.

    Returns:
        `(F, unflatten)`: the (n, n) matrix over the coordinates of `x`, and the function that makes
        a vector of n numbers a pytree like `x`. On a mesh `F` is replicated.

    Raises:
        ValueError: if there are more batches than examples, arrays of `data` disagree in length,
            two sizes are given, a budget or a mesh with `jit=False`, or the number of devices does
            not divide the number of examples.
        TypeError: if `x` is not real floating-point, or `loglike` no real scalar.
        MemoryBudgetError: if not even single examples fit the budget.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> loglike = lambda mean, y: -0.5 * jnp.sum((y - mean) ** 2)
        >>> F, unflatten = curvax.fisher_information(loglike, jnp.zeros(2), jnp.eye(3, 2))
        >>> F
        Array([[1., 0.],
               [0., 1.]], dtype=float32)
    """
    options = check_options(nbatches, batch_size, memory_budget, objective, jit, mesh, axis)
    point, x = Point.of(x), jax.tree.map(jnp.asarray, x)
    num_examples = _num_examples(data)
    if options.axis is not None:
        options.axis.check_divides(num_examples, "data")
    length = options.local_length(num_examples)
    block_size = check_block_size(options, length, what="examples")
    traced = _trace_log_likelihood(loglike, x, data, options)

    def build(size: int) -> Fun:
        def program(consts: Sequence[Any], x: PyTree, data: PyTree) -> Array:
            f = traced.bind(consts)
            g = jax.checkpoint(f) if checkpoint else f

            def products(x: PyTree, data: PyTree) -> Array:
                score = lambda example: point.flatten(jax.grad(g)(x, example))
                scores = jax.vmap(score)(data)
                return scores.T @ scores

            total = microbatch(
                products, 1, size, AccumulationType.SUM, order="contiguous", mesh=mesh, axis=axis
            )
            return total(x, data)

        return program

    with advised(*_forward_advice(traced, x, data)):
        args = traced.consts, x, data
        key = "fisher_information", checkpoint
        plan = plan_blocks(build, [traced], args, options, block_size, length, key=key)
        F = plan(*args)
    return F, point.unflatten


def _trace_log_likelihood(
    loglike: Fun, x: PyTree, data: PyTree, options: Options
) -> TracedFunction:
    """Trace the log-likelihood of one example, and check that it is one real number."""
    traced = trace_function(loglike, (x, _first_example(data)), options)
    message = "loglike must return a real floating-point scalar for an example"
    check_scalar(traced.outputs, message)
    return traced


def _first_example(data: PyTree) -> PyTree:
    """Return the shapes of one example."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), data)


def _forward_advice(
    loglike: TracedFunction, x: PyTree, data: PyTree
) -> tuple[Callable[[], Exception | None], Callable[[], str | None]]:
    """Why there are no scores, and what to do then."""
    f, example = loglike.traced(), _first_example(data)

    def advice() -> str | None:
        forward = lambda x, example: jax.jvp(lambda x: f(x, example), (x,), (x,))[1]
        if not has_derivative(forward, x, example):
            return None
        return (
            "loglike has no derivative in reverse mode, but it has one in forward mode: with S, "
            "unflatten = curvax.jacobian(lambda x: jax.vmap(loglike, (None, 0))(x, data), x, "
            "mode='forward'), the matrix is S.T @ S."
        )

    return lambda: raised(jax.grad(f), x, example), advice


def _num_examples(data: Any) -> int:
    sizes = {
        leaf_name("data", path): jnp.shape(leaf)[:1]
        for path, leaf in jax.tree_util.tree_leaves_with_path(data)
    }
    if not sizes or () in sizes.values() or len(set(sizes.values())) > 1:
        listed = ", ".join(
            f"{name} has {size[0] if size else 'no axis'}" for name, size in sizes.items()
        )
        raise ValueError(
            f"{where()}: data must be arrays with the same number of examples along their leading "
            f"axes, but {listed or 'there are none'}."
        )
    return next(iter(sizes.values()))[0]
