"""`fisher_information`: the sum of outer products of scores, a microbatch of data at a time.

This is the empirical Fisher information: scores are taken at the data, not at samples of the model.
Kunstner, Balles and Hennig (2019), "Limitations of the empirical Fisher approximation for natural
gradient descent", compare the two.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from curvax import _jax
from curvax._errors import where
from curvax._tree import leaf_name
from curvax._types import Array, Float, Fun, PyTree
from curvax.derivatives.arguments import (
    Options,
    Point,
    TracedFunction,
    Unflatten,
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
) -> tuple[Float[Array, "n n"], Unflatten]:
    """Compute the empirical Fisher information: the sum over data of outer products of scores.

    Equal to

        scores = jax.vmap(lambda d: ravel(jax.grad(loglike)(x, d)))(data)
        return scores.T @ scores, unflatten

    except that only the scores of one microbatch exist at a time.

    Arguments:
        loglike: Log-likelihood of one example: a real scalar function of `x` and the example.
        x: A pytree of real floating-point arrays, possibly of different dtypes.
        data: A pytree of arrays with examples along their leading axes.
        nbatches: Number of microbatches.
        jit: Whether to compile the computation.
        checkpoint: Whether to apply `jax.checkpoint` to `loglike`: its intermediate values are
            recomputed instead of saved, which takes less memory and more time.
        batch_size: Number of examples in a microbatch, instead of `nbatches`.
        memory_budget: Memory that the call, compiled by itself, may allocate, including the result,
            instead of `nbatches` or `batch_size`: such as "1GB", or any other form that
            `parse_memory` accepts.
        objective: How to choose a size within the budget. "memory" takes the largest microbatch
            that fits; "time" takes one that is expected to be fast, by a rule: on a CPU a small
            one, whose temporaries stay in the cache, elsewhere the largest.
        mesh: Devices among which examples are sharded, evenly. Each device sums over its shard in
            microbatches; sizes and budgets are per device.
        axis: Name of the mesh axis to shard along, or several names. It can be left out for a mesh
            with one axis.

    Returns:
        `(F, unflatten)`: the (n, n) matrix over the coordinates of `x` in the order of
        `jax.flatten_util.ravel_pytree`, and the function that converts a vector of length n to a
        pytree like `x`. On a mesh `F` is replicated.

    Raises:
        ValueError: If there are more microbatches than examples, arrays of `data` differ in length,
            more than one size is given, a budget or a mesh is combined with `jit=False`, or the
            number of devices does not divide the number of examples.
        TypeError: If `x` is not real floating-point, or `loglike` is not a real scalar.
        MemoryBudgetError: If not even microbatches of one example fit the budget.

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
        def program(consts: Sequence[_jax.Value], x: PyTree, data: PyTree) -> Array:
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
    """Trace the log-likelihood of one example, and check that it is a real scalar."""
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
    """Return the two arguments of `advised`: why there are no scores, and what to do then."""
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


def _num_examples(data: PyTree) -> int:
    """Return the number of examples, which all arrays must have in common."""
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
