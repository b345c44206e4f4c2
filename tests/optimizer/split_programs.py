"""The optimizer with a state that is split. Run by `test_split_state.py` on eight devices.

The first argument is the name of a check; the others are its own.
"""

import pickle
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import curvax

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers import key
from optimizer.mesh_programs import RULES, close, mesh_of, optimizer_of, trained
from optimizer.models import MODELS

GIVEN = {"learning_rate": 0.1, "momentum": 0.5, "damping": 0.1}


def check_training(model, rules, count, kind, *flags):
    """As on one device, for some steps; flags say which inverses, and if they are staggered."""
    exact, stagger = (bool(int(flag)) for flag in flags)
    options = RULES[rules] | {"use_exact_inverses": exact, "inverse_update_period": 3}
    options |= {"stagger_inverses": stagger}
    expected = trained(optimizer_of(model, **options), model, 7)
    mesh = mesh_of(int(count), AxisType[kind])
    split = optimizer_of(model, mesh=mesh, shard_state=True, **options)
    params, state, stats = trained(split, model, 7)
    close((params, stats), (expected[0], expected[2]))
    rows = [own.factors for own in state.estimator_state.shards]
    assert rows
    for x in jax.tree.leaves(rows):
        assert x.addressable_shards[0].data.shape[0] * int(count) == x.shape[0]
    model_of = split.compute_approx_quad_model(state, [params], params)
    whole = optimizer_of(model, **options)
    _, _, batch = MODELS[model]
    whole.init(expected[0], key(0), batch(0, 8))
    close(model_of, whole.compute_approx_quad_model(expected[1], [params], params))


def deep(params, batch):
    """Eight layers of one shape, and one of another."""
    x = batch
    for w in params["hidden"]:
        x = jnp.tanh(x @ w)
    x = x @ params["out"]
    curvax.register_squared_error_loss(x, jnp.zeros_like(x))
    return jnp.mean(jnp.sum(x**2, axis=1))


def deep_params(width):
    draw = np.random.default_rng(0).standard_normal
    hidden = [jnp.asarray(draw((width, width)) / width**0.5) for _ in range(8)]
    return {"hidden": hidden, "out": jnp.asarray(draw((width, 4)))}


def check_memory():
    """What a step of eight devices needs on each: the state is a share, and so is what it makes."""
    params, batch = deep_params(64), jnp.ones((16, 64))
    held, needed = {}, {}
    for count, is_split in ((2, True), (8, False), (8, True)):
        mesh = mesh_of(count)
        options = {"shard_state": is_split, "donate_buffers": False}
        optimizer = curvax.Optimizer(jax.value_and_grad(deep), l2_reg=0.0, mesh=mesh, **options)
        own, images = jax.device_put((params, batch), NamedSharding(mesh, P()))
        state = optimizer.init(own, key(0), images)
        factors = jax.tree.leaves(state.estimator_state)
        held[count, is_split] = sum(x.addressable_shards[0].data.nbytes for x in factors)
        step = lambda *args, own=optimizer, x=images: own.step(*args, batch=x, **GIVEN)
        program = jax.jit(step).lower(own, state, key(1)).compile()
        usage = program.memory_analysis()
        needed[count, is_split] = usage.argument_size_in_bytes + usage.temp_size_in_bytes
    print("states:", held, "steps:", needed)  # noqa: T201
    assert held[2, True] < 0.55 * held[8, False]
    assert held[8, True] < 0.2 * held[8, False]
    assert needed[8, True] < 0.8 * needed[8, False]
    assert needed[8, True] < 0.8 * needed[2, True]


def check_inside(kind):
    """A step in a compiled function and in a loop of the caller's, and a state that is saved."""
    mesh = mesh_of(4, AxisType[kind])
    params, batch = deep_params(4), jnp.ones((8, 4))
    make = lambda: curvax.Optimizer(
        jax.value_and_grad(deep), l2_reg=0.0, mesh=mesh, shard_state=True, donate_buffers=False
    )
    optimizer = make()
    state = optimizer.init(params, key(0), batch)
    expected = optimizer.step(params, state, key(1), batch=batch, **GIVEN)
    # Saved as leaves, and read again by another optimizer.
    leaves, structure = jax.tree.flatten(jax.tree.map(np.asarray, state))
    other = make()
    other.init(params, key(0), batch)
    again = jax.tree.unflatten(structure, leaves)
    close(other.step(params, again, key(1), batch=batch, **GIVEN), expected)
    if kind == "Auto":
        step = jax.jit(lambda *args: optimizer.step(*args, batch=batch, **GIVEN))
        close(step(params, state, key(1)), expected)


def deep_optimizer(count, is_split=True, width=4, **others):
    """An optimizer of the deep network, and a state of it that was saved."""
    params, batch = deep_params(width), jnp.ones((8, width))
    options = {"mesh": mesh_of(count), "shard_state": is_split, "donate_buffers": False}
    made = curvax.Optimizer(jax.value_and_grad(deep), l2_reg=0.0, **options, **others)
    return made, jax.tree.map(np.asarray, made.init(params, key(0), batch))


def check_refused():
    """A state that is split otherwise is refused, with words that say how to split it again."""
    params, batch = deep_params(4), jnp.ones((8, 4))
    (split, kept), (whole, other) = deep_optimizer(8), deep_optimizer(8, is_split=False)

    def refused(words, optimizer, state):
        with pytest.raises(ValueError, match=words):
            optimizer.step(params, state, key(1), batch=batch, **GIVEN)

    refused(r"made without shard_state.* optimizer.split_state\(state\)", split, other)
    refused(r"sharded over 8 devices.* optimizer.whole_state\(state\)", whole, kept)
    for count in (1, 2, 4):
        words = rf"sharded over 8 devices, but here are {count}.* optimizer.split_state\(state\)"
        refused(words, deep_optimizer(count)[0], kept)
    with pytest.raises(ValueError, match="split_state is for shard_state=True"):
        whole.split_state(other)
    with pytest.raises(ValueError, match="Call them outside of functions that are traced"):
        jax.jit(split.whole_state)(kept)
    with pytest.raises(ValueError, match="not one of this model"):
        split.split_state(deep_optimizer(8, is_split=False, width=5)[1])
    exact = deep_optimizer(8, is_split=False, use_exact_inverses=True)[1]
    with pytest.raises(ValueError, match=r"has \['eigen'\] in its cache, where \['-1'\] is needed"):
        split.split_state(exact)
    with pytest.raises(ValueError, match=r"has \[16\] rows of factors.* got \[8, 8\]"):
        split.whole_state(deep_optimizer(8, width=5)[1])
    for is_split in (True, False):
        with pytest.raises(ValueError, match="not one of this model"):
            deep_optimizer(8, width=6)[0].whole_state(deep_optimizer(8, is_split, width=5)[1])


def check_moved(model, exact):
    """Training goes on with any number of devices, with inverses that were computed before."""
    options = RULES["fixed"] | {"use_exact_inverses": bool(int(exact)), "inverse_update_period": 3}
    _, make_params, make_batch = MODELS[model]

    def optimizer(**where):
        made = optimizer_of(model, donate_buffers=False, **options, **where)
        made.finalize(make_params(), key(0), make_batch(0, 8))
        return made

    plain = optimizer()
    split = {count: optimizer(mesh=mesh_of(count), shard_state=True) for count in (1, 2, 8)}

    def trained_by(*optimizers):
        """Parameters and the whole state after two steps of each, saved and restored between."""
        params = make_params()
        state = optimizers[0].init(params, key(0), make_batch(0, 8))
        for turn, own in enumerate(optimizers):
            if turn:
                params, state = pickle.loads(pickle.dumps(jax.device_get((params, state))))
                state = own.whole_state(state) if own is plain else own.split_state(state)
            for number in (2 * turn, 2 * turn + 1):
                batch = make_batch(number, 8)
                params, state, _ = own.step(params, state, key(number), batch=batch, **GIVEN)
        return params, own.whole_state(state)

    expected = trained_by(plain, plain, plain)
    for order in ((2, 8, None), (None, 8, 1), (8, 2, 8)):  # None is one device, without a mesh.
        params, state = trained_by(*(split.get(count, plain) for count in order))
        close(params, expected[0])
        assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(state))
        if exact == "0":  # Of eigenvectors the signs may differ.
            close(state, expected[1])


if __name__ == "__main__":
    globals()[f"check_{sys.argv[1]}"](*sys.argv[2:])
    print("programs agree")  # noqa: T201
