"""Maps over sharded inputs, compared with one device. Run by `test_sharded.py` on eight devices."""

import functools
import itertools
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import curvax
from curvax import AccumulationType

jax.config.update("jax_enable_x64", True)

W = jnp.linspace(-1.0, 1.0, 4)
X = jnp.sin(jnp.arange(64 * 4, dtype=jnp.float64)).reshape(64, 4)
REDUCE = {
    AccumulationType.SUM: lambda x: jnp.sum(x, axis=0),
    AccumulationType.MEAN: lambda x: jnp.mean(x, axis=0),
    AccumulationType.RUNNING_MEAN: lambda x: jnp.mean(x, axis=0),
    AccumulationType.CONCAT: lambda x: x,
}


def example(x):
    return jnp.tanh(x * W) * jnp.sum(jnp.sin(x))


def with_gradient(fun):
    loss = lambda x: jnp.sum(fun(x) ** 2)
    return jax.jit(lambda x: (fun(x), jax.grad(loss)(x)))


@functools.cache
def naive(kind):
    """What one device gives for all examples, with its gradient."""
    return with_gradient(lambda x: REDUCE[kind](jax.vmap(example)(x)))(X)


def programs(size):
    """Each map with what its naive equivalent gives."""
    yield "chunked_vmap", curvax.chunked_vmap(example, size), naive(AccumulationType.CONCAT)
    for kind in REDUCE:
        for order in ("strided", "contiguous"):
            micro = curvax.micro_vmap(example, microbatch_size=size, accumulator=kind, order=order)
            yield f"{kind.name} {order}", micro, naive(kind)


def agree(name, actual, expected):
    for got, want in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12, err_msg=name)


def check_mesh(kind, sizes):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    x = jax.device_put(X, NamedSharding(mesh, PartitionSpec("data")))
    count = 0
    for size in sizes:
        for name, fun, expected in programs(size):
            agree(name, with_gradient(fun)(x), expected)
            count += 1
            if size == 16:
                agree(f"{name}, without jit", fun(x), expected[0])
    for budget in (6_000, 60_000):
        planned = curvax.chunked_vmap(example, memory_budget=budget)
        agree("to a budget", planned(x), naive(AccumulationType.CONCAT)[0])
        agree("to a budget, under jit", jax.jit(planned)(x), naive(AccumulationType.CONCAT)[0])
    stays = jax.jit(curvax.micro_vmap(example, microbatch_size=16))
    assert stays(x).sharding.spec[0] == "data"
    assert not re.search(r"all-(gather|reduce|to-all)\(", stays.lower(x).compile().as_text())
    return count


def check_shard_map(is_all):
    """With `check_vma` and without: both for each program, or one after the other."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("data")
    checks = (True, False)
    paired = itertools.product if is_all else lambda found, _: zip(found, itertools.cycle(checks))
    count = 0
    for (name, fun, expected), check in paired(programs(3), checks):
        if "CONCAT" in name or name == "chunked_vmap":
            local, out_specs = fun, spec
        elif "SUM" in name:
            local = lambda x, fun=fun: jax.lax.psum(fun(x), "data")
            out_specs = PartitionSpec()
        else:
            local = lambda x, fun=fun: jax.lax.pmean(fun(x), "data")
            out_specs = PartitionSpec()
        mapped = jax.shard_map(
            local, mesh=mesh, in_specs=spec, out_specs=out_specs, check_vma=check
        )
        agree(name, with_gradient(mapped)(X), expected)
        count += 1
    return count


if __name__ == "__main__":
    assert len(jax.devices()) == 8
    is_all = sys.argv[1] == "all"
    count = check_mesh(AxisType.Auto, (16, 7) if is_all else (7,))
    count += check_mesh(AxisType.Explicit, (16, 7) if is_all else (16,))
    count += check_shard_map(is_all)
    sys.stdout.write(f"{count} programs agree\n")
