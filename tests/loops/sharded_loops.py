"""Loops over sharded inputs, compared with one device. Run by `test_sharded_loops.py`."""

import functools
import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import curvax

jax.config.update("jax_enable_x64", True)

LENGTH = 12
W = jnp.array(0.7)
INIT = jnp.linspace(0.0, 1.0, 8)
XS = jnp.sin(jnp.arange(LENGTH * 8.0)).reshape(LENGTH, 8)
ALONG_TIME, ACROSS = PartitionSpec("data", None), PartitionSpec(None, "data")

LOOPS = {
    "sliced_scan": (functools.partial(curvax.sliced_scan, start=1, step=4), slice(1, None, 4)),
    "backwards": (functools.partial(curvax.sliced_scan, start=-3, step=-2), slice(-3, None, -2)),
    "checkpoint_chunked_scan": (
        functools.partial(curvax.checkpoint_chunked_scan, chunk_size=5),
        slice(None),
    ),
}


def body(w, carry, x):
    return jnp.sin(w * carry + x), carry * x


def through(loop, reverse):
    return lambda w, init, xs: loop(functools.partial(body, w), init, xs, reverse=reverse)


def with_gradients(fun):
    def loss(*args):
        carry, ys = fun(*args)
        return jnp.sum(carry**2) + jnp.sum(ys * jnp.cos(ys)), (carry, ys)

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))


def agree(name, actual, expected):
    for got, want in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12, err_msg=name)


def naive(kept, reverse):
    def run(*args):
        carry, ys = through(jax.lax.scan, reverse)(*args)
        return carry, ys[kept]

    return with_gradients(run)(W, INIT, XS)


def programs(choice):
    """Loops with what one device gives: each in both directions, or each of some in one."""
    some = [("backwards", False), ("checkpoint_chunked_scan", True)]
    for name, reverse in {"all": itertools.product(LOOPS, (False, True)), "some": some}[choice]:
        loop, kept = LOOPS[name]
        yield f"{name}, reverse={reverse}", through(loop, reverse), naive(kept, reverse)


def check_mesh(kind, programs):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    layouts = {"time": (PartitionSpec(), ALONG_TIME), "features": (PartitionSpec("data"), ACROSS)}
    for (name, fun, expected), (split, specs) in itertools.product(programs, layouts.items()):
        args = put(W, PartitionSpec()), put(INIT, specs[0]), put(XS, specs[1])
        agree(f"{name}, {split} split", with_gradients(fun)(*args), expected)
    for name, fun, expected in programs:
        args = put(W, PartitionSpec()), put(INIT, PartitionSpec("data")), put(XS, ACROSS)
        agree(f"{name}, without jit", fun(*args), expected[0][1])


def check_shard_map(programs):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    for (name, fun, expected), check in itertools.product(programs, (True, False)):
        local = jax.shard_map(
            fun,
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec("data"), ACROSS),
            out_specs=(PartitionSpec("data"), ACROSS),
            check_vma=check,
        )
        agree(f"{name}, check_vma={check}", with_gradients(local)(W, INIT, XS), expected)


if __name__ == "__main__":
    chosen = list(programs(sys.argv[1]))
    for kind in (AxisType.Explicit, AxisType.Auto)[: 2 if sys.argv[1] == "all" else 1]:
        check_mesh(kind, chosen)
    check_shard_map(chosen)
    sys.stdout.write("loops agree\n")
