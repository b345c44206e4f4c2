"""Loops over arguments that are already sharded compute what one device computes."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import curvax
from helpers import assert_same, mesh_of, slow_but

LENGTH = 12
W = jnp.array(0.7)
INIT = jnp.linspace(0.0, 1.0, 8)
XS = jnp.sin(jnp.arange(LENGTH * 8.0)).reshape(LENGTH, 8)
ACROSS = P(None, "data")
# Specs of the carry and of what is scanned over.
LAYOUTS = {"time sharded": (P(), P("data", None)), "features sharded": (P("data"), ACROSS)}

# A loop, and which outputs of `jax.lax.scan` it keeps.
LOOPS = {
    "sliced_scan": (functools.partial(curvax.sliced_scan, start=1, step=4), slice(1, None, 4)),
    "backwards": (functools.partial(curvax.sliced_scan, start=-3, step=-2), slice(-3, None, -2)),
    "checkpoint_chunked_scan": (
        functools.partial(curvax.checkpoint_chunked_scan, chunk_size=5),
        slice(None),
    ),
}
QUICK = [("backwards", False), ("checkpoint_chunked_scan", True)]
each_loop = pytest.mark.parametrize(
    ("name", "reverse"),
    [
        slow_but(QUICK, *case)
        for case in ((name, reverse) for name in LOOPS for reverse in (False, True))
    ],
)
each_kind = pytest.mark.parametrize(
    "kind",
    [AxisType.Explicit, pytest.param(AxisType.Auto, marks=pytest.mark.slow)],
    ids=lambda kind: kind.name,
)
same = functools.partial(assert_same, rtol=1e-10, atol=1e-12)


def body(w, carry, x):
    return jnp.sin(w * carry + x), carry * x


def through(loop, reverse):
    return lambda w, init, xs: loop(functools.partial(body, w), init, xs, reverse=reverse)


def with_gradients(fun):
    def loss(*args):
        carry, ys = fun(*args)
        return jnp.sum(carry**2) + jnp.sum(ys * jnp.cos(ys)), (carry, ys)

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))


@functools.cache
def naive(name, reverse):
    def run(*args):
        carry, ys = through(jax.lax.scan, reverse)(*args)
        return carry, ys[LOOPS[name][1]]

    return with_gradients(run)(W, INIT, XS)


def put(kind, specs):
    mesh = mesh_of(4, kind)
    values = zip((W, INIT, XS), (P(), *specs), strict=True)
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in values]


@each_kind
@pytest.mark.parametrize("layout", LAYOUTS)
@each_loop
def test_values_and_gradients_are_those_of_one_device(name, reverse, layout, kind):
    fun = with_gradients(through(LOOPS[name][0], reverse))
    same(fun(*put(kind, LAYOUTS[layout])), naive(name, reverse))


@each_kind
@each_loop
def test_values_without_jit_are_those_of_one_device(name, reverse, kind):
    found = through(LOOPS[name][0], reverse)(*put(kind, LAYOUTS["features sharded"]))
    same(found, naive(name, reverse)[0][1])


@pytest.mark.parametrize("check_vma", [True, False])
@each_loop
def test_values_and_gradients_under_shard_map_are_those_of_one_device(name, reverse, check_vma):
    local = jax.shard_map(
        through(LOOPS[name][0], reverse),
        mesh=mesh_of(4),
        in_specs=(P(), P("data"), ACROSS),
        out_specs=(P("data"), ACROSS),
        check_vma=check_vma,
    )
    same(with_gradients(local)(W, INIT, XS), naive(name, reverse))
