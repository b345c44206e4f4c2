"""The state of the optimizer, the results of a step, and linear algebra on pytrees."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypeAlias, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from curvax import _jax
from curvax._types import Array, PyTree, at_least_single
from curvax.curvature.block_diagonal import BlockDiagonalCurvature

Stats: TypeAlias = dict[str, PyTree]
"""The statistics of a step by name: scalars, `aux`, and dictionaries of scalars by parameter."""


def _zero_count() -> Array:
    return jnp.zeros((), jnp.int32)


# Not checked at run time: `jax.tree.map` builds states of shardings, shapes, None.
@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OptimizerState:
    """The state of `Optimizer` between steps: a pytree of arrays, which any checkpointer can save.

    Attributes:
        velocities: The last update of the parameters.
        estimator_state: The state of the curvature estimator.
        damping: The adaptive damping, or None if the damping is given or scheduled.
        data_seen: The number of examples so far. It saturates at the largest integer.
        step_counter: The number of steps so far.
        damping_factor: The factor of a given or scheduled damping. It grows with each step that is
            skipped or rejected, and decays to one with the steps that follow.
        skipped: The number of steps that were skipped because of a non-finite value.
        rejected: The number of steps that were rejected because they would have increased the loss.
        is_stale: Whether the next step updates curvature and inverses regardless of their periods.

    Examples:
        >>> import curvax, jax, jax.numpy as jnp
        >>> def loss(w, batch):
        ...     x, y = batch
        ...     return jnp.mean((curvax.register_squared_error_loss(x @ w, y) - y) ** 2)
        >>> optimizer = curvax.Optimizer(jax.value_and_grad(loss), l2_reg=0.0)
        >>> batch = jnp.eye(4), jnp.ones((4, 1))
        >>> state = optimizer.init(jnp.zeros((4, 1)), jax.random.key(0), batch)
        >>> int(state.step_counter), state.velocities.shape
        (0, (4, 1))
        >>> factors = state.estimator_state.blocks_states[0]  # Of the only layer.
        >>> factors.inputs_factor.raw_value.shape, factors.outputs_factor.raw_value.shape
        ((4, 4), (1, 1))
    """

    velocities: PyTree
    estimator_state: BlockDiagonalCurvature.State
    damping: Array | None
    data_seen: Array
    step_counter: Array
    damping_factor: Array = field(default_factory=lambda: jnp.ones(()), kw_only=True)
    skipped: Array = field(default_factory=_zero_count, kw_only=True)
    rejected: Array = field(default_factory=_zero_count, kw_only=True)
    is_stale: Array = field(default_factory=lambda: jnp.ones((), bool), kw_only=True)

    @classmethod
    def like_params(cls, params: PyTree) -> "OptimizerState":
        """Return a state with `params` for those fields that are like the parameters, else None."""
        values: dict[str, Any] = dict.fromkeys(entry.name for entry in fields(cls))
        return cls(**(values | {"velocities": params}))


class StepResult(NamedTuple):
    """The result of `Optimizer.step` and `fit` for a function without state.

    Attributes:
        params: The parameters after the step.
        state: The state of the optimizer.
        stats: Statistics of the step, by name: loss, learning rate, momentum, damping, and what the
            options of `Optimizer` add.
    """

    params: PyTree
    state: OptimizerState
    stats: Stats


class StepResultWithFuncState(NamedTuple):
    """The result of `Optimizer.step` and `fit` for a function with state.

    Attributes:
        params: The parameters after the step.
        state: The state of the optimizer.
        func_state: The state of the function.
        stats: Statistics of the step, by name: loss, learning rate, momentum, damping, and what the
            options of `Optimizer` add.
    """

    params: PyTree
    state: OptimizerState
    func_state: PyTree
    stats: Stats


def step_result(
    params: PyTree,
    state: OptimizerState,
    func_state: PyTree,
    stats: Stats,
    *,
    has_func_state: bool,
) -> StepResult | StepResultWithFuncState:
    """Return the result of a step, with the state of the function if it has one."""
    if has_func_state:
        return StepResultWithFuncState(params, state, func_state, stats)
    return StepResult(params, state, stats)


# Vectors are pytrees like the parameters. Scalars that are computed from them have at least single
# precision, whatever the precision of the parameters.


def scalar_dtype(tree: PyTree) -> np.dtype:
    """Return the dtype of scalars that are computed from a pytree."""
    dtypes = [jnp.result_type(x) for x in jax.tree.leaves(tree)]
    widest = max(dtypes, key=lambda dtype: jnp.finfo(dtype).bits, default=jnp.dtype(jnp.float32))
    return jnp.finfo(at_least_single(widest)).dtype


def inner(x: PyTree, y: PyTree) -> Array:
    """Return the inner product of two vectors."""
    dtype = scalar_dtype(x)
    leaves = zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True)
    pairs = [(jnp.asarray(a, dtype), jnp.asarray(b, dtype)) for a, b in leaves]
    # XLA compiles a kernel for each product of vectors, so small arrays are concatenated.
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
    """Return the matrix of inner products `xᵢᵀ yⱼ`; half of them are computed if `xs is ys`."""
    if xs is not ys:
        return jnp.stack([jnp.stack([inner(x, y) for y in ys]) for x in xs])
    lower = {(i, j): inner(xs[i], xs[j]) for i in range(len(xs)) for j in range(i + 1)}
    entry = lambda i, j: lower[max(i, j), min(i, j)]
    return jnp.stack([jnp.stack([entry(i, j) for j in range(len(xs))]) for i in range(len(xs))])


def linear_combination(coefficients: Sequence[Array], vectors: Sequence[PyTree]) -> PyTree:
    """Return a linear combination of vectors, in the dtypes of the first."""

    def total(*leaves: ArrayLike) -> Array:
        pairs = zip(coefficients, leaves, strict=True)
        terms = [c * jnp.asarray(x, c.dtype) for c, x in pairs]
        return sum(terms[1:], start=terms[0]).astype(jnp.result_type(leaves[0]))

    return jax.tree.map(total, *vectors)


def select(flag: Array, on_true: PyTree, on_false: PyTree) -> PyTree:
    """Return `on_true` if the flag is set, else `on_false`, in the dtypes of `on_true`."""
    return jax.tree.map(
        lambda x, y: jnp.where(flag, x, jnp.asarray(y, jnp.result_type(x))), on_true, on_false
    )
