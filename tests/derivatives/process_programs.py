"""Derivatives that several processes compute together, compared with one.

Run by `test_processes.py`:

    python tests/derivatives/process_programs.py address processes number folder check …

The checks are the functions that begin with `check_`. With one process there is no address.
"""

import functools
import re
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import curvax
from curvax.derivatives.disk import stream

jax.config.update("jax_enable_x64", True)

X = {"a": np.linspace(-1.0, 1.0, 20).reshape(10, 2), "b": np.arange(4.0)}
DATA = np.sin(np.arange(24.0 * 200)).reshape(200, 24)
BUDGET = 25_000
HEARTBEAT = 10


def loss(x):
    flat = ravel_pytree(x)[0]
    return jnp.sum(jnp.tanh(DATA @ flat) ** 3) * jnp.sum(jnp.cos(flat))


def residuals(x):
    return DATA @ jnp.sin(ravel_pytree(x)[0])


@functools.cache
def naive():
    flat, unflatten = ravel_pytree(jax.tree.map(jnp.asarray, X))
    return np.asarray(jax.jit(jax.hessian(lambda v: loss(unflatten(v))))(flat))


def mesh_of_all():
    return Mesh(np.array(jax.devices()), ("i",))


def assert_close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-12)


def check_store(folder):
    """One store for all, also without a mesh; where `x` lies does not matter."""
    mesh = mesh_of_all()
    put = lambda leaf, spec: jax.make_array_from_callback(
        leaf.shape, NamedSharding(mesh, spec), lambda index: leaf[index]
    )
    split = {"a": put(X["a"], PartitionSpec()), "b": put(X["b"], PartitionSpec("i"))}
    ways = {
        "mesh": (X, {"mesh": mesh, "batch_size": 5}),
        "default device": (X, {"nbatches": 7}),
        "split": (split, {"mesh": mesh, "batch_size": 1}),
        "budget": (X, {"mesh": mesh, "memory_budget": 10 * BUDGET}),
        "default size": (X, {"mesh": mesh}),
    }
    for name, (x, options) in ways.items():
        H, unflatten = curvax.hessian(loss, x, out=folder / name, **options)
        assert_close(H[...], naive())
        assert jax.tree.map(np.shape, unflatten(H[0])) == {"a": (10, 2), "b": (4,)}
        assert num_done(folder / name) == -(-24 // H.chunks[0]), name
    J, _, aux = curvax.jacobian(
        lambda x: (residuals(x), x["b"]), X, has_aux=True, mesh=mesh, out=folder / "J"
    )
    assert_close(J[...], jax.jit(jax.jacfwd(lambda v: DATA @ jnp.sin(v)))(ravel_pytree(X)[0]))
    np.testing.assert_array_equal(aux, X["b"])


def num_done(path):
    return len([*(path / ".curvax" / "done").iterdir()])


def check_memory(folder):
    """In memory every process has its own rows, or all of them; sizes are those of the first."""
    del folder
    mesh = mesh_of_all()
    ways = [
        {"batch_size": 2},
        {"batch_size": 2, "replicated": True},
        {"memory_budget": BUDGET * (1 + 3 * jax.process_index())},
        {"memory_budget": BUDGET, "objective": "time", "replicated": True},
    ]
    for options in ways:
        with curvax.recorded_plans() as plans:
            H, _ = curvax.hessian(loss, X, mesh=mesh, **options)
        assert H.is_fully_replicated == options.get("replicated", False)
        for shard in H.addressable_shards:
            assert_close(shard.data, naive()[shard.index])
        sys.stdout.write(f"sizes {[plan.batch_size for plan in plans]}\n")
    diagonal = curvax.hessian_diagonal(loss, X, mesh=mesh, replicated=True)
    assert_close(ravel_pytree(jax.tree.map(np.asarray, diagonal))[0], np.diagonal(naive()))


def expect(words, f, x, **options):
    """A Hessian that is refused with these words."""
    with pytest.raises((ValueError, RuntimeError, OSError), match=re.escape(words)):
        curvax.hessian(f, x, **options)


def check_disagreement(folder):
    """Whoever is wrong, all say so, and none waits for it."""
    stream.SEEN_WITHIN = 1.0
    number, mesh = jax.process_index(), mesh_of_all()
    shorter = {"a": X["a"][: 10 - number], "b": X["b"]}
    shapes = "in process 0 x['a'] is float64[10, 2], in process 1 x['a'] is float64[9, 2]"
    expect(shapes, lambda x: jnp.sum(x["a"] ** 2), shorter, mesh=mesh)
    expect(shapes, lambda x: jnp.sum(x["a"] ** 2), shorter, out=folder / "H")
    expect("fingerprint of", lambda x: (1 + number) * jnp.sum(x["b"] ** 3), X, out=folder / "H")
    spread = jax.make_array_from_callback(
        (24,), NamedSharding(mesh, PartitionSpec("i")), lambda index: np.ones(24)[index]
    )
    closing = lambda x: jnp.sum(spread * ravel_pytree(x)[0] ** 2)
    expect("f closes over an array float64[24] that is spread over", closing, X, out=folder / "H")
    (folder / "mine").write_text("")
    words = (
        "opening the store failed in process 0" if number else "mine is a file. It is not touched"
    )
    expect(words, loss, X, out=folder / "mine")
    local = folder / str(number)
    local.mkdir()
    words = (
        f"process {number} does not see it" if number else "opening the store failed in process 1"
    )
    expect(words, loss, X, out=local / "H")
    missing = folder / ("" if number == 0 else "missing") / "H"
    words = "is not an existing directory" if number else "arguments failed in process 1"
    expect(words, loss, X, out=missing)
    of_some = Mesh(np.array(jax.devices())[[0, -1]], ("i",)) if jax.process_count() > 2 else None
    if of_some is not None:
        expect("devices of the processes [0, 2], but there are 3", loss, X, mesh=of_some)


def check_alone(folder):
    """A process with a mesh of its own works by itself; the others need not know."""
    if jax.process_index() == 1:
        own = Mesh(np.array(jax.local_devices()), ("i",))
        assert_close(curvax.hessian(loss, X, mesh=own, out=folder / "alone")[0][...], naive())
        assert_close(curvax.hessian(loss, X, mesh=own, memory_budget="1MB")[0], naive())


def check_slowly(folder):
    """Blocks of one row, each of which takes a while, until something is killed or all is done."""
    compute = stream.BlockPrograms.compute

    def slow(*args):
        time.sleep(0.5)
        return compute(*args)

    stream.BlockPrograms.compute = slow
    curvax.hessian(loss, X, batch_size=1, out=folder / "killed")


def check_resumed(folder):
    before = num_done(folder / "killed")
    H, _ = curvax.hessian(loss, X, out=folder / "killed", mesh=mesh_of_all())
    assert H.chunks == (1, 24)
    assert before < num_done(folder / "killed") == 24
    assert_close(H[...], naive())


if __name__ == "__main__":
    address, count, number, folder, *checks = sys.argv[1:]
    if int(count) > 1:
        jax.distributed.initialize(
            address,
            int(count),
            int(number),
            initialization_timeout=60,
            heartbeat_timeout_seconds=HEARTBEAT,
            shutdown_timeout_seconds=HEARTBEAT,
        )
    for name in checks:
        globals()[f"check_{name}"](Path(folder))
        sys.stdout.write(f"{name} done\n")
