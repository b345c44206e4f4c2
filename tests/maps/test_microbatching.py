"""`curvax.microbatching` is `optax.microbatching`, by its names and where both are right."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvax
from curvax import microbatching

X = np.linspace(-1.0, 1.0, 6)


@pytest.fixture(autouse=True)
def _promotion():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def test_the_names_are_those_of_optax():
    theirs = {name for name in dir(optax.microbatching) if not name.startswith("_")}
    assert {*microbatching.__all__} == theirs
    assert all(getattr(microbatching, name) is getattr(curvax, name) for name in theirs)


def sums(package, **options):
    """All maps, with sums over the microbatches that ran."""
    kind = package.AccumulationType.SUM
    loss = lambda w, x: jnp.sum(jnp.sin(w * x))
    return (
        package.micro_vmap(jnp.sin, accumulator=kind, **options)(X),
        package.microbatch(jnp.sum, 0, accumulator=kind, **options)(X),
        package.micro_grad(loss, accumulator=kind, **options)(2.0, X)[0],
    )


@pytest.mark.parametrize("size", [None, 2, 3])
@pytest.mark.parametrize("number", [None, 1, 2])
def test_sums_are_those_of_optax(size, number):
    options = {"microbatch_size": size, "num_real_microbatches": number}
    expected = sums(optax.microbatching, **options)
    np.testing.assert_allclose(sums(microbatching, **options), expected, rtol=1e-12)


@pytest.mark.parametrize("number", [None, 1, 2])
def test_rows_are_those_of_optax(number):
    options = {"microbatch_size": 2, "num_real_microbatches": number}
    expected = optax.microbatching.micro_vmap(jnp.sin, **options)(X)
    np.testing.assert_allclose(microbatching.micro_vmap(jnp.sin, **options)(X), expected)
    np.testing.assert_array_equal(
        microbatching.reshape_batch_axis(X, 2), optax.microbatching.reshape_batch_axis(X, 2)
    )
