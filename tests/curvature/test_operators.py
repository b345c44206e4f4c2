"""Curvature as an operator that solvers take, its spectrum, and how good an estimate is."""

import functools
import sys

import jax
import jax.numpy as jnp
import lineax
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from scipy.sparse.linalg import cg

import curvax
from curvature.cases import normal

BATCH = 7
PARAMS = {"w": normal(0, 3, 4), "b": normal(1, 4), "v": normal(2, 4, 2)}
X = normal(3, BATCH, 3)
ARGS = (PARAMS, X)
FLAT = ravel_pytree(PARAMS)[0]
VECTOR = jnp.cos(jnp.arange(FLAT.size, dtype=float))


def network(params, x):
    return jnp.tanh(x @ params["w"] + jnp.broadcast_to(params["b"], (len(x), 4))) @ params["v"]


def loss(params, x):
    curvax.register_normal_predictive_distribution(network(params, x), variance=1.0)


def linear(params, x):
    """One layer that is linear: K-FAC is exact."""
    curvax.register_normal_predictive_distribution(x @ params, variance=1.0)


@functools.cache
def dense():
    jacobian = jax.jit(jax.jacobian(lambda p: network(ravel_pytree(PARAMS)[1](p), X)))(FLAT)
    return np.einsum("nki,nkj->ij", jacobian, jacobian) / BATCH


@functools.cache
def estimated():
    estimator = curvax.BlockDiagonalCurvature(loss, default_estimation_mode="ggn_exact")

    @jax.jit
    def estimate():
        state = estimator.init(jax.random.key(0), ARGS, [-1, 1], None)
        new = (0.0, 1.0, BATCH, jax.random.key(0), ARGS, None)
        state = estimator.update_curvature_matrix_estimate(state, *new)
        return state, estimator.to_dense_matrix(state)

    state, matrix = estimate()
    return estimator, state, np.asarray(matrix)


def product(operator):
    return jax.jit(operator.matvec)(VECTOR)


def exact_operator(**options):
    return curvax.as_linear_operator(curvax.ImplicitExactCurvature(loss), ARGS, **options)


class TestOperators:
    @pytest.mark.parametrize("matrix", ["fisher", "ggn"])
    def test_exact_products(self, matrix):
        operator = exact_operator(matrix=matrix, identity_weight=0.3)
        assert operator.shape == (FLAT.size, FLAT.size)
        expected = dense() @ VECTOR + 0.3 * VECTOR
        np.testing.assert_allclose(product(operator), expected, 1e-9, 1e-12)

    def test_the_hessian_needs_not_be_positive(self):
        def with_targets(params, x):
            curvax.register_squared_error_loss(network(params, x), jnp.ones((BATCH, 2)))

        exact = curvax.ImplicitExactCurvature(with_targets)
        operator = curvax.as_linear_operator(exact, ARGS, matrix="hessian")
        mean = lambda p: jnp.sum((network(ravel_pytree(PARAMS)[1](p), X) - 1) ** 2) / BATCH
        hessian = jax.jit(jax.hessian(mean))(FLAT)
        np.testing.assert_allclose(product(operator), hessian @ VECTOR, 1e-8, 1e-10)
        assert not operator.is_positive
        assert lineax.is_symmetric(operator.as_lineax())

    @pytest.mark.parametrize("inverse", [False, True])
    def test_an_estimate_and_its_inverse(self, inverse):
        estimator, state, matrix = estimated()
        operator = curvax.as_linear_operator(estimator, state, identity_weight=0.1, inverse=inverse)
        damped = matrix + 0.1 * np.eye(len(matrix))
        expected = np.linalg.solve(damped, VECTOR) if inverse else damped @ VECTOR
        np.testing.assert_allclose(product(operator), expected, 1e-8, 1e-10)

    def test_what_is_cached(self):
        estimator, state, matrix = estimated()
        state = jax.jit(
            lambda state: estimator.update_cache(state, 0.1, [-1, 1], None, False, None)
        )(state)
        operator = curvax.as_linear_operator(
            estimator, state, identity_weight=0.1, inverse=True, use_cached=True
        )
        expected = np.linalg.solve(matrix + 0.1 * np.eye(len(matrix)), VECTOR)
        np.testing.assert_allclose(product(operator), expected, 1e-8, 1e-10)

    def test_lineax_solves_with_it(self):
        operator = exact_operator(identity_weight=0.3).as_lineax()
        assert lineax.is_positive_semidefinite(operator)
        right = ravel_pytree(PARAMS)[1](VECTOR)
        solver = lineax.CG(rtol=1e-12, atol=1e-12)
        found = ravel_pytree(lineax.linear_solve(operator, right, solver).value)[0]
        expected = np.linalg.solve(dense() + 0.3 * np.eye(FLAT.size), VECTOR)
        np.testing.assert_allclose(found, expected, 1e-8, 1e-10)

    def test_scipy_solves_with_it(self):
        found, info = cg(exact_operator(identity_weight=0.3).as_scipy(), VECTOR, rtol=1e-12)
        assert info == 0
        expected = np.linalg.solve(dense() + 0.3 * np.eye(FLAT.size), VECTOR)
        np.testing.assert_allclose(found, expected, 1e-8, 1e-10)

    def test_errors(self):
        with pytest.raises(ValueError, match="exact products have no inverse"):
            exact_operator(inverse=True)
        with pytest.raises(ValueError, match=r"matrix must be one of .*, got 'jacobian'"):
            exact_operator(matrix="jacobian")
        with pytest.raises(ValueError, match=r"a vector has the shape \(24,\), got \(3,\)"):
            exact_operator().matvec(jnp.ones(3))


class TestSpectrum:
    def test_all_steps_find_all_eigenvalues(self):
        operator = exact_operator(identity_weight=0.05)
        density = curvax.spectral_density(operator, jax.random.key(0), num_samples=3)
        values = np.linalg.eigvalsh(dense() + 0.05 * np.eye(FLAT.size))
        np.testing.assert_allclose(density.largest, values[-1], 1e-8)
        np.testing.assert_allclose(density.smallest, values[0], 1e-6)
        np.testing.assert_allclose(density.weights.sum(), 1)

    def test_moments_are_right_on_average(self):
        density = curvax.spectral_density(exact_operator(), jax.random.key(0), num_samples=60)
        assert abs(density.trace - np.trace(dense())) < 0.3 * np.trace(dense())
        grid = np.linspace(density.smallest - 5, density.largest + 5, 20001)
        total = np.trapezoid(density.density(grid, width=0.1), grid)
        np.testing.assert_allclose(total, 1, 1e-3)

    def test_a_matrix_of_low_rank_is_found_out(self):
        """Where there is nothing more to find, nothing is made up."""
        x = jnp.diag(jnp.array([1.0, 2.0, 0, 0, 0, 0, 0, 0, 0, 0]))
        exact = curvax.ImplicitExactCurvature(linear)
        operator = curvax.as_linear_operator(exact, (jnp.ones((10, 1)), x), matrix="fisher")
        density = curvax.spectral_density(operator, jax.random.key(0), num_samples=5)
        found = density.eigenvalues[density.weights > 1e-9]
        known = np.array([0, 0.1, 0.4])
        assert np.abs(found[:, None] - known).min(1).max() < 1e-7
        np.testing.assert_allclose(density.share_above(0.05), 0.2, 1e-6)
        assert "10 eigenvalues" in str(density)

    def test_fewer_steps(self):
        density = curvax.spectral_density(exact_operator(), jax.random.key(0), num_steps=6)
        assert density.eigenvalues.shape == (4, 6)
        np.testing.assert_allclose(density.largest, np.linalg.eigvalsh(dense())[-1], 0.02)

    def test_its_plot(self):
        matplotlib = pytest.importorskip("matplotlib")
        matplotlib.use("Agg")
        density = curvax.spectral_density(exact_operator(), jax.random.key(0))
        ax = density.plot()
        assert ax.get_xlabel() == "eigenvalue"
        (line, _) = ax.get_lines()
        assert np.isfinite(line.get_ydata()).all()
        matplotlib.pyplot.close(ax.figure)

    def test_errors(self):
        with pytest.raises(ValueError, match="at least one, got 0 and 64"):
            curvax.spectral_density(exact_operator(), jax.random.key(0), num_samples=0)

    @pytest.mark.usefixtures("unchecked")
    def test_exact_products_need_an_operator(self):
        words = (
            r"got ImplicitExactCurvature\. .*as_linear_operator\(exact, func_args, matrix='ggn'\)"
        )
        with pytest.raises(TypeError, match=rf"^curvax.spectral_density: .*{words}"):
            curvax.spectral_density(curvax.ImplicitExactCurvature(lambda p, b: None), None)


USES = {
    "lineax": lambda: exact_operator().as_lineax(),
    "matfree": lambda: curvax.spectral_density(exact_operator(), jax.random.key(0)),
}


@pytest.mark.parametrize("missing", USES)
def test_packages_that_are_not_installed(missing, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=r"not installed: pip install 'curvax\[linear\]'"):
        USES[missing]()


class TestVerification:
    def test_errors_are_those_of_the_blocks(self):
        estimator, state, matrix = estimated()
        report = curvax.verify_curvature(estimator, state, ARGS, jax.random.key(0), num_probes=1000)
        true = dense()
        where = {"['b']": slice(0, 4), "['v']": slice(4, 12), "['w']": slice(12, 24)}
        for row in report.rows:
            own = np.concatenate([np.arange(24)[where[name]] for name in row.params])
            block, right = matrix[np.ix_(own, own)], true[np.ix_(own, own)]
            expected = np.linalg.norm(block - right) / np.linalg.norm(right)
            np.testing.assert_allclose(row.error, expected, 0.06, 1e-9)
            np.testing.assert_allclose(row.scale, np.trace(block) / np.trace(right), 0.1)
        is_own = np.zeros((24, 24), bool)
        for row in report.rows:
            own = np.concatenate([np.arange(24)[where[name]] for name in row.params])
            is_own[np.ix_(own, own)] = True
        outside = np.linalg.norm(true[~is_own]) / np.linalg.norm(true)
        np.testing.assert_allclose(report.outside, outside, 0.05)
        assert report.matrix == "ggn"
        assert "['w']" in str(report)

    def test_an_exact_estimate_has_no_error(self):
        estimator = curvax.BlockDiagonalCurvature(linear, default_estimation_mode="fisher_exact")
        args = jnp.ones((3, 2)), X
        new = (0.0, 1.0, BATCH, jax.random.key(0), args, None)
        state = jax.jit(
            lambda: estimator.update_curvature_matrix_estimate(
                estimator.init(jax.random.key(0), args, None, None), *new
            )
        )()
        report = curvax.verify_curvature(estimator, state, args, jax.random.key(0))
        assert report.largest_error < 1e-9
        assert report.outside < 1e-6
        np.testing.assert_allclose(report.rows[0].scale, 1)

    def test_another_batch_size(self):
        estimator, state, _ = estimated()
        run = functools.partial(curvax.verify_curvature, estimator, state, ARGS, jax.random.key(0))
        np.testing.assert_allclose(run(batch_size=2 * BATCH).rows[0].scale, 2 * run().rows[0].scale)

    def test_errors(self):
        estimator, state, _ = estimated()
        with pytest.raises(ValueError, match="num_probes at least one"):
            curvax.verify_curvature(estimator, state, ARGS, jax.random.key(0), num_probes=0)
        with pytest.raises(ValueError, match="got 'identity'"):
            curvax.verify_curvature(estimator, state, ARGS, jax.random.key(0), matrix="identity")
