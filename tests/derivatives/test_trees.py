"""Matrices taken apart by leaves are what `jax.hessian` and `jax.jacobian` return for pytrees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from curvax import hessian, hessian_to_pytree, jacobian, jacobian_to_pytree
from derivatives.functions import BY_NAME, LOSS_BY_NAME, normal
from helpers import assert_same

# In one precision: JAX gives each block that of a leaf, and a matrix has one for all.


@pytest.mark.parametrize("name", ["MLP", "oscillator", "image"])
def test_hessians_are_those_of_jax(name):
    case = LOSS_BY_NAME[name]
    x = jax.tree.map(jnp.asarray, case.x)
    H, _ = hessian(case.f, x)
    assert_same(hessian_to_pytree(H, x), jax.jit(jax.hessian(case.f))(x), 1e-11, 1e-11)


@pytest.mark.parametrize("name", ["network", "numbers", "complex outputs"])
def test_jacobians_are_those_of_jax(name):
    case = BY_NAME[name]
    x = jax.tree.map(jnp.asarray, case.x)
    J, _ = jacobian(case.f, x)
    assert_same(jacobian_to_pytree(J, x), jax.jit(jax.jacfwd(case.f))(x), 1e-11, 1e-11)


X = {"a": normal(0, 2, 2), "b": (normal(1), jnp.zeros((0, 3)))}


def test_leaves_of_no_axis_and_of_no_elements():
    H = jnp.arange(25.0).reshape(5, 5)
    blocks = hessian_to_pytree(H, X)
    assert_same(blocks["a"]["a"], H[:4, :4].reshape(2, 2, 2, 2))
    assert_same(blocks["a"]["b"][0], H[:4, 4].reshape(2, 2))
    assert_same(blocks["b"][0]["b"][0], H[4, 4])
    assert_same(blocks["b"][1]["a"], jnp.zeros((0, 3, 2, 2)))
    assert_same(blocks["b"][0]["b"][1], jnp.zeros((0, 3)))


def test_shapes_are_enough_to_take_a_matrix_apart():
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), X)
    H, J = jnp.arange(25.0).reshape(5, 5), {"y": jnp.arange(10.0).reshape(2, 5)}
    assert_same(hessian_to_pytree(H, like), hessian_to_pytree(H, X))
    assert_same(jacobian_to_pytree(J, like), jacobian_to_pytree(J, X))


def test_under_jit():
    H = jnp.arange(25.0).reshape(5, 5)
    assert_same(jax.jit(hessian_to_pytree)(H, X), hessian_to_pytree(H, X))
    assert_same(jax.jit(jacobian_to_pytree)(H, X), jacobian_to_pytree(H, X))


def test_no_leaves():
    assert hessian_to_pytree(jnp.zeros((0, 0)), {}) == {}
    assert jacobian_to_pytree(jnp.zeros((3, 0)), ()) == ()


@pytest.mark.usefixtures("unchecked")
def test_arrays_on_disk_will_do(tmp_path):
    f = lambda x: jnp.sum(x["a"] ** 3) * x["b"][0]
    H, _ = hessian(f, X, out=tmp_path / "H.zarr")
    blocks = jax.tree.map(jnp.asarray, hessian_to_pytree(H, X))
    assert_same(blocks, jax.jit(jax.hessian(f))(X))
    J, _ = jacobian(jnp.sin, normal(2, 3), out=tmp_path / "J.zarr")
    np.testing.assert_array_equal(jacobian_to_pytree(J, normal(2, 3)), J[...])


@pytest.mark.parametrize("shape", [(5,), (4, 4), (5, 4), (5, 5, 5)], ids=str)
def test_matrices_of_another_size_are_rejected(shape):
    words = r"^curvax\.hessian_to_pytree: x has 5 coordinates, .* \(5, 5\), got "
    with pytest.raises(ValueError, match=words):
        hessian_to_pytree(jnp.zeros(shape), X)


@pytest.mark.parametrize("shape", [(), (4,), (5, 4)], ids=str)
def test_jacobians_of_another_length_are_rejected(shape):
    words = r"^curvax\.jacobian_to_pytree: x has 5 coordinates, so the last axis of each .*got"
    with pytest.raises(ValueError, match=words):
        jacobian_to_pytree({"y": jnp.zeros((2, 5)), "z": jnp.zeros(shape)}, X)


def test_points_that_are_not_real_are_rejected():
    with pytest.raises(TypeError, match=r"^curvax\.hessian_to_pytree: x is of type int64"):
        hessian_to_pytree(jnp.zeros((3, 3)), jnp.arange(3))
