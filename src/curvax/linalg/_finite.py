"""`all_finite`: whether arrays have neither infinities nor anything that is not a number."""

import jax
import jax.numpy as jnp
import numpy as np

from curvax import _compat
from curvax._types import Array, PyTree

__all__ = ["all_finite"]

LONGEST = 2**14
"""Up to how many rows and columns a matrix is summed up by products."""


def all_finite(values: PyTree) -> Array:
    """Whether all arrays are finite. Equal to `all(jnp.all(jnp.isfinite(x)) for x in values)`.

    Matrices are summed up by products with those of two columns, whose elements are so small that
    a sum of finite numbers is finite. For products of matrices there is nothing to compile, unlike
    for comparisons: in a step of K-FAC these took a fifth of the time of all that is compiled.
    """
    arrays = [jnp.asarray(x) for x in jax.tree.leaves(values)]
    arrays = [x for x in arrays if jnp.issubdtype(x.dtype, jnp.inexact) and x.size]
    each = [jnp.all(jnp.isfinite(x)) for x in arrays if not _is_matrix(x)]
    sums: dict[jnp.dtype, list[Array]] = {}
    for x in filter(_is_matrix, arrays):
        total = _sum(x)
        sums.setdefault(total.dtype, []).append(total)
    each += [jnp.all(jnp.isfinite(jnp.stack(own))) for own in sums.values()]
    return jnp.all(jnp.stack(each)) if each else jnp.ones((), bool)


def _is_matrix(x: Array) -> bool:
    """Whether it has several rows and columns, and none that are split among devices.

    For the latter, products would have to say what becomes of it. Those with vectors are compiled,
    each by itself; and what is multiplied with is a constant in the program, as long as the matrix.
    """
    if x.ndim < 2 or _compat.sharding_of(x) is not None:
        return False
    rows, columns = x.size // x.shape[-1], x.shape[-1]
    return min(rows, columns) > 1 and rows + columns <= LONGEST


def _sum(x: Array) -> Array:
    """A matrix of two rows and columns that is finite if and only if all elements are."""
    rows = x.reshape(-1, x.shape[-1])
    if jnp.finfo(x.dtype).bits < 32:
        rows = rows.astype(jnp.float32)
    # The largest number, times this, can be added up more often than there are elements. Signs are
    # only to make constants of it: matrices of one number are filled by what has to be compiled.
    small = float(jnp.finfo(rows.dtype).tiny) ** 0.5
    signs = np.array([1, -1])
    columns = jnp.asarray(np.tile(small * signs, (rows.shape[1], 1)), rows.dtype)
    by_row = rows @ columns
    return jnp.asarray(np.tile(signs[:, None], rows.shape[0]), rows.dtype) @ by_row
