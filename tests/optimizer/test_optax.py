"""The gradient transformations: equal to the optimizer, pure, and good neighbours in a chain."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import curvax
from helpers import assert_same, mesh_of
from optimizer.problems import ADAPTIVE, VALUES, loss, make, make_batch, make_params, train

EXACT = {"estimation_mode": "ggn_exact"}


@pytest.fixture(autouse=True)
def _as_optax_needs_it():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def run(transformation, num_steps, params=None, **extra):
    params = make_params() if params is None else params
    state = transformation.init(params)

    @jax.jit
    def step(params, state, batch):
        gradient = jax.grad(loss)(params, batch)
        updates, state = transformation.update(gradient, state, params, batch=batch, **extra)
        return optax.apply_updates(params, updates), state

    for number in range(num_steps):
        params, state = step(params, state, make_batch(number % 4))
    return params, state


OPTIONS = {
    "plain": {},
    "periods": {"curvature_update_period": 2, "inverse_update_period": 3, "l2_reg": 0.01},
    "norm constraint": {"norm_constraint": 1e-3},
    "staggered": {"stagger_inverses": True, "use_exact_inverses": True},
    "rejecting": {"use_step_rejection": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_kfac_equals_the_optimizer(name):
    options = {**EXACT, **OPTIONS[name]}
    found, state = run(curvax.kfac(loss, make_batch(), **VALUES, **options), 7)
    expected, other, _ = train(make(**OPTIONS[name]), 7, **VALUES)
    assert_same(found, expected, 1e-9, 1e-10)
    assert int(state.optimizer.step_counter) == int(other.step_counter) == 7


def test_kfac_equals_the_optimizer_with_adaptive_rules():
    found, _ = run(curvax.kfac(loss, make_batch(), None, None, None, **ADAPTIVE, **EXACT), 7)
    assert_same(found, train(make(**ADAPTIVE), 7)[0], 1e-9, 1e-10)


def test_preconditioned_gradients_chain_to_the_same():
    """With constant values K-FAC is a chain: precondition, momentum, learning rate."""
    chain = optax.chain(
        curvax.scale_by_kfac(loss, make_batch(), damping=0.05, curvature_update_period=2, **EXACT),
        optax.trace(decay=0.5),
        optax.scale_by_learning_rate(0.2),
    )
    found, _ = run(chain, 7)
    assert_same(found, train(make(curvature_update_period=2), 7, **VALUES)[0], 1e-9, 1e-10)


def test_it_chains_with_clipping_schedules_weight_decay_and_masks():
    mask = {"in": {"w": True, "b": False}, "out": {"w": True, "b": False}}
    chain = optax.chain(
        optax.clip_by_global_norm(1.0),
        curvax.scale_by_kfac(loss, make_batch(), optax.constant_schedule(0.05), **EXACT),
        optax.masked(optax.add_decayed_weights(1e-2), mask),
        optax.scale_by_schedule(optax.cosine_decay_schedule(0.3, 20)),
        optax.scale(-1.0),
    )
    start = float(loss(make_params(), make_batch()))
    params, _ = run(chain, 15)
    assert float(loss(params, make_batch())) < 0.5 * start


@pytest.mark.parametrize("make_one", [curvax.scale_by_kfac, curvax.kfac])
def test_parameters_that_a_mask_hides_are_constants(make_one):
    mask = {"in": {"w": True, "b": True}, "out": {"w": True, "b": False}}
    params, batch = make_params(), make_batch()
    values = {"damping": 0.05} if make_one is curvax.scale_by_kfac else VALUES
    inner = make_one(loss, batch, example_params=params, **values, **EXACT)
    transformation = optax.masked(inner, mask)
    state = transformation.init(params)
    gradient = jax.grad(loss)(params, batch)
    with pytest.raises(ValueError, match="full_params="):
        transformation.update(gradient, state, params, batch=batch)
    found, _ = transformation.update(gradient, state, params, batch=batch, full_params=params)

    def of_rest(rest, batch):
        return loss({"in": rest["in"], "out": {"w": rest["w"], "b": params["out"]["b"]}}, batch)

    rest = {"in": params["in"], "w": params["out"]["w"]}
    plain = make_one(of_rest, batch, **values, **EXACT)
    expected, _ = plain.update(jax.grad(of_rest)(rest, batch), plain.init(rest), rest, batch=batch)
    assert_same(found["in"], expected["in"], 1e-9)
    assert_same(found["out"]["w"], expected["w"], 1e-9)
    assert_same(found["out"]["b"], gradient["out"]["b"])


def test_gradients_that_are_not_finite_become_zero():
    transformation = curvax.scale_by_kfac(loss, make_batch(), **EXACT)
    params = make_params()
    state = transformation.init(params)
    wrong = jax.tree.map(lambda x: x * jnp.nan, params)
    found, after = transformation.update(wrong, state, params, batch=make_batch())
    assert_same(found, jax.tree.map(jnp.zeros_like, params))
    assert int(after.skipped) == 1
    assert bool(after.is_stale)
    assert float(after.estimator_state.blocks_states[0].inputs_factor.weight) == 0


def test_updates_that_a_restored_state_makes_infinite_become_zero():
    transformation = curvax.scale_by_kfac(loss, make_batch(), **EXACT)
    params = make_params()
    spoil = lambda x: x * jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else x
    state = transformation.init(params)
    state = state._replace(estimator_state=jax.tree.map(spoil, state.estimator_state))
    gradient = jax.grad(loss)(params, make_batch())
    found, after = transformation.update(gradient, state, params, batch=make_batch())
    assert_same(found, jax.tree.map(jnp.zeros_like, params))
    assert int(after.skipped) == 1


def test_a_scan_of_updates_and_shapes_for_a_batch():
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), make_batch())
    transformation = curvax.kfac(loss, shapes, **VALUES, **EXACT)

    def body(carry, batch):
        params, state = carry
        gradient = jax.grad(loss)(params, batch)
        updates, state = transformation.update(gradient, state, params, batch=batch)
        return (optax.apply_updates(params, updates), state), None

    batches = jax.tree.map(lambda *xs: jnp.stack(xs), *[make_batch(n) for n in range(4)])
    params = make_params()
    carry = params, transformation.init(params)
    (found, _), _ = jax.jit(lambda c: jax.lax.scan(body, c, batches))(carry)
    assert_same(found, run(transformation, 4)[0], 1e-9, 1e-10)


def test_batch_process_func_applies_to_the_shapes_of_a_batch():
    """Here it changes the structure of the batch: `init` must trace with its result."""
    batch = make_batch()
    raw = {"batch": jax.tree.map(lambda x: 2 * x, batch)}
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), raw)
    halve = lambda raw: jax.tree.map(lambda x: x / 2, raw["batch"])
    params = make_params()
    gradient = jax.grad(loss)(params, batch)

    def updates(transformation, batch):
        return transformation.update(gradient, transformation.init(params), params, batch=batch)[0]

    found = updates(curvax.kfac(loss, shapes, **VALUES, **EXACT, batch_process_func=halve), raw)
    assert_same(found, updates(curvax.kfac(loss, batch, **VALUES, **EXACT), batch), 1e-9, 1e-10)


def test_missing_and_wrong_arguments_are_rejected():
    params, batch = make_params(), make_batch()
    gradient = jax.grad(loss)(params, batch)
    for make_one in (curvax.kfac, curvax.scale_by_kfac):
        values = VALUES if make_one is curvax.kfac else {}
        transformation = make_one(loss, batch, **values)
        state = transformation.init(params)
        with pytest.raises(ValueError, match="update needs the parameters"):
            transformation.update(gradient, state, batch=batch)
        with pytest.raises(ValueError, match="update needs the batch"):
            transformation.update(gradient, state, params)
    with pytest.raises(TypeError, match=r"not about the curvature: norm_constraint.*curvax\.kfac"):
        curvax.scale_by_kfac(loss, batch, norm_constraint=1.0)
    for name in ("kfac", "scale_by_kfac"):
        with pytest.raises(ValueError, match=rf"^curvax\.{name}: example_batch must be .*None"):
            getattr(curvax, name)(loss, None, 0.1)
    with pytest.raises(ValueError, match="give learning_rate, or use_adaptive_learning_rate"):
        curvax.kfac(loss, batch)


def test_without_optax_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "optax", None)
    with pytest.raises(ImportError, match=r"pip install 'curvax\[optax\]'"):
        curvax.kfac(loss, make_batch(), 0.1)


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


@pytest.mark.parametrize("check_vma", [True, False], ids="check_vma={}".format)
@pytest.mark.parametrize("name", ["scale_by_kfac", "kfac"])
def test_steps_under_shard_map_are_those_of_one_device(name, check_vma):
    """On two devices, each with half of the batch."""
    values = {"damping": 0.05} if name == "scale_by_kfac" else VALUES
    options = values | {"estimation_mode": "ggn_exact", "curvature_update_period": 2}
    batches = [make_batch(n) for n in range(3)]
    alone = getattr(curvax, name)(loss, batches[0], **options)
    expected = steps(alone, None, make_params(), batches)
    half = jax.tree.map(lambda x: jax.ShapeDtypeStruct((6, *x.shape[1:]), x.dtype), batches[0])
    transformation = getattr(curvax, name)(loss, half, axis_name="data", **options)
    run = functools.partial(steps, transformation, "data")
    specs = {"in_specs": (P(), P("data")), "out_specs": P()}
    mapped = jax.shard_map(run, mesh=mesh_of(2), check_vma=check_vma, **specs)
    assert_same(jax.jit(mapped)(make_params(), batches), expected, 1e-8, 1e-10)


def test_parameters_of_half_precision_stay_so():
    half = lambda tree: jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)
    params, batch = half(make_params()), half(make_batch())
    transformation = curvax.kfac(loss, batch, **VALUES, **EXACT)
    state = transformation.init(params)
    gradient = jax.grad(loss)(params, batch)
    updates, _ = transformation.update(gradient, state, params, batch=batch)
    assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype(jnp.bfloat16)}
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in jax.tree.leaves(updates))


@pytest.mark.parametrize("name", ["momentum", "damping"])
def test_a_schedule_of_an_adaptive_value_is_rejected(name):
    values = {"learning_rate": 0.1, "momentum": 0.9, "damping": 1.0, name: lambda step: 0.5}
    adaptive = {f"use_adaptive_{name}": True}
    with pytest.raises(ValueError, match="contradict each other"):
        curvax.kfac(jnp.sum, jnp.ones(2), **values, **adaptive)
