"""Inverses by parts are what they are when computed at once."""

import jax
import numpy as np
import pytest
from hypothesis import given, strategies as st

from curvature.linalg.matrices import STACKS, positive
from curvax import _cpu
from curvax._cpu import inverse_root, positive_inverse


@pytest.fixture(autouse=True, scope="module")
def _small_parts():
    """Cut matrices of a few rows already, to be quick."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_cpu, "LARGEST_TILE", 32)
        patch.setattr(_cpu, "SMALLEST_TILE", 16)
        jax.clear_caches()
        yield
    jax.clear_caches()


# Around each size at which there is one part more, and beyond.
SIZES = st.sampled_from([1, 2, 17, 31, 32, 33, 35, 36, 37, 54, 65, 129])


@given(stack=STACKS, size=SIZES.filter(lambda size: size <= 32))
def test_an_inverse_root_is_the_transposed_inverse_of_the_cholesky_factor(stack, size):
    matrix = positive((*stack, size, size))
    root = np.swapaxes(jax.jit(inverse_root)(matrix), -2, -1)
    np.testing.assert_allclose(root, np.linalg.inv(np.linalg.cholesky(matrix)), atol=1e-9)
    np.testing.assert_array_equal(root, np.tril(root))


# Libraries invert at once on platforms other than this one.
@pytest.mark.parametrize("function", [positive_inverse, _cpu._plain_positive_inverse])
@given(stack=STACKS, size=SIZES)
def test_a_positive_inverse_is_the_inverse(function, stack, size):
    matrix = positive((*stack, size, size))
    inverse = jax.jit(function)(matrix)
    np.testing.assert_allclose(inverse, np.linalg.inv(matrix), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", [70, 150])
def test_it_is_the_same_under_jit_and_vmap(size):
    matrices = positive((3, size, size))
    expected = np.stack([jax.jit(positive_inverse)(matrix) for matrix in matrices])
    found = jax.jit(jax.vmap(positive_inverse))(matrices)
    np.testing.assert_allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize("size", [5, 70, 150])
def test_the_inverse_of_a_matrix_that_is_not_positive_is_not_finite(size):
    assert not np.all(np.isfinite(jax.jit(positive_inverse)(-np.eye(size))))
