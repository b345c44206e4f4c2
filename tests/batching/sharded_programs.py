"""Maps over sharded inputs, compared with one device. Run by `test_sharded.py` on eight devices."""

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


def programs(size):
    """Each map with its naive equivalent."""
    yield "chunked_vmap", curvax.chunked_vmap(example, size), jax.vmap(example)
    for kind, reduce in REDUCE.items():
        naive = lambda x, reduce=reduce: reduce(jax.vmap(example)(x))
        for order in ("strided", "contiguous"):
            micro = curvax.micro_vmap(example, microbatch_size=size, accumulator=kind, order=order)
            yield f"{kind.name} {order}", micro, naive


def with_gradient(fun):
    loss = lambda x: jnp.sum(fun(x) ** 2)
    return lambda x: (fun(x), jax.grad(loss)(x))


def agree(name, actual, expected):
    for got, want in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12, err_msg=name)


def check_mesh(kind):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    x = jax.device_put(X, NamedSharding(mesh, PartitionSpec("data")))
    count = 0
    for size in (16, 7):
        for name, fun, naive in programs(size):
            agree(name, jax.jit(with_gradient(fun))(x), with_gradient(naive)(X))
            count += 1
    for name, fun, naive in programs(16):
        agree(name, fun(x), naive(X))
    for budget in (6_000, 60_000):
        planned = curvax.chunked_vmap(example, memory_budget=budget)
        agree("to a budget", planned(x), jax.vmap(example)(X))
        agree("to a budget, under jit", jax.jit(planned)(x), jax.vmap(example)(X))
    stays = jax.jit(curvax.micro_vmap(example, microbatch_size=16))
    assert stays(x).sharding.spec[0] == "data"
    assert not re.search(r"all-(gather|reduce|to-all)\(", stays.lower(x).compile().as_text())
    return count


def check_shard_map():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("data")
    count = 0
    for check in (True, False):
        for name, fun, naive in programs(3):
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
            agree(name, jax.jit(with_gradient(mapped))(X), with_gradient(naive)(X))
            count += 1
    return count


CHECKS = {
    "auto": lambda: check_mesh(AxisType.Auto),
    "explicit": lambda: check_mesh(AxisType.Explicit),
    "shard_map": check_shard_map,
}

if __name__ == "__main__":
    assert len(jax.devices()) == 8
    sys.stdout.write(f"{CHECKS[sys.argv[1]]()} programs agree\n")
