"""Sides and Kronecker products do what the dense matrices do that they stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from curvature.linalg.matrices import normal, positive, power
from curvax.curvature.linalg.kronecker import (
    DenseSide,
    DiagonalSide,
    Kronecker,
    from_basis,
    to_basis,
)
from curvax.curvature.linalg.tasks import run_matrix_tasks

SIDES = [DenseSide, DiagonalSide]
STACKS = [(), (2,), (2, 3)]


def powers(product, inputs, outputs, weight, exponent):
    """A power of both factors, computed."""
    both = lambda a, b, w: tuple(run_matrix_tasks(product.power(a, b, w, exponent)))
    return jax.jit(both)(inputs, outputs, weight)


def matrices_of(side, seed=0):
    """A side's arrays, and the dense matrices they stand for."""
    dense = positive((*side.stack, side.size, side.size), seed)
    dense = dense if isinstance(side, DenseSide) else dense * np.eye(side.size)
    is_dense = isinstance(side, DenseSide)
    return jnp.asarray(dense if is_dense else np.diagonal(dense, axis1=-2, axis2=-1)), dense


def dense_of(side, held):
    """The dense matrices that a side's arrays stand for."""
    return held if isinstance(side, DenseSide) else np.asarray(held)[..., None] * np.eye(side.size)


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("kind", SIDES)
def test_a_side_is_its_dense_matrices(kind, stack):
    side = kind(4, stack)
    held, dense = matrices_of(side)
    assert held.shape == side.shape
    np.testing.assert_allclose(dense_of(side, held), dense)
    np.testing.assert_allclose(side.trace(held), np.trace(dense, axis1=-2, axis2=-1))
    x = normal((*stack, 4, 3))
    np.testing.assert_allclose(side.act_on_inputs(held, jnp.asarray(x)), dense @ x)
    x = np.swapaxes(x, -2, -1)
    np.testing.assert_allclose(side.act_on_outputs(jnp.asarray(x), held), x @ dense)
    diagonal = normal((*stack, 4))
    made = dense_of(side, side.of_diagonal(jnp.asarray(diagonal)))
    np.testing.assert_allclose(made, diagonal[..., None] * np.eye(4))


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("kind", SIDES)
def test_a_side_of_rows_is_the_sum_of_their_outer_products(kind, stack):
    side, rows = kind(4, stack), normal((*stack, 6, 4))
    expected = np.einsum("...ni,...nj->...ij", rows, rows)
    expected = expected if kind is DenseSide else expected * np.eye(4)
    np.testing.assert_allclose(
        dense_of(side, side.of_rows(jnp.asarray(rows))), expected, atol=1e-12
    )


@pytest.mark.parametrize("exponent", [-1, -0.5, 1, 2])
@pytest.mark.parametrize("kind", SIDES)
def test_powers_and_eigenvalues_of_a_side_are_those_of_its_matrices(kind, exponent):
    side = kind(4, (2,))
    held, dense = matrices_of(side)
    raised = jax.jit(lambda held: run_matrix_tasks([side.power(held, 0.2, exponent)])[0])
    found = dense_of(side, raised(held))
    np.testing.assert_allclose(found, power(dense + 0.2 * np.eye(4), exponent), atol=1e-9)
    ((values, vectors),) = run_matrix_tasks([side.eigen(held)])
    np.testing.assert_allclose(np.sort(values), np.linalg.eigvalsh(dense), atol=1e-12)
    assert (vectors is None) == (kind is DiagonalSide)


def test_a_dense_side_is_more_work():
    assert DenseSide(5, (2,)).work > DiagonalSide(5, (2,)).work > DiagonalSide(5).work > 0


@pytest.fixture(
    params=[(a, b) for a in SIDES for b in SIDES],
    ids=lambda p: p[0].__name__[:5] + p[1].__name__[:5],
)
def product(request):
    """A Kronecker product, the arrays of its factors, and the dense factors."""
    inputs, outputs = request.param[0](3), request.param[1](4)
    (a, dense_a), (b, dense_b) = matrices_of(inputs, 1), matrices_of(outputs, 2)
    return Kronecker(inputs, outputs), (a, b), (dense_a, dense_b)


def test_a_product_acts_as_the_dense_one(product):
    kronecker, factors, dense = product
    x = normal((3, 4))
    expected = (np.kron(*dense) @ x.ravel()).reshape(3, 4)
    np.testing.assert_allclose(kronecker.multiply(*factors, jnp.asarray(x)), expected)


@pytest.mark.parametrize("exponent", [-1, -0.5, 0.5, 1])
def test_exact_powers_of_a_product_are_those_of_the_dense_one(product, exponent):
    kronecker, factors, dense = product
    x = normal((3, 4))
    damped = np.kron(*dense) + 0.1 * np.eye(12)
    expected = (power(damped, exponent) @ x.ravel()).reshape(3, 4)
    eigen = kronecker.eigen(*factors)
    found = jax.jit(kronecker.multiply_power, static_argnums=3)(eigen, x, 0.1, exponent)
    np.testing.assert_allclose(found, expected, atol=1e-9)
    values = np.sort(kronecker.eigenvalues(eigen), axis=None)
    np.testing.assert_allclose(values, np.linalg.eigvalsh(np.kron(*dense)), atol=1e-12)


def test_a_basis_can_be_entered_and_left(product):
    kronecker, factors, _ = product
    eigen, x = kronecker.eigen(*factors), jnp.asarray(normal((3, 4)))
    np.testing.assert_allclose(from_basis(eigen, to_basis(eigen, x)), x, atol=1e-12)
    # In its basis, the product is diagonal.
    there = to_basis(eigen, kronecker.multiply(*factors, x))
    np.testing.assert_allclose(there, kronecker.eigenvalues(eigen) * to_basis(eigen, x), atol=1e-12)


@pytest.mark.parametrize("exponent", [-1, 1, -0.5])
def test_damping_is_divided_by_the_ratio_of_scales(product, exponent):
    kronecker, factors, (a, b) = product
    pi = np.sqrt((np.trace(a) / 3) / (np.trace(b) / 4))
    found = powers(kronecker, *factors, 0.25, exponent)
    expected = power(a + 0.5 * pi * np.eye(3), exponent), power(b + 0.5 / pi * np.eye(4), exponent)
    sides = (kronecker.inputs, kronecker.outputs)
    for side, matrix, dense in zip(sides, found, expected, strict=True):
        np.testing.assert_allclose(dense_of(side, matrix), dense, atol=1e-9)


def test_a_factor_of_zeros_is_damped_as_if_both_were_of_one_scale():
    kronecker = Kronecker(DenseSide(2), DenseSide(3))
    found = powers(kronecker, np.zeros((2, 2)), np.eye(3), 0.25, -1)
    np.testing.assert_allclose(found[0], 2 * np.eye(2))
    np.testing.assert_allclose(found[1], np.eye(3) / 1.5)


def test_stacks_are_computed_together():
    kronecker = Kronecker(DenseSide(3, (2,)), DiagonalSide(4, (2,)))
    (a, dense_a), (b, dense_b) = (
        matrices_of(s, k) for k, s in enumerate([kronecker.inputs, kronecker.outputs])
    )
    x, weights = normal((2, 3, 4)), np.array([0.1, 0.4])
    found = kronecker.multiply_power(kronecker.eigen(a, b), jnp.asarray(x), weights, -1)
    approximate = powers(kronecker, a, b, weights, -1)
    for k in range(2):
        damped = np.kron(dense_a[k], dense_b[k]) + weights[k] * np.eye(12)
        np.testing.assert_allclose(
            found[k].ravel(), np.linalg.solve(damped, x[k].ravel()), atol=1e-9
        )
        pi = np.sqrt((np.trace(dense_a[k]) / 3) / (np.trace(dense_b[k]) / 4))
        expected = np.linalg.inv(dense_a[k] + np.sqrt(weights[k]) * pi * np.eye(3))
        np.testing.assert_allclose(approximate[0][k], expected, atol=1e-9)


def test_damping_is_divided_between_factors_of_very_different_scales():
    product = Kronecker(DenseSide(3), DenseSide(3))
    factors = [jnp.eye(3, dtype=jnp.float32) * size for size in (1e10, 1e-30)]
    inputs, outputs = powers(product, *factors, jnp.float32(1e-3), -1)
    # The damping is much the larger of both: 1e-20 in the product against 1e-3.
    np.testing.assert_allclose(inputs[0, 0] * outputs[0, 0], 1e3, rtol=1e-4)


def test_small_damping_of_a_wide_product_is_not_lost_in_float32():
    values = jnp.array([1.0] + [1e-3] * 599, jnp.float32)
    product = Kronecker(DiagonalSide(600), DiagonalSide(600))
    eigen = product.eigen(values**2, values**2)
    ones = jnp.ones((600, 600), jnp.float32)
    found = jax.jit(product.multiply_power, static_argnums=3)(eigen, ones, jnp.float32(1e-5), -1)
    np.testing.assert_allclose(found[5, 5], 1e5, rtol=1e-3)
