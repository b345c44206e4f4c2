"""Losses with derivatives of the network: every use of the weights counts, by its cotangent.

`W @ e` in a derivative along a direction `e` is the same for all examples, and what comes back to
it is another thing for each.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.jet import jet
from jax.flatten_util import ravel_pytree

import curvax
from helpers import assert_same

SIZES = (2, 5, 4, 1)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape))


PARAMS = {
    "w": [normal(k, n, m) / n**0.5 for k, (n, m) in enumerate(itertools.pairwise(SIZES))],
    "b": [normal(9 + k, m) / 2 for k, m in enumerate(SIZES[1:-1])],
}
X = normal(20, 6, 2)


def network(p, x):
    for w, b in zip(p["w"], p["b"], strict=False):
        x = jnp.tanh(x @ w + b)
    return (x @ p["w"][-1])[0]


def by_hessian(u, x):
    return jnp.trace(jax.hessian(u)(x))


def by_nested_grad(u, x):
    gradient = jax.grad(u)
    return sum(jax.grad(lambda y, k=k: gradient(y)[k])(x)[k] for k in range(2))


def by_jvp_of_jvp(u, x):
    along = lambda v: jax.jvp(lambda y: jax.jvp(u, (y,), (v,))[1], (x,), (v,))[1]
    return sum(along(v) for v in jnp.eye(2))


def by_jet(u, x):
    return sum(jet(u, (x,), ((v, jnp.zeros(2)),))[1][1] for v in jnp.eye(2))


LAPLACIANS = [by_hessian, by_nested_grad, by_jvp_of_jvp, by_jet]
each_laplacian = pytest.mark.parametrize("laplacian", LAPLACIANS, ids=lambda f: f.__name__)


def residuals(laplacian, p, x):
    return jax.vmap(lambda y: laplacian(functools.partial(network, p), y))(x)


def loss_of(laplacian):
    def loss(p, x):
        r = residuals(laplacian, p, x)[:, None]
        curvax.register_squared_error_loss(r, jnp.zeros_like(r), weight=0.5)
        return jnp.mean(jnp.sum(r**2, 1))

    return loss


def estimated(laplacian, ctors=None):
    args = PARAMS, X
    estimator = curvax.BlockDiagonalCurvature(
        loss_of(laplacian), layer_tag_to_block_ctor=ctors, strict=True
    )

    @jax.jit
    def update():
        state = estimator.init(jax.random.key(0), args, None, None)
        return estimator.update_curvature_matrix_estimate(
            state, 0.0, 1.0, len(X), jax.random.key(1), args, None, "ggn_exact"
        )

    return estimator, update()


@each_laplacian
def test_every_use_is_covered(laplacian):
    report = curvax.explain_registration(loss_of(laplacian), (PARAMS, X), strict=True)
    assert report.coverage == 1
    assert not any(row.reason or row.uncovered for row in report.rows)
    first = next(row for row in report.rows if row.path == "['w'][0]")
    assert first.sites > 2


@each_laplacian
def test_tags_do_not_change_the_function_or_its_gradient(laplacian):
    loss = loss_of(laplacian)
    tagged = curvax.auto_register_tags(loss, (PARAMS, X), compute_only_loss_tags=False)
    both = jax.jit(
        lambda *args: (jax.value_and_grad(tagged)(*args), jax.value_and_grad(loss)(*args))
    )
    assert_same(*both(PARAMS, X), 1e-12, 1e-12)


@each_laplacian
def test_full_blocks_are_those_of_the_gauss_newton_matrix(laplacian):
    ctors = {"dense": curvax.DenseFull, "scale_and_shift": curvax.ScaleAndShiftFull}
    estimator, state = estimated(laplacian, ctors)
    flat, unflatten = ravel_pytree(PARAMS)
    jacobian = jax.jacrev(lambda flat: residuals(laplacian, unflatten(flat), X))(flat)
    whole = jacobian.T @ jacobian / len(X)
    sizes = [x.size for x in jax.tree.leaves(PARAMS)]
    block = np.repeat(jax.tree.leaves(estimator.params_block_index), sizes)
    expected = np.where(block[:, None] == block, whole, 0)
    assert_same(estimator.to_dense_matrix(state), expected, 1e-12, 1e-12)


class Dual:
    """A value and a tangent, each an array or a dual number; None for a tangent of zero."""

    def __init__(self, value, tangent):
        self.value, self.tangent = value, tangent


def linear(f, x):
    if isinstance(x, Dual):
        return Dual(linear(f, x.value), linear(f, x.tangent))
    return None if x is None else f(x)


def add(x, y):
    if x is None or y is None:
        return y if x is None else x
    if isinstance(x, Dual):
        other = y if isinstance(y, Dual) else Dual(y, None)
        return Dual(add(x.value, other.value), add(x.tangent, other.tangent))
    return x + y


def times(x, y):
    if x is None or y is None:
        return None
    if isinstance(x, Dual):
        mixed = add(times(x.tangent, y.value), times(x.value, y.tangent))
        return Dual(times(x.value, y.value), mixed)
    return x * y


def tanh(x):
    if not isinstance(x, Dual):
        return jnp.tanh(x)
    y = tanh(x.value)
    slope = add(linear(lambda a: -a, times(y, y)), 1.0)
    return Dual(y, times(slope, x.tangent))


def test_kronecker_factors_are_outer_products_over_all_uses():
    """By dual numbers of dual numbers: each product with weights is a use, of each example."""
    inputs, shifts = {}, {}

    def along(x, v, used):
        def dense(number, x):
            w = PARAMS["w"][number]
            key = number, len([k for k in inputs if k[0] == number])
            inputs[key] = x
            return x @ w + used.get(key, jnp.zeros(w.shape[1]))

        h = Dual(Dual(x, v), Dual(v, None))
        for number, b in enumerate(PARAMS["b"]):
            z = linear(functools.partial(dense, number), h)
            z.value.value = z.value.value + b
            h = tanh(z)
        return linear(functools.partial(dense, 2), h.tangent.tangent)[0]

    totals = [[jnp.zeros((n, n)), jnp.zeros((m, m))] for n, m in itertools.pairwise(SIZES)]
    counts = [0, 0, 0]
    for x in X:
        for v in jnp.eye(2):
            inputs.clear()
            along(x, v, {})
            shifts = {k: jnp.zeros(PARAMS["w"][k[0]].shape[1]) for k in inputs}
            own = dict(inputs)
            inputs.clear()
            cotangents = jax.grad(lambda used, x=x, v=v: (inputs.clear(), along(x, v, used))[1])(
                shifts
            )
            for key, g in cotangents.items():
                totals[key[0]][0] += jnp.outer(own[key], own[key])
                totals[key[0]][1] += jnp.outer(g, g)
                counts[key[0]] += 1

    estimator, state = estimated(by_jvp_of_jvp)
    numbers = {
        block.name: own for block, own in zip(estimator.blocks, state.blocks_states, strict=True)
    }
    for number, (a, g) in enumerate(totals):
        own = numbers[f"['w'][{number}]"]
        assert_same(own.inputs_factor.value, a / counts[number], 1e-12, 1e-12)
        assert_same(own.outputs_factor.value, g / len(X), 1e-12, 1e-12)


def test_weights_and_a_bias_that_are_the_same_for_all_examples():
    """A projection of the mean of a batch of data, added to each example."""

    def model(p, x):
        mean = jnp.mean(x, 0, keepdims=True) @ p["w"] + p["b"][None]
        return jnp.tanh(x @ p["v"] + jnp.broadcast_to(mean, (len(x), 3)))

    params = {"w": normal(1, 2, 3), "b": normal(2, 3), "v": normal(3, 2, 3)}

    def loss(p, x):
        curvax.register_squared_error_loss(model(p, x), weight=0.5)

    report = curvax.explain_registration(loss, (params, X), strict=True)
    assert {row.path: row.tag for row in report.rows} == dict.fromkeys(
        ("['b']", "['v']", "['w']"), "dense_tag"
    )
    estimator = curvax.BlockDiagonalCurvature(
        loss, layer_tag_to_block_ctor={"dense": curvax.DenseFull}
    )
    state = estimator.init(jax.random.key(0), (params, X), None, None)
    state = estimator.update_curvature_matrix_estimate(
        state, 0.0, 1.0, len(X), jax.random.key(1), (params, X), None, "ggn_exact"
    )
    flat, unflatten = ravel_pytree(params)
    jacobian = jax.jacrev(lambda flat: model(unflatten(flat), X).reshape(-1))(flat)
    whole = jacobian.T @ jacobian / len(X)
    sizes = [x.size for x in jax.tree.leaves(params)]
    block = np.repeat(jax.tree.leaves(estimator.params_block_index), sizes)
    expected = np.where(block[:, None] == block, whole, 0)
    assert_same(estimator.to_dense_matrix(state), expected, 1e-12, 1e-12)


def test_a_scale_of_constants_alone_is_generic_however_often_it_is_scaled():
    scaled = lambda s, *constants: functools.reduce(jnp.multiply, constants, s)
    for constants in ([normal(1, 3)], [normal(1, 3), normal(2, 3)]):

        def loss(p, x, constants=constants):
            shift = jnp.broadcast_to(scaled(p["s"], *constants), (len(x), 3))
            return curvax.register_squared_error_loss(x @ p["v"] + shift)

        report = curvax.explain_registration(loss, ({"s": normal(3, 3), "v": normal(4, 2, 3)}, X))
        reasons = {row.path: row.reason for row in report.rows}
        assert "it meets nothing that differs from example to example" in reasons["['s']"]


class TestWhatCannotBeLifted:
    """A tangent that is the same for all examples, and does not meet these one by one."""

    def loss(self, p, x):
        u = lambda p, x: jnp.tanh(jnp.tanh(x @ p["w"]) @ p["v"])
        shared = jnp.ones(2) @ p["w"]
        z = u(p, x) + jnp.tanh(x @ p["w"]) @ shared[:, None]
        return curvax.register_squared_error_loss(z)

    args = {"w": normal(1, 2, 3), "v": normal(2, 3, 1)}, X

    def test_it_is_counted_and_said(self):
        report = curvax.explain_registration(self.loss, self.args)
        row = next(row for row in report.rows if row.path == "['w']")
        assert (row.sites, row.uncovered) == (2, 1)
        assert "1 more use is not covered by the layer (it meets nothing that" in row.reason
        assert "it goes into `dot_general`" in row.reason
        assert report.coverage == pytest.approx((6 * 2 / 3 + 3) / 9)
        assert "100 %" not in str(report)

    def test_strict_rejects_it(self):
        with pytest.raises(curvax.RegistrationError, match="not covered by the layer"):
            curvax.explain_registration(self.loss, self.args, strict=True)
