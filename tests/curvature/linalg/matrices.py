"""Matrices that the tests of `curvax.curvature.linalg` share, and shapes for them."""

import numpy as np
from hypothesis import strategies as st

STACKS = st.lists(st.integers(1, 3), max_size=2).map(tuple)


def normal(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def with_spectrum(values, dtype=np.float64, seed=0):
    """A symmetric matrix with these eigenvalues, in a random basis."""
    basis = np.linalg.qr(normal((len(values), len(values)), seed))[0]
    matrix = (basis * np.asarray(values)) @ basis.T
    return ((matrix + matrix.T) / 2).astype(dtype)


def spread_out(size, condition):
    """Eigenvalues between one and one over the condition, as many of each magnitude."""
    return np.geomspace(1, 1 / condition, size)


def in_two(size, condition):
    """Half of the eigenvalues one, half of them small: the hardest for a Cholesky inverse."""
    return np.repeat([1, 1 / condition], [size // 2, size - size // 2])


def positive(shape, seed=0):
    """Matrices of the shape (..., size, size) with moderate conditions."""
    rows = normal((*shape[:-2], 2 * shape[-1] + 1, shape[-1]), seed)
    return np.swapaxes(rows, -2, -1) @ rows / rows.shape[-2]


def power(matrix, exponent):
    """A power of positive definite matrices by the book."""
    values, vectors = np.linalg.eigh(matrix)
    return (vectors * values[..., None, :] ** exponent) @ np.swapaxes(vectors, -2, -1)
