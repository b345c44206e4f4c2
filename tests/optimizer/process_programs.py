"""Steps in several processes, compared with one device. Run by `test_processes.py`.

The arguments are those of `jax.distributed.initialize`, and the names of the checks to run: the
functions that begin with `check_`.
"""

import itertools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

sys.path.insert(0, str(Path(__file__).parents[1]))
from curvax.devices import agreement
from helpers import key
from optimizer.problems import ADAPTIVE, make, make_batch, make_params, train

jax.config.update("jax_enable_x64", True)
address, count, number = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
jax.distributed.initialize(address, count, number, heartbeat_timeout_seconds=10)

OPTIONS = ADAPTIVE | {"estimation_mode": "fisher_gradients"}


def whole(seed):
    return make_batch(seed % 4, 16)


def own(seed):
    """The examples of this process, as arrays of NumPy's."""
    rows = slice(number * 16 // count, (number + 1) * 16 // count)
    return jax.tree.map(lambda x: np.array(x)[rows], whole(seed))


def steps(optimizer, batches):
    """Ten steps; in between, what was reached is saved and restored."""
    params = make_params()
    state = optimizer.init(params, key(0), batches(0))
    *reached, before = train(optimizer, 5, params, state, batches=batches)
    saved = jax.tree.map(np.array, reached)
    params, state, after = train(optimizer, 5, *saved, batches=batches, first=5)
    return jax.tree.map(np.array, (params, state, [*before, *after]))


def close(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, 1e-9, 1e-11)


def check_steps():
    """Of all devices."""
    expected = steps(make(**OPTIONS), whole)
    close(steps(make(multi_device=True, **OPTIONS), own), expected)


def check_split():
    """A state that is split among processes is saved whole by each, and split again."""
    one, several = make(**OPTIONS), make(multi_device=True, shard_state=True, **OPTIONS)
    found = []
    for optimizer, batches in ((one, whole), (several, own)):
        params = make_params()
        state = optimizer.init(params, key(0), batches(0))
        params, state, _ = train(optimizer, 3, params, state, batches=batches)
        saved = jax.device_get(params), optimizer.whole_state(state)
        restored = optimizer.split_state(saved[1]) if optimizer is several else saved[1]
        params, state, _ = train(optimizer, 3, saved[0], restored, batches=batches, first=3)
        found.append((*saved, jax.device_get(params), optimizer.whole_state(state)))
    close(*found)


def check_rest():
    """Everything but steps; and a mesh with a second axis, with arrays that all processes have."""
    options = OPTIONS | {"num_burnin_steps": 2}
    one, several = make(**options), make(multi_device=True, **options)
    everything = []
    for optimizer, batches in ((one, whole), (several, own)):
        params, state, _ = steps(optimizer, batches)
        args, vectors = (params, batches(0)), [params, jax.tree.map(jnp.ones_like, make_params())]
        told = (
            optimizer.compute_loss_value(args),
            optimizer.compute_l2_quad_matrix(vectors),
            optimizer.compute_exact_quad_model(vectors, params, args),
            optimizer.compute_approx_quad_model(state, vectors, params),
            optimizer.fit(params, state, key(4), map(batches, itertools.count()), 2, None, False),
        )
        everything.append(told)
    close(*everything)
    mesh = jax.make_mesh((2, 2), ("data", "model"))
    assemble = lambda x: jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), x)
    optimizer = make(mesh=mesh, pmap_axis_name="data", **options)
    close(steps(optimizer, lambda seed: jax.tree.map(assemble, own(seed))), steps(one, whole))


def check_disagreement():
    """Processes that differ in shapes are told so, and none waits for others forever."""
    optimizer = make(multi_device=True, **ADAPTIVE)
    params = make_params()
    state = optimizer.init(params, key(0), own(0))
    different = jax.tree.map(lambda x: x[: 2 + 2 * number], own(0))
    words = r"in process 0 batch\[0\] is float64\[2, 3\], in process 1 batch\[0\] is float64\[4, 3"
    with pytest.raises(ValueError, match=words):
        optimizer.step(params, state, key(0), batch=different)
    odd = jax.tree.map(lambda x: x[:3], own(0))
    with pytest.raises(ValueError, match="among 2 devices of this process, but has 3 examples"):
        optimizer.step(params, state, key(0), batch=odd)
    agreement.SECONDS = 1
    if number == 1:  # The other does not come.
        with pytest.raises(ValueError, match="within 1 seconds not all have made this one"):
            optimizer.init(params, key(0), different)


for name in sys.argv[4:]:
    globals()[f"check_{name}"]()
    sys.stdout.write(f"{name} done\n")
