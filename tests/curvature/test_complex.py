"""Complex predictions of real parameters: the curvature of z is Re(O† O), with O = dz/dw."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.flatten_util import ravel_pytree

import curvax
from helpers import assert_same, key

X = jax.random.normal(key(1), (7, 3))
PARAMS = {
    "hidden": {
        "w": jax.random.normal(key(2), (3, 4)),
        "b": jax.random.normal(key(3), (4,)),
    },
    "size": jax.random.normal(key(4), (4, 2)),
    "phase": jax.random.normal(key(5), (4, 2)),
}
TARGETS = lax.complex(*jax.random.normal(key(6), (2, 7)))
FULL = {"dense": curvax.DenseFull}


def log_psi(params, x):
    """A complex number for each row of `x`: logarithm of the size, and the phase."""
    h = jnp.tanh(x @ params["hidden"]["w"] + params["hidden"]["b"][None])
    size, phase = jnp.sum(jnp.sin(h @ params["size"]), -1), jnp.sum(h @ params["phase"], -1)
    return lax.complex(size, phase) * (0.6 - 0.8j) + jnp.log(lax.complex(1 + phase**2, size))


def one_at_a_time(params, x):
    return jax.vmap(lambda row: log_psi(params, row[None])[0])(x)


def gram(params, x, weights=1.0):
    """The mean of Re(conj(O) O) over examples, naively."""
    flat, unflatten = ravel_pytree(params)
    of = lambda part: jax.jacrev(lambda w: part(log_psi(unflatten(w), x)))(flat)
    slopes = lax.complex(of(jnp.real), of(jnp.imag))
    weighted = jnp.broadcast_to(weights, len(x)).astype(complex)[:, None] * slopes
    return (jnp.conj(slopes).T @ weighted).real / len(x)


def blocks_of(matrix, params):
    """The matrix, with zeros between the layers."""
    layer = {"hidden": {"w": 0, "b": 0}, "size": 1, "phase": 2}
    sizes = jax.tree.map(lambda x, k: jnp.full(x.size, k), params, layer)
    number, _ = ravel_pytree(sizes)
    return jnp.where(number[:, None] == number[None], matrix, 0)


def normal(params, x, targets=None, variance=0.5, weight=1.0, model=log_psi):
    z = curvax.register_normal_predictive_distribution(model(params, x), targets, variance, weight)
    return jnp.mean(jnp.abs(z) ** 2)


def squared(params, x, targets=None):
    z = curvax.register_squared_error_loss(log_psi(params, x), targets, 3.0)
    return jnp.mean(jnp.abs(z) ** 2)


def inside_vmap(params, x):
    register = curvax.register_normal_predictive_distribution
    z = jax.vmap(lambda row: register(log_psi(params, row[None])[0]))(x)
    return jnp.mean(jnp.abs(z) ** 2)


def vectors_inside_vmap(params, x):
    """Both halves of the batch: each row of `x` and the row after it are one example."""
    register = curvax.register_normal_predictive_distribution
    z = jax.vmap(lambda rows: register(log_psi(params, rows)))(jnp.stack([x, x], axis=1))
    return jnp.mean(jnp.abs(z) ** 2)


def estimate(func, args, mode="fisher_exact", seed=0, **options):
    estimator = curvax.BlockDiagonalCurvature(func, layer_tag_to_block_ctor=FULL, **options)
    state = estimator.init(key(7), args, None, None)
    state = estimator.update_curvature_matrix_estimate(
        state, 0.0, 1.0, len(args[1]), key(seed), args, None, mode
    )
    return estimator.to_dense_matrix(state)


@pytest.mark.parametrize("mode", ["fisher_exact", "ggn_exact"])
@pytest.mark.parametrize(
    ("func", "factor"),
    [
        (normal, 2.0),
        (lambda p, x: normal(p, x, model=one_at_a_time), 2.0),
        (lambda p, x: normal(p, x, variance=0.1, weight=0.3), 3.0),
        (lambda p, x: normal(p, x, variance=X[:, 0] ** 2 + 1), 1 / (X[:, 0] ** 2 + 1)),
        (squared, 6.0),
        (inside_vmap, 2.0),
        (vectors_inside_vmap, 4.0),
    ],
    ids=["normal", "mapped", "weighted", "each", "squared", "inside vmap", "vectors inside vmap"],
)
def test_the_exact_matrix_is_the_real_part_of_the_gram_matrix(func, factor, mode):
    expected = blocks_of(gram(PARAMS, X, factor), PARAMS)
    assert_same(estimate(func, (PARAMS, X), mode), expected, 1e-9, 1e-10)


def test_products_are_those_of_the_gram_matrix():
    estimator = curvax.ImplicitExactCurvature(normal)
    flat, unflatten = ravel_pytree(PARAMS)
    vector = jnp.cos(jnp.linspace(0.5, 9.5, flat.size))
    for product in (estimator.multiply_fisher, estimator.multiply_ggn):
        found, _ = ravel_pytree(product((PARAMS, X), unflatten(vector)))
        assert_same(found, 2 * gram(PARAMS, X) @ vector, 1e-9, 1e-10)


def test_layers_are_found_and_examples_are_known():
    report = curvax.explain_registration(normal, (PARAMS, X), strict=True)
    assert {row.tag for row in report.rows} == {"dense_tag"}


def test_sampled_estimates_have_the_matrix_as_their_mean():
    args = PARAMS, X
    estimator = curvax.BlockDiagonalCurvature(normal, layer_tag_to_block_ctor=FULL)
    state = estimator.init(key(7), args, None, None)

    @jax.jit
    @jax.vmap
    def estimates(rng):
        update = estimator.update_curvature_matrix_estimate
        return estimator.to_dense_matrix(
            update(state, 0.0, 1.0, len(X), rng, args, None, "fisher_gradients")
        )

    count = 4000
    found = estimates(jax.random.split(key(8), count))
    expected = blocks_of(2 * gram(PARAMS, X), PARAMS)
    error = jnp.std(found, axis=0) / np.sqrt(count)
    assert jnp.all(jnp.abs(jnp.mean(found, axis=0) - expected) <= 5 * error + 1e-12)
    assert jnp.linalg.norm(error) < 0.1 * jnp.linalg.norm(expected)


def test_the_empirical_matrix_is_of_gradients_at_complex_targets():
    flat, unflatten = ravel_pytree(PARAMS)

    def each(w):  # The loss of each example: |target - z|², as the variance is one half.
        return jnp.abs(TARGETS - log_psi(unflatten(w), X)) ** 2

    gradients = jax.jacrev(each)(flat)
    expected = blocks_of(gradients.T @ gradients / len(X), PARAMS)
    func = lambda p, x: normal(p, x, TARGETS)
    assert_same(estimate(func, (PARAMS, X), "fisher_empirical"), expected, 1e-9, 1e-10)


def test_a_step_of_the_optimizer_solves_with_the_matrix():
    """A rule of one's own registers the complex logarithm, as for a complex wavefunction."""

    def local_energies(params, x):
        z = log_psi(lax.stop_gradient(params), x)
        return jnp.real(z * jnp.conj(z)) + x[:, 0]

    @jax.custom_jvp
    def energy(params, x):
        return jnp.mean(local_energies(params, x))

    @energy.defjvp
    def rule(primals, tangents):
        params, x = primals
        each = local_energies(params, x)
        z, dz = jax.jvp(lambda p: log_psi(p, x), (params,), (tangents[0],))
        curvax.register_normal_predictive_distribution(z)
        slope = jnp.mean((each - jnp.mean(each)) * jnp.real(dz))
        return jnp.mean(each), 2 * slope

    optimizer = curvax.Optimizer(
        jax.value_and_grad(energy),
        l2_reg=0.0,
        learning_rate_schedule=lambda step: 0.1,
        momentum_schedule=lambda step: 0.0,
        damping_schedule=lambda step: 1e-2,
        layer_tag_to_block_ctor=FULL,
        estimation_mode="fisher_exact",
        curvature_ema=0.0,
        inverse_update_period=1,
        num_burnin_steps=0,
        use_exact_inverses=True,
        donate_buffers=False,
    )
    state = optimizer.init(PARAMS, key(9), X)
    new, _, _ = optimizer.step(PARAMS, state, key(10), batch=X)
    gradient, unflatten = ravel_pytree(jax.grad(energy)(PARAMS, X))
    matrix = blocks_of(2 * gram(PARAMS, X), PARAMS) + 1e-2 * jnp.eye(gradient.size)
    expected = unflatten(-0.1 * jnp.linalg.solve(matrix, gradient))
    assert_same(jax.tree.map(jnp.subtract, new, PARAMS), expected, 1e-7, 1e-9)


def test_complex_parameters_are_rejected():
    params = {"a": X[0], "b": lax.complex(X[0], X[1])}
    with pytest.raises(TypeError, match=r"\['b'\] \(complex128\) are complex.*lax\.complex\("):
        curvax.explain_registration(
            lambda p, x: curvax.register_squared_error_loss(x.astype(complex) @ p["b"]), (params, X)
        )


def test_a_complex_loss_is_rejected_with_advice_that_helps():
    def value_and_grad(params, x):
        curvax.register_squared_error_loss(log_psi(params, x))
        return (jnp.array(1j), {}), params

    optimizer = curvax.Optimizer(
        value_and_grad,
        l2_reg=0.0,
        value_func_has_aux=True,
        learning_rate_schedule=lambda step: 0.1,
        momentum_schedule=lambda step: 0.0,
        damping_schedule=lambda step: 1e-2,
    )
    with pytest.raises(TypeError, match=r"got complex128\[\]\. Return its real part") as raised:
        optimizer.step(PARAMS, optimizer.init(PARAMS, key(9), X), key(10), batch=X)
    assert "value_func_has_aux" not in str(raised.value)


class TestComplexActivations:
    """Real weights of complex inputs: real layers of real and imaginary parts."""

    PARAMS: ClassVar = {
        "w": jax.random.normal(key(11), (3, 2)),
        "out": jax.random.normal(key(12), (2, 1)),
    }
    X = jax.random.normal(key(13), (7, 4, 3))

    @staticmethod
    def dense(x, params):
        w, *bias = params
        y = lax.dot_general(x, w.astype(complex), (((x.ndim - 1,), (0,)), ((), ())))
        return y + jnp.broadcast_to(bias[0].astype(complex), y.shape) if bias else y

    def func(self, params, x):
        z = lax.complex(jnp.sin(x), x)
        y = jnp.sum(jnp.log(self.dense(z, [params["w"]]) ** 2 + 4), axis=1)
        return curvax.register_normal_predictive_distribution(self.dense(y, [params["out"]]))

    def patterns(self, *shapes):
        tag = curvax.LayerTag("complex_dense_tag", num_inputs=1, num_outputs=1)
        return tuple(
            curvax.GraphPattern(
                f"complex_{k}",
                tag,
                self.dense,
                lambda eqns: {},
                (jnp.zeros(shape, complex), [jnp.zeros(s) for s in params]),
            )
            for k, (shape, *params) in enumerate(shapes)
        )

    def test_weights_are_generic_by_default_and_the_report_says_why(self):
        report = curvax.explain_registration(self.func, (self.PARAMS, self.X))
        assert {row.tag for row in report.rows} == {"generic_tag"}
        assert all("converted to complex128" in row.reason for row in report.rows)

    def test_a_pattern_finds_a_layer_of_both_parts_that_is_exact(self):
        given = self.patterns(((2, 3, 4), (4, 5)), ((3, 4), (4, 5)))
        estimator = curvax.BlockDiagonalCurvature(
            self.func,
            layer_tag_to_block_ctor={"complex_dense": curvax.DenseFull},
            graph_patterns=(*given, *curvax.DEFAULT_GRAPH_PATTERNS),
        )
        args = self.PARAMS, self.X
        state = estimator.init(key(7), args, None, None)
        state = estimator.update_curvature_matrix_estimate(
            state, 0.0, 1.0, 7, key(0), args, None, "fisher_exact"
        )
        flat, unflatten = ravel_pytree(self.PARAMS)
        of = lambda part: jax.jacrev(lambda w: part(self.func(unflatten(w), self.X)[:, 0]))(flat)
        full = 2 * sum(s.T @ s for s in (of(jnp.real), of(jnp.imag))) / 7
        number, _ = ravel_pytree({"out": jnp.zeros((2, 1)), "w": jnp.ones((3, 2))})
        expected = jnp.where(number[:, None] == number[None], full, 0)
        assert_same(estimator.to_dense_matrix(state), expected, 1e-9, 1e-10)

    def test_a_block_of_factors_is_that_of_the_real_layer(self):
        """The same network with an axis of parts that the model has itself."""

        def by_parts(params, x):
            z = jnp.stack([jnp.sin(x), x], axis=1)
            y = z @ params["w"]
            y = jnp.log(lax.complex(y[:, 0], y[:, 1]) ** 2 + 4)
            y = self.dense(jnp.sum(y, axis=1), [lax.stop_gradient(params["out"])])
            return curvax.register_normal_predictive_distribution(y)

        def of_parts(params, x):
            return self.func({**params, "out": lax.stop_gradient(params["out"])}, x)

        options = {"allow_unused_params": True}
        given = {"graph_patterns": self.patterns(((2, 3, 4), (4, 5)))}
        blocks = {"complex_dense": curvax.DenseTwoKroneckerFactored}
        matrices = []
        for func, more, ctors in ((by_parts, {}, {}), (of_parts, given, blocks)):
            estimator = curvax.BlockDiagonalCurvature(
                func, layer_tag_to_block_ctor=ctors, **options, **more
            )
            args = {"w": self.PARAMS["w"], "out": self.PARAMS["out"]}, self.X
            state = estimator.init(key(7), args, None, None)
            state = estimator.update_curvature_matrix_estimate(
                state, 0.0, 1.0, 7, key(0), args, None, "fisher_exact"
            )
            matrices.append(estimator.to_dense_matrix(state)[2:, 2:])
        assert jnp.max(jnp.abs(matrices[0])) > 1e-3
        assert_same(matrices[1], matrices[0], 1e-9, 1e-10)

    def test_a_complex_layer_with_a_bias_is_not_taken_for_one_of_parts(self):
        def func(params, x):
            y = self.dense(lax.complex(jnp.sin(x), x), [params["w"], params["b"]])
            return curvax.register_squared_error_loss(jnp.sum(y, axis=(1, 2)))

        params = {"w": self.PARAMS["w"], "b": jnp.ones(2)}
        given = self.patterns(((2, 3, 4), (4, 5), (5,)))
        report = curvax.explain_registration(func, (params, self.X), graph_patterns=given)
        assert {row.tag for row in report.rows} == {"generic_tag"}

    def test_tags_of_complex_arrays_are_rejected(self):
        def func(w, x):
            z = lax.complex(jnp.sin(x), x)
            y = curvax.register_dense(self.dense(z, [w]), z, w)
            return curvax.register_squared_error_loss(jnp.sum(y, axis=(1, 2)))

        with pytest.raises(ValueError, match="dense_tag was called with complex arrays"):
            curvax.explain_registration(func, (self.PARAMS["w"], self.X))

    @pytest.mark.parametrize(
        "use",
        [
            lambda z, w: z @ w,
            lambda z, w: z @ w + w[0],
            lambda z, w: z * w[:, 0],
            lambda z, w: z + w[:, 0],
        ],
        ids=["product", "with a bias", "scale", "shift"],
    )
    def test_what_is_combined_with_complex_numbers_is_generic(self, use):
        """Statistics of layers are those of real numbers. JAX need not convert the weights."""

        def func(w, x):
            y = use(lax.complex(jnp.sin(x), x), w)
            return curvax.register_squared_error_loss(jnp.sum(y, axis=-1))

        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            report = curvax.explain_registration(func, (jnp.ones((4, 2)), jnp.ones((5, 4))))
        assert report.rows[0].tag == "generic_tag"
        assert "complex" in report.rows[0].reason
