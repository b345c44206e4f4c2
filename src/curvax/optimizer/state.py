"""The state of the optimizer, results of steps, and arithmetic of vectors like the parameters."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from curvax import _jax
from curvax._types import Array, PyTree, at_least_single


def _no_steps() -> Array:
    return jnp.zeros((), jnp.int32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OptimizerState:
    """What the optimizer carries from one step to the next: a pytree, to be saved as any other.

    Attributes:
        velocities: The last update of the parameters.
        estimator_state: The state of the curvature estimator.
        damping: The damping if it is adaptive, else None.
        data_seen: The number of examples so far; it saturates at the largest integer.
        step_counter: The number of steps so far.
        damping_factor: Multiplies a given or scheduled damping. It is one unless steps were skipped
            or rejected, and returns to one with the steps that follow.
        skipped: The number of steps that were skipped because something was not finite.
        rejected: The number of steps that were rejected because the loss would have risen.
        is_stale: Whether the next step computes curvature and inverses whatever their periods.
    """

    velocities: Any
    estimator_state: Any
    damping: Any
    data_seen: Any
    step_counter: Any
    damping_factor: Any = field(default_factory=lambda: jnp.ones(()), kw_only=True)
    skipped: Any = field(default_factory=_no_steps, kw_only=True)
    rejected: Any = field(default_factory=_no_steps, kw_only=True)
    is_stale: Any = field(default_factory=lambda: jnp.ones((), bool), kw_only=True)

    @classmethod
    def like_params(cls, params: Any) -> "OptimizerState":
        """Return a state that holds `params` where it is like the parameters, else None."""
        others = {entry.name: None for entry in fields(cls)}
        return cls(**(others | {"velocities": params}))


class StepResult(NamedTuple):
    """What `Optimizer.step` and `fit` return for a function without state.

    Attributes:
        params: The parameters after the step.
        state: The state of the optimizer.
        stats: Statistics of the step, by name; see `Optimizer`.
    """

    params: PyTree
    state: OptimizerState
    stats: dict[str, Any]


class StepResultWithFuncState(NamedTuple):
    """What `Optimizer.step` and `fit` return for a function with state.

    Attributes:
        params: The parameters after the step.
        state: The state of the optimizer.
        func_state: The state of the function.
        stats: Statistics of the step, by name; see `Optimizer`.
    """

    params: PyTree
    state: OptimizerState
    func_state: PyTree
    stats: dict[str, Any]


def step_result(
    params: PyTree,
    state: OptimizerState,
    func_state: PyTree,
    stats: dict[str, Any],
    *,
    has_func_state: bool,
) -> StepResult | StepResultWithFuncState:
    """Return the results of a step, with the state of the function if it has one."""
    if has_func_state:
        return StepResultWithFuncState(params, state, func_state, stats)
    return StepResult(params, state, stats)


# Vectors that are pytrees like the parameters: inner products, sums, norms.
#
# Scalars that are computed from them have at least single precision, whatever the parameters have.


def number_type(tree: PyTree) -> Any:
    """Return the dtype of scalars that are computed from a pytree."""
    dtypes = [jnp.result_type(x) for x in jax.tree.leaves(tree)]
    widest = max(dtypes, key=lambda dtype: jnp.finfo(dtype).bits, default=jnp.dtype(jnp.float32))
    return jnp.finfo(at_least_single(widest)).dtype


def inner(x: PyTree, y: PyTree) -> Array:
    """Return the inner product of two vectors."""
    dtype = number_type(x)
    leaves = zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True)
    pairs = [(jnp.asarray(a, dtype), jnp.asarray(b, dtype)) for a, b in leaves]
    # Small arrays are concatenated, as XLA compiles a kernel for each product of vectors.
    is_small = lambda a: a.ndim < 2 and _jax.sharding_of(a) is None
    small = [pair for pair in pairs if is_small(pair[0])]
    total = sum((jnp.vdot(a, b) for a, b in pairs if not is_small(a)), start=jnp.zeros((), dtype))
    if not small:
        return total
    a, b = (jnp.concatenate([x.reshape(-1) for x in side]) for side in zip(*small, strict=True))
    return total + jnp.vdot(a, b)


def norm(x: PyTree) -> Array:
    """Return the Euclidean norm of a vector."""
    return jnp.sqrt(inner(x, x))


def norms(tree: PyTree) -> dict[str, Array]:
    """Return the norm of each leaf, by its path."""
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): norm(leaf) for path, leaf in paths}


def inner_products(xs: Sequence[PyTree], ys: Sequence[PyTree]) -> Array:
    """Return the matrix of inner products of some vectors with others, or with themselves."""
    if xs is not ys:
        return jnp.stack([jnp.stack([inner(x, y) for y in ys]) for x in xs])
    found = {(i, j): inner(xs[i], xs[j]) for i in range(len(xs)) for j in range(i + 1)}
    either = lambda i, j: found[max(i, j), min(i, j)]
    return jnp.stack([jnp.stack([either(i, j) for j in range(len(xs))]) for i in range(len(xs))])


def combined(coefficients: Sequence[Array], vectors: Sequence[PyTree]) -> PyTree:
    """Return a linear combination of vectors, in the dtypes of the first."""

    def total(*leaves: Any) -> Array:
        pairs = zip(coefficients, leaves, strict=True)
        terms = [c * jnp.asarray(x, c.dtype) for c, x in pairs]
        return sum(terms[1:], start=terms[0]).astype(jnp.result_type(leaves[0]))

    return jax.tree.map(total, *vectors)


def selected(flag: Array, one: PyTree, other: PyTree) -> PyTree:
    """Return `one` if the flag is set, else `other`."""
    return jax.tree.map(
        lambda x, y: jnp.where(flag, x, jnp.asarray(y, jnp.result_type(x))), one, other
    )
