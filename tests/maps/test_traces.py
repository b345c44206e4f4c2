"""The user's function is traced once; `microbatch` once more where sizes are uneven."""

import jax
import jax.numpy as jnp
import pytest

import curvax
from curvax import AccumulationType
from helpers import CountTraces

X = jnp.linspace(0.0, 1.0, 7)
TRANSFORMS = {
    "forward": lambda f: f,
    "gradient": lambda f: jax.grad(lambda x: jnp.sum(f(x))),
    "forward over reverse": lambda f: (
        lambda x: jax.jvp(jax.grad(lambda x: jnp.sum(f(x))), (x,), (x,))
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("size", [None, 1, 2, 3, 7])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_chunked_vmap_traces_once(size, checkpoint, transform):
    fun = CountTraces(jnp.sin)
    mapped = curvax.chunked_vmap(fun, size, checkpoint=checkpoint)
    jax.jit(TRANSFORMS[transform](mapped)).lower(X)
    assert fun.count == 1


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("size", [None, 1, 2, 3, 7])
@pytest.mark.parametrize("order", ["strided", "contiguous"])
@pytest.mark.parametrize("kind", [AccumulationType.CONCAT, AccumulationType.RUNNING_MEAN])
def test_micro_vmap_traces_once(size, order, kind, transform):
    fun = CountTraces(jnp.sin)
    mapped = curvax.micro_vmap(fun, microbatch_size=size, accumulator=kind, order=order)
    jax.jit(TRANSFORMS[transform](mapped)).lower(X)
    assert fun.count == 1


@pytest.mark.parametrize(("size", "most"), [(None, 1), (1, 1), (2, 2), (3, 2), (7, 1), (9, 1)])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("kind", AccumulationType)
def test_microbatch_traces_once_for_each_size_of_microbatch(size, most, kind, transform):
    fun = CountTraces(jnp.sin if kind is AccumulationType.CONCAT else lambda x: jnp.mean(x**2))
    micro = curvax.microbatch(fun, 0, size, kind)
    jax.jit(TRANSFORMS[transform](micro)).lower(X)
    assert fun.count == most


@pytest.mark.parametrize("size", [None, 1, 2, 7])
@pytest.mark.parametrize("number", [None, 1, "traced"])
def test_micro_grad_traces_once(size, number):
    if number == 1 and size in (None, 7):
        number = None
    fun = CountTraces(lambda w, x: jnp.sum(w * x))

    def run(x, traced):
        limit = traced if number == "traced" else number
        return curvax.micro_grad(fun, microbatch_size=size, num_real_microbatches=limit)(1.0, x)

    jax.jit(run).lower(X, 1)
    assert fun.count == 1
