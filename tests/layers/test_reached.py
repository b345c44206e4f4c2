"""Losses, and uses of parameters, without a derivative: there is no curvature to find there.

The oracle is the derivative itself, which is zero at any point.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import curvax
from curvax import RegistrationError, auto_register_tags, explain_registration
from helpers import key
from layers.models import X, normal

W = normal(1, 3, 3)


@jax.custom_jvp
def straight_through(x: Any) -> Any:
    return jnp.round(x)


straight_through.defjvps(lambda tangent, _, x: tangent)


def looped(body: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda w, x: lax.scan(lambda h, _: (body(w, h), None), x, None, length=3)[0]


def delayed(body: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """What a step computes is returned two steps later."""

    def apply(w: Any, x: Any) -> Any:
        step = lambda carry, _: ((carry[1], carry[2], body(w, x)), None)
        return lax.scan(step, (x, x, x), None, length=4)[0][0]

    return apply


def largest(w: Any, x: Any) -> Any:
    return jax.nn.one_hot(jnp.argmax(x @ w, -1), 3, dtype=jnp.float64)


stopped = lambda w, x: lax.stop_gradient(x @ w)
CONSTANT = {
    "not at all": lambda w, x: x,
    "stopped": stopped,
    "stopped early": lambda w, x: jnp.tanh(x @ lax.stop_gradient(w)),
    "rounded": lambda w, x: jnp.round(x @ w),
    "floor and ceil": lambda w, x: jnp.floor(x @ w) + jnp.ceil(x @ w),
    "sign": lambda w, x: jnp.sign(x @ w),
    "integers": lambda w, x: (x @ w).astype(jnp.int32).astype(jnp.float64),
    "an index": largest,
    "a condition": lambda w, x: jnp.where(x @ w > 0, x, -x),
    "in a loop": looped(stopped),
    "later in a loop": delayed(stopped),
    "checkpointed": jax.checkpoint(stopped),
    "tagged by hand": lambda w, x: lax.stop_gradient(curvax.register_dense(x @ w, x, w)),
}
ALIVE = {
    "plain": lambda w, x: x @ w,
    "in a loop": looped(lambda w, x: jnp.tanh(x @ w)),
    "later in a loop": delayed(lambda w, x: x @ w),
    "checkpointed": jax.checkpoint(lambda w, x: x @ w),
    "partly stopped": lambda w, x: x @ w + stopped(w, x),
    "straight through": lambda w, x: straight_through(x @ w),
    "straight through, stopped": lambda w, x: x @ w + lax.stop_gradient(jnp.round(x @ w) - x @ w),
    "a branch": lambda w, x: lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x - x @ w),
    "a custom function of JAX": lambda w, x: jax.nn.relu(x @ w) + jax.nn.softmax(x @ w),
}


def largest_derivative(apply: Callable[[Any, Any], Any]) -> float:
    return float(jnp.max(jnp.abs(jax.jacrev(apply)(W, X))))


def registered(apply: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda w, x: curvax.register_squared_error_loss(apply(w, x))


class TestLosses:
    @pytest.mark.parametrize("name", CONSTANT)
    def test_one_without_a_derivative_is_rejected(self, name):
        assert largest_derivative(CONSTANT[name]) == 0
        f = registered(CONSTANT[name])
        for call in (explain_registration, auto_register_tags):
            with pytest.raises(RegistrationError, match=r"test_reached.py:\d+\) have no deriv"):
                call(f, (W, X))

    @pytest.mark.parametrize("name", ALIVE)
    def test_one_with_a_derivative_is_not(self, name):
        assert largest_derivative(ALIVE[name]) > 0
        explain_registration(registered(ALIVE[name]), (W, X))

    def test_what_is_recommended_works(self):
        f = lambda w, x: lax.stop_gradient(registered(lambda w, x: x @ w)(w, x))
        assert explain_registration(f, (W, X), strict=True).coverage == 1

    def test_custom_derivatives_may_be_left_out(self):
        with pytest.raises(RegistrationError, match="have no derivative in any parameter"):
            explain_registration(
                registered(straight_through_product), (W, X), through_custom_derivatives=True
            )

    def test_each_loss_has_one(self):
        """The message is about the one that has none."""

        def f(w, x):
            curvax.register_squared_error_loss(x @ w)
            curvax.register_normal_predictive_distribution(jnp.tanh(x @ w))
            curvax.register_softmax_cross_entropy_loss(stopped(w, x))

        with pytest.raises(RegistrationError, match="predictions of CategoricalLogits") as error:
            explain_registration(f, (W, X))
        assert str(error.value).count("registered at") == 1

    def test_inside_a_loop(self):
        def f(w, x, stop):
            def step(carry, x):
                y = (x @ w)[None]
                curvax.register_squared_error_loss(lax.stop_gradient(y) if stop else y)
                return carry, None

            lax.scan(step, 0.0, x)

        explain_registration(lambda w, x: f(w, x, False), (W, X))
        with pytest.raises(RegistrationError, match="have no derivative in any parameter"):
            explain_registration(lambda w, x: f(w, x, True), (W, X))

    def test_targets_do_not_count(self):
        f = lambda w, x: curvax.register_squared_error_loss(x, x @ w)
        with pytest.raises(RegistrationError, match="have no derivative in any parameter"):
            explain_registration(f, (W, X))

    def test_in_the_rule_of_a_custom_derivative(self):
        """As in variational Monte Carlo: the loss is there only where a gradient is traced."""

        def gradient(stop):
            @jax.custom_jvp
            def energy(w, x):
                return jnp.sum(x @ w)

            @energy.defjvp
            def rule(primals, tangents):
                y, dy = jax.jvp(lambda w: jnp.tanh(primals[1] @ w), primals[:1], tangents[:1])
                y = lax.stop_gradient(y) if stop else y
                curvax.register_normal_predictive_distribution(y)
                return jnp.sum(y), jnp.sum(dy)

            return jax.value_and_grad(energy)

        assert explain_registration(gradient(False), (W, X)).coverage == 1
        with pytest.raises(RegistrationError, match="have no derivative in any parameter"):
            explain_registration(gradient(True), (W, X))


def straight_through_product(w: Any, x: Any) -> Any:
    return straight_through(x @ w)


@pytest.mark.parametrize(
    "start",
    [
        lambda f: curvax.BlockDiagonalCurvature(f).init(key(), (W, X), None, None),
        lambda f: curvax.BlockDiagonalCurvature(f, auto_register_tags=False).init(
            key(), (W, X), None, None
        ),
        lambda f: curvax.ExplicitExactCurvature(f).init(key(), (W, X), None, None),
        lambda f: curvax.ImplicitExactCurvature(f).multiply_ggn((W, X), W),
        lambda f: curvax.Optimizer(
            jax.value_and_grad(lambda w, x: jnp.sum(f(w, x)) + jnp.sum(x @ w)), l2_reg=0.0
        ).init(W, key(), X),
    ],
    ids=["block-diagonal", "tags by hand alone", "explicit", "implicit", "optimizer"],
)
def test_everything_that_needs_curvature_rejects_a_loss_without_derivatives(start):
    by_hand = lambda w, x: lax.stop_gradient(curvax.register_dense(x @ w, x, w))
    with pytest.raises(RegistrationError, match="have no derivative in any parameter"):
        start(registered(by_hand))


class TestUses:
    def test_a_parameter_without_a_derivative_is_not_covered(self):
        def f(p, x):
            frozen = lax.stop_gradient(jnp.tanh(x @ p["frozen"]))
            target = jnp.tanh(x @ p["target"])
            return curvax.register_squared_error_loss(frozen @ p["head"], target)

        params = {"frozen": W, "head": W, "target": W}
        report = explain_registration(f, (params, X))
        assert [(row.tag, row.sites, row.reason) for row in report.rows] == [
            ("generic_tag", 0, "no loss has a derivative in it"),
            ("dense_tag", 1, ""),
            ("generic_tag", 0, "no loss has a derivative in it"),
        ]
        assert report.coverage == pytest.approx(1 / 3)
        auto_register_tags(f, (params, X))
        with pytest.raises(RegistrationError, match="no loss has a derivative in it"):
            explain_registration(f, (params, X), strict=True)

    def test_inside_a_function_with_custom_derivatives(self):
        own = jax.custom_jvp(lambda x, w: jnp.round(x @ w))
        own.defjvps(None, lambda tangent, _, x, w: x @ tangent)
        (row,) = explain_registration(registered(lambda w, x: own(x, w)), (W, X)).rows
        assert "which has derivatives of its own" in row.reason

    def test_a_use_without_a_derivative_does_not_count_next_to_others(self):
        """Its inputs would be in the factor of the layer's inputs."""

        def estimate(apply):
            f = registered(apply)
            estimator = curvax.BlockDiagonalCurvature(f, default_estimation_mode="ggn_exact")
            state = estimator.init(key(), (W, X), None, None)

            @jax.jit
            def matrix(state):
                args = (state, 0.0, 1.0, len(X), key(), (W, X), None)
                return estimator.to_dense_matrix(estimator.update_curvature_matrix_estimate(*args))

            return matrix(state)

        with_stopped = lambda w, x: x @ w + lax.stop_gradient(x**2 @ w)
        difference = estimate(with_stopped) - estimate(lambda w, x: x @ w)
        assert float(jnp.max(jnp.abs(difference))) < 1e-14
