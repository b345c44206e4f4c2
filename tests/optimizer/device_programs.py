"""Steps on two devices, with the batch split between them: run by `test_optax.py`."""

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P

import curvax

sys.path.insert(0, str(Path(__file__).parents[1]))
from optimizer.problems import (
    ADAPTIVE,
    VALUES,
    loss,
    make,
    make_batch,
    make_params,
    train,
)

jax.config.update("jax_enable_x64", True)

EXACT = {"estimation_mode": "ggn_exact", "curvature_update_period": 2}


def steps(transformation, axis_name, params, batches):
    """The parameters after a step for each batch."""
    state = transformation.init(params)
    for batch in batches:
        if axis_name is None:
            gradient = jax.grad(loss)(params, batch)
        else:
            own = jax.tree.map(lambda x: jax.lax.pcast(x, axis_name, to="varying"), params)
            gradient = jax.lax.pmean(jax.grad(loss)(own, batch), axis_name)
        updates, state = transformation.update(gradient, state, params, batch=batch)
        params = jax.tree.map(jnp.add, params, updates)
    return params


def close(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, 1e-8, 1e-10)


def check_transformation(make_one, check_vma):
    batches = [make_batch(n) for n in range(3)]
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((6, *x.shape[1:]), x.dtype), batches[0])
    expected = steps(make_one(loss, make_batch(), **EXACT), None, make_params(), batches)
    mesh = Mesh(np.array(jax.devices()), ("d",))
    run = functools.partial(steps, make_one(loss, shapes, axis_name="d", **EXACT), "d")
    split = jax.shard_map(
        run, mesh=mesh, in_specs=(P(), P("d")), out_specs=P(), check_vma=check_vma
    )
    close(jax.jit(split)(make_params(), batches), expected)


def check_optimizer(**options):
    values = {} if "use_adaptive_damping" in options else VALUES
    found, state, stats = train(make(multi_device=True, **options), 6, **values)
    expected, other, history = train(make(**options), 6, **values)
    close((found, state), (expected, other))
    close(stats, history)


for check_vma in (True, False):
    check_transformation(functools.partial(curvax.scale_by_kfac, damping=0.05), check_vma)
    check_transformation(functools.partial(curvax.kfac, **VALUES), check_vma)
check_optimizer(**ADAPTIVE)
check_optimizer(use_step_rejection=True, num_burnin_steps=1, distributed_inverses=False)
