"""A map on a mesh that two processes share. Run by `test_processes.py`."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import curvax

jax.config.update("jax_enable_x64", True)

X = np.sin(np.arange(24.0 * 16)).reshape(24, 16)


def heavy(x):
    return jnp.sum(jnp.sin(x[:, None] * x[None, :]) ** 2)


def check(number):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    share = X[12 * number : 12 * (number + 1)]
    given = jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), share)
    expected = np.asarray(jax.jit(jax.vmap(heavy))(X))

    def agrees(result):
        for shard in result.addressable_shards:
            rows = expected[: len(result)][shard.index]
            np.testing.assert_allclose(shard.data, rows, rtol=1e-12)

    mapped = curvax.chunked_vmap(heavy, 2, mesh=mesh)
    agrees(mapped(given))
    agrees(mapped(X))
    agrees(curvax.chunked_vmap(heavy, 2, mesh=mesh)(X[:23]))
    total = curvax.micro_vmap(heavy, accumulator=curvax.AccumulationType.SUM, mesh=mesh)(given)
    np.testing.assert_allclose(total.addressable_data(0), expected.sum(), rtol=1e-12)

    # The first process has memory for three examples, the other for one; both do as the first.
    budget = (8_000, 3_000)[number]
    with curvax.recorded_plans() as plans:
        for objective in ("memory", "time"):
            planned = curvax.chunked_vmap(
                heavy, memory_budget=budget, objective=objective, mesh=mesh
            )
            agrees(planned(given))
            agrees(planned(X))
            agrees(jax.jit(lambda x, planned=planned: planned(x * 1.0))(given))
    assert {plan.budget_bytes for plan in plans} == {8_000}
    return [plan.batch_size for plan in plans]


if __name__ == "__main__":
    address, count, number = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    jax.distributed.initialize(address, count, number)
    sys.stdout.write(f"sizes {check(number)}\n")
