"""State: saved, restored, carried through loops; buffers that are given away."""

import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax
from helpers import assert_same, key
from optimizer.problems import ADAPTIVE, VALUES, make, make_batch, make_params, train

RULES = {"fixed": ({}, VALUES), "adaptive": (ADAPTIVE, {})}


def through_leaves(tree, _):
    leaves, structure = jax.tree.flatten(tree)
    saved = [np.array(x) for x in leaves]
    return jax.tree.unflatten(structure, saved)


def through_pickle(tree, _):
    return pickle.loads(pickle.dumps(tree))


def through_orbax(tree, folder):
    import orbax.checkpoint as orbax

    with jax.numpy_dtype_promotion("standard"), orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "saved", tree)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "saved", tree)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("save", [through_leaves, through_pickle, through_orbax])
def test_training_goes_on_bit_for_bit_from_what_was_saved(save, tmp_path):
    make_one = lambda: make(**ADAPTIVE, estimation_mode="fisher_gradients", donate_buffers=False)
    optimizer = make_one()
    params, state, _ = train(optimizer, 3)
    expected = train(optimizer, 4, params, state, first=3)[:2]
    params, state = save((params, state), tmp_path)
    found = train(make_one(), 4, params, state, first=3)[:2]
    assert_same(found, expected, 0, 0)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("num_burnin_steps", [0, 2])
def test_steps_in_a_scan_equal_steps_in_a_loop(rule, num_burnin_steps):
    options, values = RULES[rule]
    optimizer = make(
        **options,
        num_burnin_steps=num_burnin_steps,
        curvature_update_period=2,
        inverse_update_period=3,
    )
    params, batch = make_params(), make_batch()
    state = optimizer.init(params, key(0), batch)
    keys = jnp.stack([jax.random.key_data(key(n)) for n in range(8)])

    def body(carry, data):
        params, state = carry
        rng = jax.random.wrap_key_data(data)
        params, state, stats = optimizer.step(params, state, rng, batch=batch, **values)
        return (params, state), stats["loss"]

    carry, losses = jax.jit(lambda c: jax.lax.scan(body, c, keys))((params, state))
    params, state, history = train(optimizer, 8, batches=lambda _: batch, **values)
    assert_same(carry[0], params, 1e-9, 1e-10)
    assert_same(losses, jnp.stack([stats["loss"] for stats in history]), 1e-9, 1e-10)


def test_the_state_is_frozen_but_fields_can_be_replaced():
    optimizer = make()
    state = optimizer.init(make_params(), key(0), make_batch())
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.step_counter = 3
    assert dataclasses.replace(state, step_counter=3).step_counter == 3
    assert isinstance(state, curvax.Optimizer.State)
    by_hand = curvax.Optimizer.State(
        state.velocities, state.estimator_state, state.damping, state.data_seen, state.step_counter
    )
    assert jax.tree.structure(by_hand) == jax.tree.structure(state)


def test_buffers_are_donated_unless_that_is_not_wanted():
    params = make_params()
    optimizer = make()
    state = optimizer.init(params, key(0), make_batch())
    optimizer.step(params, state, key(1), batch=make_batch(), **VALUES)
    assert all(x.is_deleted() for x in jax.tree.leaves(params))
    assert any(x.is_deleted() for x in jax.tree.leaves(state))
    params = make_params()
    optimizer = make(donate_buffers=False)
    train(optimizer, 1, params, **VALUES)
    assert not any(x.is_deleted() for x in jax.tree.leaves(params))


def test_parameters_may_share_an_array():
    params = make_params()
    params["in"]["b"] = jnp.zeros(6)
    params["out"]["w"] = params["in"]["w"][:1].T @ jnp.ones((1, 2))
    params["out"]["b"] = params["in"]["w"][0, :2] * 0
    twice = {"one": params, "other": params}

    def loss(both, batch):
        from optimizer.problems import loss

        return loss(both["one"], batch) + loss(both["other"], batch)

    optimizer = make(jax.value_and_grad(loss))
    state = optimizer.init(twice, key(0), make_batch())
    after, _, _ = optimizer.step(twice, state, key(1), batch=make_batch(), **VALUES)
    assert_same(after["one"], after["other"])


def test_the_state_keeps_its_types():
    for options, values in RULES.values():
        optimizer = make(**options, donate_buffers=False)
        params = make_params(jnp.float32)
        batch = make_batch(dtype=jnp.float32)
        state = optimizer.init(params, key(0), batch)
        after, new, _ = optimizer.step(params, state, key(1), batch=batch, **values)
        described = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)
        assert described(new) == described(state)
        assert described(after) == described(params)
