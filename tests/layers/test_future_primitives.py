"""Detection with the primitives that JAX will use by default: `jax_remat3` and its like.

They are off by default in JAX 0.12. The registration and the curvature must be those without them.
"""

import contextlib

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import curvax
from helpers import assert_same, random_like

FLAGS = [
    flag
    for flag in ("jax_remat3", "jax_custom_vjp3", "jax_custom_jvp3")
    if hasattr(jax.config, flag)
]
SHAPES = {"w": (3, 4), "b": (4,), "v": (4, 2)}
PARAMS, X = random_like(
    (
        {name: jax.ShapeDtypeStruct(shape, jnp.float64) for name, shape in SHAPES.items()},
        jax.ShapeDtypeStruct((5, 3), jnp.float64),
    )
)


def hidden(p, x):
    return jnp.tanh(x @ p["w"] + p["b"][None])


def named(p, x):
    return jnp.tanh(
        checkpoint_name(x @ checkpoint_name(p["w"], "weight"), "product") + p["b"][None]
    )


@jax.custom_vjp
def product_by_vjp(w, x):
    return x @ w


product_by_vjp.defvjp(
    lambda w, x: (x @ w, (w, x)), lambda saved, g: (saved[1].T @ g, g @ saved[0].T)
)


@jax.custom_jvp
def product_by_jvp(w, x):
    return x @ w


product_by_jvp.defjvp(lambda at, moved: (product_by_jvp(*at), at[1] @ moved[0] + moved[1] @ at[0]))

SAVE_PRODUCT = jax.checkpoint_policies.save_only_these_names("product")
MODELS = {
    "checkpoint": lambda p, x: jax.checkpoint(hidden)(p, x) @ p["v"],
    "nested": jax.checkpoint(lambda p, x: jax.checkpoint(hidden)(p, x) @ p["v"]),
    "closure": lambda p, x: jax.checkpoint(lambda x: hidden(p, x))(x) @ p["v"],
    "names": lambda p, x: jax.checkpoint(named, policy=SAVE_PRODUCT)(p, x) @ p["v"],
    "vmap": lambda p, x: (
        jax.vmap(jax.checkpoint(lambda x: jnp.tanh(x @ p["w"] + p["b"])))(x) @ p["v"]
    ),
    "custom_vjp": lambda p, x: jnp.tanh(product_by_vjp(p["w"], x) + p["b"][None]) @ p["v"],
    "custom_jvp": lambda p, x: jnp.tanh(product_by_jvp(p["w"], x) + p["b"][None]) @ p["v"],
}


@contextlib.contextmanager
def switched_on(*flags):
    """Set flags of JAX, and take them back."""
    try:
        for flag in flags:
            jax.config.update(flag, True)
        yield
    finally:
        for flag in flags:
            jax.config.update(flag, False)


def curvature(model, through):
    """The rows of the registration report, and the curvature."""

    def loss(params, x):
        return curvax.register_squared_error_loss(model(params, x), weight=0.5)

    report = curvax.explain_registration(loss, (PARAMS, X), through_custom_derivatives=through)
    estimator = curvax.BlockDiagonalCurvature(
        loss, default_estimation_mode="ggn_exact", through_custom_derivatives=through
    )
    key = jax.random.key(0)

    def estimate(params, x):
        state = estimator.init(key, (params, x), None, None)
        state = estimator.update_curvature_matrix_estimate(
            state, 0.0, 1.0, len(X), key, (params, x), None
        )
        return estimator.to_dense_matrix(state)

    return report, jax.jit(estimate)(PARAMS, X)


CASES = [(name, False) for name in MODELS] + [("custom_vjp", True), ("custom_jvp", True)]


@pytest.mark.parametrize(("name", "through"), CASES)
def test_new_primitives_change_neither_the_registration_nor_the_curvature(name, through):
    report, matrix = curvature(MODELS[name], through)
    assert report.coverage == (0.5 if name.startswith("custom") and not through else 1.0)
    with switched_on(*FLAGS):
        report_there, matrix_there = curvature(MODELS[name], through)
    assert str(report_there) == str(report)
    assert_same(matrix_there, matrix)


def test_references_are_not_followed_and_it_is_said():
    """With `jax_scan3`, loops work on references."""

    def loss(params, x):
        step = lambda x, _: (jnp.tanh(x @ params["w"]), None)
        x, _ = jax.lax.scan(step, x, length=2)
        curvax.register_squared_error_loss(x @ params["v"], weight=0.5)

    params = {"w": jnp.eye(3), "v": jnp.ones((3, 2))}
    with (
        switched_on("jax_scan3"),
        pytest.raises(curvax.RegistrationError, match=r"references.*jax_scan3"),
    ):
        curvax.explain_registration(loss, (params, X))
