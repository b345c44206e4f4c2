"""The state of the optimizer."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import jax
import jax.numpy as jnp

from curvax import _jax
from curvax._dtypes import at_least_single
from curvax._types import Array, PyTree

__all__ = [
    "OptimizerState",
    "combined",
    "inner",
    "inner_products",
    "norm",
    "norms",
    "number_type",
    "selected",
]


def _no_steps() -> Array:
    return jnp.zeros((), jnp.int32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OptimizerState:
    """What the optimizer keeps from one step to the next: a pytree, to be saved as any other.

    Attributes:
        velocities: the last update of the parameters.
        estimator_state: the state of the curvature estimator.
        damping: the damping, if it is adaptive, else None.
        data_seen: the number of examples so far. It stays at the largest integer once it is there.
        step_counter: the number of steps so far.
        damping_factor: what a damping that is given or scheduled is multiplied with. It is one,
            unless steps were skipped or rejected, and comes back to one with those that are not.
        skipped: how many steps were skipped because something was not finite.
        rejected: how many steps were rejected because the loss would have risen.
        is_stale: whether the next step computes curvature and inverses, whatever their periods.
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
        """This for what is like the parameters, and None for everything else."""
        others = {entry.name: None for entry in fields(cls)}
        return cls(**(others | {"velocities": params}))


# Vectors that are pytrees like the parameters: inner products, sums, norms.
#
# Numbers that are computed from them are of at least single precision, whatever the parameters are.


def number_type(tree: PyTree) -> Any:
    """The dtype of numbers that are computed from a pytree."""
    dtypes = [jnp.result_type(x) for x in jax.tree.leaves(tree)]
    widest = max(dtypes, key=lambda dtype: jnp.finfo(dtype).bits, default=jnp.dtype(jnp.float32))
    return jnp.finfo(at_least_single(widest)).dtype


def inner(x: PyTree, y: PyTree) -> Array:
    """The inner product of two vectors."""
    dtype = number_type(x)
    leaves = zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True)
    pairs = [(jnp.asarray(a, dtype), jnp.asarray(b, dtype)) for a, b in leaves]
    # Small arrays are one, as something is compiled for the product of each.
    is_small = lambda a: a.ndim < 2 and _jax.sharding_of(a) is None
    small = [pair for pair in pairs if is_small(pair[0])]
    total = sum((jnp.vdot(a, b) for a, b in pairs if not is_small(a)), start=jnp.zeros((), dtype))
    if not small:
        return total
    a, b = (jnp.concatenate([x.reshape(-1) for x in side]) for side in zip(*small, strict=True))
    return total + jnp.vdot(a, b)


def norm(x: PyTree) -> Array:
    """The Euclidean norm of a vector."""
    return jnp.sqrt(inner(x, x))


def norms(tree: PyTree) -> dict[str, Array]:
    """The norm of each leaf, by its path."""
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): norm(leaf) for path, leaf in paths}


def inner_products(xs: Sequence[PyTree], ys: Sequence[PyTree]) -> Array:
    """The matrix of inner products of some vectors with others, or with themselves."""
    if xs is not ys:
        return jnp.stack([jnp.stack([inner(x, y) for y in ys]) for x in xs])
    found = {(i, j): inner(xs[i], xs[j]) for i in range(len(xs)) for j in range(i + 1)}
    either = lambda i, j: found[max(i, j), min(i, j)]
    return jnp.stack([jnp.stack([either(i, j) for j in range(len(xs))]) for i in range(len(xs))])


def combined(coefficients: Sequence[Array], vectors: Sequence[PyTree]) -> PyTree:
    """A sum of vectors times numbers, in the dtypes of the first."""

    def total(*leaves: Any) -> Array:
        pairs = zip(coefficients, leaves, strict=True)
        terms = [c * jnp.asarray(x, c.dtype) for c, x in pairs]
        return sum(terms[1:], start=terms[0]).astype(jnp.result_type(leaves[0]))

    return jax.tree.map(total, *vectors)


def selected(flag: Array, one: PyTree, other: PyTree) -> PyTree:
    """The one pytree or the other."""
    return jax.tree.map(
        lambda x, y: jnp.where(flag, x, jnp.asarray(y, jnp.result_type(x))), one, other
    )
