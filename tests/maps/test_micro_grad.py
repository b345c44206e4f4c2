"""`micro_grad` equals a loop over examples that takes each one's gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import curvax
from curvax import AccumulationType
from helpers import assert_same, derivatives, key


def loss(params, batch):
    """A mean over the batch, with auxiliary outputs, as training code has it."""
    predictions = jnp.tanh(batch["x"] @ params["w"]) + params["b"]
    residual = predictions - batch["y"]
    return jnp.mean(residual**2), {"residual": residual}


def data(length):
    params = {"w": jax.random.normal(key(), (3,), jnp.float64), "b": jnp.float64(0.3)}
    x = jax.random.normal(key(1), (length, 3), jnp.float64)
    return params, {"x": x, "y": jnp.arange(length, dtype=jnp.float64)}


def clip(gradient):
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradient)))
    return jax.tree.map(lambda g: g / jnp.maximum(1.0, norm), gradient)


def norm(gradient):
    return jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradient)))


def naive(params, batch, reduce=sum):
    """One example after the other, in Python."""
    length = batch["y"].shape[0]
    rows, values, metrics, aux = [], [], [], []
    for i in range(length):
        one = jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], batch)
        (value, extra), gradient = jax.value_and_grad(loss, has_aux=True)(params, one)
        rows.append(clip(gradient))
        values.append(value)
        metrics.append(norm(gradient))
        aux.append(extra)
    stack = lambda rows: jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)
    total = jax.tree.map(lambda leaf: reduce(leaf), stack(rows))
    return total, curvax.PerExample(jnp.stack(values), jnp.stack(metrics), stack(aux))


@settings(max_examples=6)
@given(
    length=st.integers(1, 6),
    size=st.one_of(st.none(), st.integers(1, 7)),
    order=st.sampled_from(["strided", "contiguous"]),
    mean=st.booleans(),
)
def test_it_equals_a_loop_over_examples(length, size, order, mean):
    micro = curvax.micro_grad(
        loss,
        has_aux=True,
        microbatch_size=size,
        accumulator=AccumulationType.MEAN if mean else AccumulationType.SUM,
        transform_fn=clip,
        metrics_fn=norm,
        order=order,
    )
    reduce = lambda leaf: (jnp.mean if mean else jnp.sum)(leaf, axis=0)
    args = data(length)
    assert_same(jax.jit(micro)(*args), naive(*args, reduce))


def test_it_is_differentiable_itself():
    fun = lambda w, x: jnp.sum(jnp.sin(x @ w))
    micro = curvax.micro_grad(fun, keep_batch_dim=False, microbatch_size=2)
    whole = lambda w, x: jax.vmap(jax.grad(fun), (None, 0))(w, x).sum(0)
    w, x = jnp.ones(3), jax.random.normal(key(), (5, 3), jnp.float64)
    assert_same(derivatives(lambda w, x: micro(w, x)[0])(w, x), derivatives(whole)(w, x))


@pytest.mark.parametrize("keep", [True, False])
def test_keep_batch_dim_says_whether_the_function_sees_a_batch_of_one(keep):
    def fun(w, x):
        assert x.shape == ((1, 3) if keep else (3,))
        return jnp.sum(x @ w)

    x = jnp.arange(15.0).reshape(5, 3)
    result, per_example = curvax.micro_grad(fun, keep_batch_dim=keep, microbatch_size=2)(
        jnp.ones(3), x
    )
    np.testing.assert_allclose(result, x.sum(0))
    np.testing.assert_allclose(per_example.values, x.sum(1))
    assert per_example.metrics is None
    assert per_example.aux is None


def test_moments_of_gradients_are_a_transform():
    fun = lambda w, x: jnp.sum(w * x)
    x = jax.random.normal(key(), (7, 3), jnp.float64)
    (first, second), _ = curvax.micro_grad(
        fun,
        keep_batch_dim=False,
        microbatch_size=3,
        transform_fn=lambda g: (g, jnp.outer(g, g)),
        accumulator=(AccumulationType.MEAN, AccumulationType.SUM),
    )(jnp.ones(3), x)
    np.testing.assert_allclose(first, x.mean(0), rtol=1e-12)
    np.testing.assert_allclose(second, x.T @ x, rtol=1e-12)


def test_several_arguments_may_be_differentiated_and_several_batched():
    fun = lambda w, x, v, y: jnp.sum(jnp.tanh(x @ w) * y) + jnp.sum(v * y)
    w, v = jnp.ones(3), jnp.float64(2.0)
    x, y = jnp.arange(15.0).reshape(5, 3) / 10, jnp.arange(5.0)
    micro = curvax.micro_grad(fun, argnums=(0, 2), batch_argnums=(1, 3), microbatch_size=2)
    expected = jax.grad(fun, (0, 2))(w, x, v, y)
    assert_same(micro(w, x, v, y)[0], expected)


def test_arguments_may_be_passed_by_name():
    params, batch = data(5)
    micro = curvax.micro_grad(loss, has_aux=True, microbatch_size=2)
    assert_same(micro(batch=batch, params=params), micro(params, batch))
    assert_same(micro(params, batch=batch), micro(params, batch))


def test_in_axes_says_where_examples_are():
    fun = lambda w, x: jnp.sum((w @ x) ** 2)
    w, x = jnp.ones(3), jnp.arange(15.0).reshape(3, 5)
    micro = curvax.micro_grad(fun, microbatch_size=2, in_axes=1)
    assert_same(micro(w, x)[0], jax.grad(fun)(w, x))


@pytest.mark.parametrize("traced", [False, True])
def test_num_real_microbatches_leaves_the_other_examples_out(traced):
    fun = lambda w, x: jnp.sum(w * x)
    x = jnp.arange(1.0, 8.0)
    run = lambda number: curvax.micro_grad(
        fun, microbatch_size=3, num_real_microbatches=number, order="contiguous"
    )(1.0, x)
    result, per_example = jax.jit(run)(2) if traced else run(2)
    assert result == 1 + 2 + 3 + 4 + 5 + 6
    np.testing.assert_array_equal(per_example.values, [1, 2, 3, 4, 5, 6, 0])


def test_it_composes_with_an_outer_vmap():
    fun = lambda w, x: jnp.sum(jnp.sin(x * w) ** 2)
    clip = lambda g: g / jnp.maximum(1.0, jnp.linalg.norm(g))
    micro = curvax.micro_grad(fun, keep_batch_dim=False, microbatch_size=2, transform_fn=clip)
    naive = lambda w, x: jax.vmap(lambda x: clip(jax.grad(fun)(w, x)))(x).sum(0)
    w = jnp.linspace(0.1, 1.0, 6).reshape(2, 3)
    x = jnp.sin(jnp.arange(30.0)).reshape(2, 5, 3)
    total = lambda w, x: micro(w, x)[0]
    assert_same(jax.vmap(derivatives(total))(w, x), jax.vmap(derivatives(naive))(w, x))
