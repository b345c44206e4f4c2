"""Maps of arguments that are already sharded compute what one device computes."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import curvax
from curvax import AccumulationType
from helpers import assert_same, mesh_of

W = jnp.linspace(-1.0, 1.0, 4)
X = jnp.sin(jnp.arange(64 * 4, dtype=jnp.float64)).reshape(64, 4)
SUM, CONCAT = AccumulationType.SUM, AccumulationType.CONCAT
REDUCE = {
    SUM: lambda x: jnp.sum(x, axis=0),
    AccumulationType.MEAN: lambda x: jnp.mean(x, axis=0),
    AccumulationType.RUNNING_MEAN: lambda x: jnp.mean(x, axis=0),
    CONCAT: lambda x: x,
}
# A map of any size, and how its rows are reduced.
PROGRAMS = {"chunked_vmap": (lambda size: curvax.chunked_vmap(example, size), CONCAT)} | {
    f"{kind.name}, {order}": (
        lambda size, kind=kind, order=order: curvax.micro_vmap(
            example, microbatch_size=size, accumulator=kind, order=order
        ),
        kind,
    )
    for kind in REDUCE
    for order in ("strided", "contiguous")
}
same = functools.partial(assert_same, rtol=1e-10, atol=1e-12)


def example(x):
    return jnp.tanh(x * W) * jnp.sum(jnp.sin(x))


def with_gradient(fun):
    loss = lambda x: jnp.sum(fun(x) ** 2)
    return jax.jit(lambda x: (fun(x), jax.grad(loss)(x)))


@functools.cache
def naive(kind):
    """What one device computes from all examples at once, with its gradient."""
    return with_gradient(lambda x: REDUCE[kind](jax.vmap(example)(x)))(X)


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def sharded(request):
    """The examples, sharded over eight devices."""
    return jax.device_put(X, NamedSharding(mesh_of(8, request.param), P("data")))


def on_mesh(kind, size):
    """One size for each kind of axis by default, the other if slow tests are wanted."""
    is_quick = (kind, size) in ((AxisType.Auto, 7), (AxisType.Explicit, 16))
    marks = () if is_quick else pytest.mark.slow
    return pytest.param(kind, size, marks=marks, id=f"{kind.name}-{size}")


@pytest.mark.parametrize(
    ("kind", "size"),
    [on_mesh(kind, size) for kind in (AxisType.Auto, AxisType.Explicit) for size in (7, 16)],
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_gradients_are_those_of_one_device(name, kind, size):
    make, reduction = PROGRAMS[name]
    x = jax.device_put(X, NamedSharding(mesh_of(8, kind), P("data")))
    expected = naive(reduction)
    same(with_gradient(make(size))(x), expected)
    if size == 16:
        same(make(size)(x), expected[0])  # Without jit.


@pytest.mark.parametrize("budget", [6_000, 60_000])
def test_values_within_a_budget_are_those_of_one_device(sharded, budget):
    planned = curvax.chunked_vmap(example, memory_budget=budget)
    same(planned(sharded), naive(CONCAT)[0])
    same(jax.jit(planned)(sharded), naive(CONCAT)[0])


def test_rows_stay_on_their_device(sharded):
    mapped = jax.jit(curvax.micro_vmap(example, microbatch_size=16))
    assert mapped(sharded).sharding.spec[0] == "data"
    program = mapped.lower(sharded).compile().as_text()
    assert not re.search(r"all-(gather|reduce|to-all)\(", program)


def under_shard_map(name, check_vma):
    """`check_vma` alternates between programs by default; the other if slow tests are wanted."""
    is_quick = check_vma == (list(PROGRAMS).index(name) % 2 == 0)
    marks = () if is_quick else pytest.mark.slow
    return pytest.param(name, check_vma, marks=marks, id=f"{name}, check_vma={check_vma}")


@pytest.mark.parametrize(
    ("name", "check_vma"),
    [under_shard_map(name, check) for name in PROGRAMS for check in (True, False)],
)
def test_values_and_gradients_under_shard_map_are_those_of_one_device(name, check_vma):
    make, reduction = PROGRAMS[name]
    fun = make(3)
    if reduction is CONCAT:
        local, out_specs = fun, P("data")
    else:
        reduce = jax.lax.psum if reduction is SUM else jax.lax.pmean
        local, out_specs = lambda x: reduce(fun(x), "data"), P()
    specs = {"in_specs": P("data"), "out_specs": out_specs}
    mapped = jax.shard_map(local, mesh=mesh_of(8), check_vma=check_vma, **specs)
    same(with_gradient(mapped)(X), naive(reduction))
