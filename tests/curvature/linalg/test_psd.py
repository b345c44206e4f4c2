"""Powers of PSD matrices: right where they can be, and finite and positive everywhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

from curvature.linalg.matrices import (
    STACKS,
    in_two,
    normal,
    positive,
    power,
    spread_out,
    with_spectrum,
)
from curvax.curvature.linalg import psd
from curvax.curvature.linalg.psd import (
    add_identity,
    clamp_eigenvalues,
    psd_eigh,
    psd_power,
    spectral_power,
)

POWERS = st.sampled_from([-2, -1, -0.5, -0.25, 0, 0.5, 1, 2])
DTYPES = [np.float32, np.float64]
INVERSE = jax.jit(lambda matrix, weight: psd_power(matrix, weight, -1))


@pytest.fixture
def no_eigenvalues(monkeypatch):
    """What is computed from eigenvalues is not a number."""
    none = lambda values, vectors, *_: jnp.full_like(vectors, jnp.nan)
    monkeypatch.setattr(psd, "_from_eigenvalues", none)
    jax.clear_caches()
    yield
    jax.clear_caches()


def inverse_of(matrix, weight=0.0):
    return np.asarray(INVERSE(jnp.asarray(matrix), weight), np.float64)


def assert_positive(inverse, eps):
    """Finite, symmetric, and without negative eigenvalues, to rounding."""
    largest = np.max(np.abs(inverse))
    assert np.all(np.isfinite(inverse))
    np.testing.assert_allclose(inverse, inverse.T, atol=10 * eps * largest)
    assert np.linalg.eigvalsh(inverse)[0] >= -10 * eps * largest


@given(stack=STACKS, size=st.integers(1, 9), exponent=POWERS, weight=st.sampled_from([0.0, 0.3]))
def test_a_power_is_the_power_of_the_damped_matrix(stack, size, exponent, weight):
    matrix = positive((*stack, size, size))
    expected = power(matrix + weight * np.eye(size), exponent)
    found = jax.jit(psd_power, static_argnums=2)(matrix, weight, exponent)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-8 * np.abs(expected).max())


@pytest.mark.parametrize("exponent", [-1, 0.5])
def test_each_matrix_of_a_stack_may_have_another_damping(exponent):
    matrices, weights = positive((2, 3, 4, 4)), np.arange(6.0).reshape(2, 3)
    found = jax.jit(lambda m, w: psd_power(m, w, exponent))(matrices, weights)
    damped = matrices + weights[..., None, None] * np.eye(4)
    np.testing.assert_allclose(found, power(damped, exponent), atol=1e-8)
    np.testing.assert_allclose(add_identity(jnp.asarray(matrices), jnp.asarray(weights)), damped)


def test_a_power_can_be_vmapped():
    matrices = positive((3, 4, 4))
    found = jax.jit(jax.vmap(lambda m, w: psd_power(m, w, -1), (0, None)))(matrices, 0.1)
    np.testing.assert_allclose(found, np.linalg.inv(matrices + 0.1 * np.eye(4)), atol=1e-8)


# Up to the second size nothing is cut. Of what is cut, errors grow faster with the condition.
@pytest.mark.parametrize(("size", "exponent"), [(40, 1), (200, 1.5)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spectrum", [spread_out, in_two])
def test_inverses_stay_positive_at_any_condition(dtype, spectrum, size, exponent):
    eps = float(np.finfo(dtype).eps)
    for condition in 10.0 ** np.arange(0, 13):
        matrix = with_spectrum(spectrum(size, condition), dtype)
        inverse = inverse_of(matrix)
        assert_positive(inverse, eps)
        if condition * eps < 0.01:  # Otherwise the matrix itself is not known well enough.
            exact = np.linalg.inv(matrix.astype(np.float64))
            error = np.linalg.norm(inverse - exact) / np.linalg.norm(exact)
            assert error <= min(2 * condition**exponent * eps + 10 * eps, 0.1)


@pytest.mark.parametrize("exponent", [-1, -0.5, 0.5, 1])
@pytest.mark.parametrize("stack", [(), (3,)])
def test_a_scale_is_a_factor(exponent, stack):
    matrix, weight, scale = positive((*stack, 7, 7)), np.full(stack, 0.3), 0.5 + np.ones(stack)
    found = jax.jit(psd_power, static_argnums=2)(matrix, weight, exponent, scale)
    scaled = np.reshape(scale, (*stack, 1, 1)) * matrix
    expected = jax.jit(psd_power, static_argnums=2)(scaled, weight, exponent)
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("size", [6, 130])
def test_an_inverse_has_derivatives_both_ways(size):
    matrix, change = jnp.asarray(positive((size, size))), jnp.asarray(normal((size, size)))
    arguments, changes = (matrix, 0.3, 1.5), (change + change.T, 0.2, 0.1)
    inverse = lambda matrix, weight, scale: psd_power(matrix, weight, -1, scale)
    naive = lambda matrix, weight, scale: jnp.linalg.inv(scale * matrix + weight * jnp.eye(size))
    _, found = jax.jvp(jax.jit(inverse), arguments, changes)
    _, expected = jax.jvp(jax.jit(naive), arguments, changes)
    np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-9)
    total = lambda function: jax.grad(lambda args: jnp.sum(function(*args) * change))
    for ours, theirs in zip(total(inverse)(arguments), total(naive)(arguments), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-7, atol=1e-7)


@pytest.mark.usefixtures("no_eigenvalues")
def test_of_several_matrices_only_the_singular_one_is_computed_otherwise():
    matrices = np.stack([np.eye(5), np.zeros((5, 5))])
    found = jax.jit(lambda matrices: psd_power(matrices, 0.0, -1))(matrices)
    np.testing.assert_array_equal(found[0], np.eye(5))
    assert np.all(np.isnan(found[1]))


@pytest.mark.parametrize("exponent", [-1, -0.5, 1])
def test_a_matrix_may_be_empty(exponent):
    assert psd_power(jnp.zeros((2, 0, 0)), 0.1, exponent).shape == (2, 0, 0)


@pytest.mark.parametrize("size", [3, 300])
@pytest.mark.parametrize(("spectrum", "condition"), [(spread_out, 1e5), (in_two, 3e4)])
@pytest.mark.usefixtures("no_eigenvalues")
def test_no_eigenvalues_are_computed_at_such_a_condition(size, spectrum, condition):
    inverse = jax.jit(lambda matrix: psd_power(matrix, 0.0, -1))
    found = inverse(with_spectrum(spectrum(size, condition), np.float32))
    # The smallest eigenvalue of an inverse is the first to be wrong.
    assert 0.9 < np.linalg.eigvalsh(np.asarray(found, np.float64))[0] < 1.1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight", [0.0, 1e-12, 1e-3])
@pytest.mark.parametrize("rank", [0, 1, 5])
def test_singular_matrices_invert(dtype, weight, rank):
    rows = normal((rank, 12)).astype(dtype)
    matrix = rows.T @ rows
    inverse = inverse_of(matrix, weight)
    assert_positive(inverse, float(np.finfo(dtype).eps))
    if rank:  # In the range of the matrix it is an inverse, whatever happens outside it.
        damped = matrix.astype(np.float64) + weight * np.eye(12)
        inside = np.linalg.svd(rows.astype(np.float64))[2][:rank]
        expected = np.linalg.inv(inside @ damped @ inside.T)
        rounding = 10 * float(np.finfo(dtype).eps) * np.max(np.abs(inverse))
        np.testing.assert_allclose(inside @ inverse @ inside.T, expected, atol=rounding)
    elif weight:
        np.testing.assert_allclose(inverse, np.eye(12) / weight, rtol=1e-6)
    else:
        np.testing.assert_array_equal(inverse, 0)


@pytest.mark.parametrize("exponent", [-1, -0.5, 1, 0.5])
def test_nan_is_returned(exponent):
    matrix = jnp.eye(3).at[1, 1].set(jnp.nan)
    assert jax.jit(psd_power, static_argnums=2)(matrix, 0.1, exponent).shape == (3, 3)


def test_one_bad_matrix_does_not_spoil_its_neighbours():
    matrices = np.stack([positive((4, 4)), np.zeros((4, 4))])
    found = INVERSE(matrices, 0.0)
    np.testing.assert_allclose(found[0], np.linalg.inv(matrices[0]), rtol=1e-8)
    assert np.all(np.isfinite(found))


def test_eigenvalues_are_not_negative():
    matrix = with_spectrum([1.0, 0.5, -1e-3])
    values, vectors = psd_eigh(jnp.asarray(matrix))
    np.testing.assert_allclose(values, [0, 0.5, 1], atol=1e-14)
    np.testing.assert_allclose(vectors.T @ vectors, np.eye(3), atol=1e-14)


@given(stack=STACKS, exponent=POWERS)
def test_powers_of_eigenvalues_are_those_of_numbers(stack, exponent):
    values = 0.1 + np.abs(normal((*stack, 5)))
    np.testing.assert_allclose(spectral_power(jnp.asarray(values), exponent), values**exponent)


def test_only_zeros_are_taken_to_be_something_else():
    eps = np.finfo(np.float64).eps
    found = spectral_power(jnp.array([0.0, 1e-30, 2.0]), -1)
    np.testing.assert_allclose(found, [1 / (16 * eps), 1e30, 0.5])
    np.testing.assert_array_equal(spectral_power(jnp.zeros(3), -0.5), 0)
    # All eigenvalues of a matrix are compared with the largest of them.
    grid = jnp.array([[4.0, 0.0], [1.0, 1.0]])
    by_matrix = spectral_power(grid, -1, axes=(-2, -1))
    np.testing.assert_allclose(by_matrix, [[0.25, 1 / (32 * eps)], [1, 1]])


def test_eigenvalues_of_dense_matrices_are_clamped_only_without_damping():
    eps = np.finfo(np.float64).eps
    values = jnp.array([[0.0, 1e-30, 2.0], [0.0, 1e-30, 2.0]])
    found = clamp_eigenvalues(values, jnp.array([0.0, 1e-40]), -1)
    np.testing.assert_array_equal(found, [[16 * eps, 16 * eps, 2], [0, 1e-30, 2]])
    np.testing.assert_array_equal(clamp_eigenvalues(values, 0.0, 0.5), values)


@pytest.mark.parametrize("scale", [1e-25, 1e-20, 1.0, 1e20])
@pytest.mark.parametrize("size", [20, 130])
@pytest.mark.parametrize("rank", [1, 10])
@pytest.mark.parametrize("decoupled", [False, True])
def test_inverses_of_any_size_of_numbers_in_float32(scale, size, rank, decoupled):
    rows = normal((rank, size))
    matrix = rows.T @ rows / size
    if decoupled:  # The largest column knows nothing of the others.
        matrix[0], matrix[:, 0] = 0, 0
        matrix[0, 0] = 1.5 * np.max(np.diag(matrix))
    for damping in (1e-1, 1e-3, 1e-5, 1e-6):
        weight = np.float32(damping * scale)
        given = (scale * matrix).astype(np.float32)
        inverse = inverse_of(given, weight)
        exact = np.linalg.inv(given / scale + float(weight) / scale * np.eye(size)) / scale
        assert np.linalg.norm(inverse - exact) <= 0.15 * np.linalg.norm(exact)
