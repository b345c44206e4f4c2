"""`register_loss`: any convex function; others are refused, and nothing is kept alive.

That its values and products are right is in `test_losses.py`.
"""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax
from curvax.losses import function_loss
from helpers import assert_same
from losses.cases import log_cosh, normal
from losses.test_register import registered_losses

X = jnp.asarray(normal(1, 3, 2))
Y = jnp.asarray(normal(2, 3, 2))
ONES = (jnp.ones((3, 2)),)


def saddle(prediction):
    return prediction[0] ** 2 - prediction[1] ** 2


def tag_in(function, *args):
    return jax.make_jaxpr(function)(*args).jaxpr.eqns[-1].primitive


class TestTags:
    def test_predictions_come_back_and_a_function_has_one_tag(self):
        register = lambda x: curvax.register_loss(log_cosh, x, Y)
        assert_same(register(X), X, 0, 0)
        again = lambda x: curvax.register_loss(log_cosh, x, Y[:, :1], weight=2.0)
        assert tag_in(register, X) is tag_in(again, X[:, :1])
        assert tag_in(register, X) is tag_in(jax.vmap(register), X[None])

    def test_each_function_has_its_tag(self):
        one, other = (lambda x: jnp.sum(x**2)), (lambda x: jnp.sum(x**4))
        register = lambda x: curvax.register_loss(other, curvax.register_loss(one, x))
        first, second = registered_losses(register, X)
        assert_same(first.evaluate(), jnp.sum(X**2, axis=1))
        assert_same(second.evaluate(), jnp.sum(X**4, axis=1))

    def test_a_traced_program_keeps_the_function(self):
        program = jax.make_jaxpr(lambda x: curvax.register_loss(lambda p: jnp.sum(p**2), x))(X)
        gc.collect()
        (equation,) = program.jaxpr.eqns
        loss = equation.primitive.loss(X, args_names=("predictions",))
        assert_same(loss.evaluate(), jnp.sum(X**2, axis=1))

    def test_nothing_else_keeps_it(self):
        scale = jnp.array(2.0)

        def fn(prediction):
            return scale * jnp.sum(prediction**2)

        program = jax.make_jaxpr(lambda x: curvax.register_loss(fn, x))(X)  # noqa: F821
        tag = program.jaxpr.eqns[-1].primitive
        known, alive = len(function_loss._tags), weakref.ref(fn)
        del fn, program
        jax.clear_caches()
        gc.collect()
        assert alive() is None
        assert len(function_loss._tags) < known
        with pytest.raises(ReferenceError, match="function of this loss is gone"):
            tag.loss(X, args_names=("predictions",))

    def test_any_callable_will_do(self):
        class Scaled:
            __slots__ = ()

            def __call__(self, prediction):
                return jnp.sum(prediction**2)

            def method(self, prediction):
                return jnp.sum(prediction**2)

        power = lambda power, prediction: jnp.sum(prediction**power)
        for fn in [
            Scaled(),
            Scaled().method,
            functools.partial(power, 2),
            jax.jit(jnp.linalg.norm),
        ]:
            (loss,) = registered_losses(lambda x: curvax.register_loss(fn, x), X)  # noqa: B023
            assert_same(loss.evaluate(), jax.vmap(fn)(X))


class TestConvexity:
    loss = staticmethod(lambda fn, x=X: function_loss.FunctionLoss(fn, x))
    products = (
        lambda loss: loss.multiply_ggn(ONES),
        lambda loss: loss.multiply_ggn_factor(ONES[0]),
        lambda loss: loss.multiply_ggn_factor_transpose(ONES),
        lambda loss: loss.multiply_ggn_factor_replicated_one_hot((1,)),
    )

    @pytest.mark.parametrize("product", products)
    def test_an_indefinite_hessian_is_rejected(self, product):
        words = r"^curvax\.register_loss: the Hessian of 'saddle' .* eigenvalue, -2, .* convex"
        with pytest.raises(ValueError, match=words):
            product(self.loss(saddle))

    @pytest.mark.parametrize(
        "transform",
        [jax.jit, lambda f: jax.jit(jax.vmap(f)), jax.vmap],
        ids=["jit", "both", "vmap"],
    )
    def test_also_where_the_values_are_not_known_yet(self, transform, capfd):
        product = transform(lambda scale: self.loss(saddle, scale * X).multiply_ggn(ONES))
        scale = jnp.array(1.0) if transform is jax.jit else jnp.ones(2)
        with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=r"convex in the pred"):
            jax.block_until_ready(product(scale))
        capfd.readouterr()

    def test_one_bad_example_is_enough(self):
        cubic = lambda prediction: jnp.sum(prediction**3)
        x = jnp.abs(X)
        assert_same(self.loss(cubic, x).multiply_ggn(ONES), (6 * x,), 1e-10, 1e-10)
        with pytest.raises(ValueError, match="negative eigenvalue"):
            self.loss(cubic, x.at[1, 1].set(-0.1)).multiply_ggn(ONES)
        with pytest.raises(ValueError, match=r"-6e-07, where .* is 6e-07"):
            self.loss(cubic, jnp.array([[1e7, 1e7], [-1e-7, 1e-8]])).multiply_ggn((X[:2],))

    def test_values_and_gradients_do_not_ask_for_it(self):
        loss = self.loss(saddle)
        assert_same(loss.evaluate(), X[:, 0] ** 2 - X[:, 1] ** 2)
        assert_same(loss.grad_of_evaluate(None, "regular"), (2 * X * jnp.array([[1.0, -1.0]] * 3),))

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
    def test_rounding_is_not_taken_for_a_saddle(self, dtype):
        """A certain prediction: the Hessian of a softmax is a difference of equal numbers."""
        cross_entropy = lambda prediction: jax.nn.logsumexp(prediction) - prediction[0]
        product = jax.jit(
            lambda x: self.loss(cross_entropy, x).multiply_ggn((jnp.ones_like(x),))[0]
        )
        for size in [0.0, 5.0, 10.0, 15.0, 16.0, 17.0, 20.0, 40.0, 80.0]:
            x = jnp.array([[size, 0.0, 0.3], [0.0, -size, size]], dtype)
            np.testing.assert_allclose(product(x), 0, atol=1e-5)

    def test_products_are_differentiable_where_eigenvalues_are_equal(self):
        quartic = lambda prediction: jnp.sum(prediction**4)
        product = lambda x: jnp.sum(self.loss(quartic, x).multiply_ggn(ONES)[0])
        assert_same(jax.jit(jax.grad(product))(ONES[0]), 24 * ONES[0])

    def test_no_examples(self):
        loss = self.loss(saddle, X[:0])
        assert loss.multiply_ggn((X[:0],))[0].shape == (0, 2)


class TestErrors:
    @pytest.mark.parametrize(
        ("given", "error", "words"),
        [
            ((log_cosh, X, Y[:2]), ValueError, r"shapes are \(3, 2\) and \(2, 2\)"),
            ((log_cosh, X, jnp.array(1.0)), ValueError, r"shapes are \(3, 2\) and \(\)"),
            (
                (lambda p: p**2, X),
                TypeError,
                r"scalar\..*\[\(2,\)\] it returned float64\[2\]\. Sum",
            ),
            ((lambda p: (p[0], p[1]), X), TypeError, r"returned float64\[\], float64\[\]"),
            ((lambda p: jnp.argmax(p), X), TypeError, r"returned int64\[\]"),
            ((saddle, jnp.array(1.0)), ValueError, r"predictions must have at least 1 axis"),
            ((saddle, jnp.arange(3)), TypeError, r"predictions must be real floating-point"),
            ((saddle, X, None, -1.0), ValueError, r"weight must not be negative"),
        ],
    )
    def test_shapes_that_do_not_fit_are_rejected(self, given, error, words):
        with pytest.raises(error, match=rf"^curvax\.register_loss: .*{words}"):
            curvax.register_loss(*given)
