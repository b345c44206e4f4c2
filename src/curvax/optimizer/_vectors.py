"""Vectors that are pytrees like the parameters: inner products, sums, norms.

Numbers that are computed from them are of at least single precision, whatever the parameters are.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from curvax import _compat
from curvax._types import Array, PyTree

__all__ = ["combined", "inner", "inner_products", "norm", "norms", "number_type", "selected"]


def number_type(tree: PyTree) -> Any:
    """The dtype of numbers that are computed from a pytree."""
    dtypes = [jnp.result_type(x) for x in jax.tree.leaves(tree)]
    widest = max(dtypes, key=lambda dtype: jnp.finfo(dtype).bits, default=jnp.dtype(jnp.float32))
    return jnp.finfo(widest).dtype if jnp.finfo(widest).bits > 32 else jnp.dtype(jnp.float32)


def inner(x: PyTree, y: PyTree) -> Array:
    """The inner product of two vectors."""
    dtype = number_type(x)
    leaves = zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True)
    pairs = [(jnp.asarray(a, dtype), jnp.asarray(b, dtype)) for a, b in leaves]
    # Small arrays are one, as something is compiled for the product of each.
    is_small = lambda a: a.ndim < 2 and _compat.sharding_of(a) is None
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
