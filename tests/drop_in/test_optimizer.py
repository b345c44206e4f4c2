"""`curvax.kfac_jax.optimizer` takes the steps of kfac_jax 0.0.8, as `optimizer_cases.py` recorded.

A leading axis of devices is compared with the plain spelling: one device, and the global batch.
"""

import json
import pickle
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax
from curvax.kfac_jax import optimizer, utils
from drop_in import optimizer_cases as cases

VALUES = json.loads(Path(__file__).with_name("optimizer_values.json").read_text())
LIBRARY = SimpleNamespace(
    Optimizer=optimizer.Optimizer,
    BlockDiagonalCurvature=optimizer.BlockDiagonalCurvature,
    register_squared_error_loss=curvax.register_squared_error_loss,
    register_dense=curvax.register_dense,
)


@pytest.fixture(autouse=True)
def usual_jax():
    """JAX as users of kfac_jax run it."""
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        jax.enable_x64(False),
    ):
        yield


@pytest.mark.parametrize("name", cases.CASES)
def test_seven_steps_are_those_of_kfac_jax(name):
    ours, theirs = cases.plain(cases.run(LIBRARY, name)), VALUES[name]
    for one, other in zip(
        jax.tree.leaves(ours["params"], is_leaf=is_array),
        jax.tree.leaves(theirs["params"], is_leaf=is_array),
        strict=True,
    ):
        assert difference(one, other) < 1e-3
    for key, values in theirs["stats"].items():
        if values[0] is None:
            assert ours["stats"][key] == values
            continue
        np.testing.assert_allclose(ours["stats"][key], values, rtol=1e-3, atol=1e-5, err_msg=key)


def is_array(x):
    return isinstance(x, list)


def difference(a, b):
    return np.linalg.norm(np.subtract(a, b)) / np.linalg.norm(b)


# A leading axis of devices.


@pytest.fixture(params=[2, 8])
def num_devices(request, monkeypatch):
    """Some of the eight devices, as if there were no others."""
    devices = jax.local_devices()[: request.param]
    monkeypatch.setattr(jax, "local_devices", lambda **_: devices)
    monkeypatch.setattr(jax, "local_device_count", lambda **_: len(devices))
    return len(devices)


def stacked(tree, count):
    """Split a batch into rows for devices."""
    return jax.tree.map(lambda x: jnp.reshape(x, (count, -1, *x.shape[1:])), tree)


OPTIONS = {"l2_reg": 0.1, "estimation_mode": "fisher_exact", "num_burnin_steps": 0}
FREE = {"learning_rate": 0.3, "momentum": 0.8, "damping": 0.05}


def train_stacked(loss, count, options, given, steps=7):
    """Train with a leading axis of devices."""
    kfac = optimizer.Optimizer(
        jax.value_and_grad(loss), multi_device=True, pmap_axis_name="devices", **options
    )
    params = utils.replicate_all_local_devices(cases.PARAMS)
    batch = utils.broadcast_all_local_devices(stacked(cases.BATCH, count))
    key = utils.make_different_rng_key_on_all_devices(jax.random.PRNGKey(0))
    values = utils.replicate_all_local_devices(jax.tree.map(jnp.float32, given))
    state = kfac.init(params, key, batch)
    for _ in range(steps):
        key, subkey = utils.p_split(key)
        params, state, stats = kfac.step(params, state, subkey, batch=batch, **values)
    return kfac, params, state, stats


def train_plainly(loss, options, given, steps=7):
    """Train with curvax's own optimizer on one device, with the global batch."""
    kfac = curvax.Optimizer(jax.value_and_grad(loss), **options)
    params, batch = jax.tree.map(jnp.asarray, (cases.PARAMS, cases.BATCH))
    key = jax.random.PRNGKey(0)
    state = kfac.init(params, key, batch)
    for index in range(steps):
        key = jax.random.PRNGKey(index)
        params, state, stats = kfac.step(params, state, key, batch=batch, **given)
    return params, state, stats


def assert_same(rows, expected):
    """Check that all rows are equal, to what is expected."""
    for row, x in zip(jax.tree.leaves(rows), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(row, np.broadcast_to(row[0], row.shape))
        np.testing.assert_allclose(row[0], x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "given"),
    [
        (OPTIONS, FREE),
        (OPTIONS | cases.ADAPTIVE | cases.BOTH, {}),
    ],
    ids=["given", "adaptive"],
)
def test_rows_of_devices_are_trained_as_the_global_batch(num_devices, options, given):
    loss = cases.loss_of(LIBRARY, l2_reg=options["l2_reg"])
    _, params, state, stats = train_stacked(loss, num_devices, options, given)
    expected, expected_state, expected_stats = train_plainly(loss, options, given)
    assert_same(params, expected)
    assert_same(state.velocities, expected_state.velocities)
    np.testing.assert_allclose(utils.get_first(stats["loss"]), expected_stats["loss"], rtol=1e-4)
    assert int(utils.get_first(state.data_seen)) == 7 * 16


def test_function_averages_over_the_axis_in_its_derivative_rule(num_devices):
    """A loss as in variational Monte Carlo: its JVP rule averages over devices, and registers."""

    def make(mean_over_devices):
        @jax.custom_jvp
        def loss(params, batch):
            values = jnp.sum(cases.network(params, batch[0]) ** 2, axis=1)
            return mean_over_devices(jnp.mean(values))

        @loss.defjvp
        def loss_jvp(primals, tangents):
            params, batch = primals
            network = lambda params: cases.network(params, batch[0])
            output, tangent = jax.jvp(network, (params,), (tangents[0],))
            curvax.register_normal_predictive_distribution(output)
            values = jnp.sum(output**2, axis=1)
            mean = mean_over_devices(jnp.mean(values))
            weights = values - mean
            return mean, jnp.mean(weights * jnp.sum(tangent, axis=1))

        return loss

    averaged = make(lambda x: utils.pmean_if_pmap(x, "devices"))
    bound = make(lambda x: jax.lax.pmean(x, "devices"))
    expected, _, _ = train_plainly(make(lambda x: x), OPTIONS, FREE)
    for loss in (averaged, bound):
        _, params, _, _ = train_stacked(loss, num_devices, OPTIONS, FREE)
        assert_same(params, expected)


def test_results_are_for_functions_under_pmap(num_devices):
    loss = cases.loss_of(LIBRARY)
    kfac, params, state, _ = train_stacked(loss, num_devices, OPTIONS, FREE, steps=1)
    batch = stacked(cases.BATCH, num_devices)
    mean = lambda params, batch: jax.lax.pmean(loss(params, batch), "devices")
    losses = jax.pmap(mean, axis_name="devices")(params, batch)
    first = jax.tree.map(lambda x: x[0], params)
    np.testing.assert_allclose(losses, loss(first, cases.BATCH), rtol=1e-5)
    copied = jax.pmap(lambda tree: jax.tree.map(lambda x: (1.0 * x).astype(x.dtype), tree))(state)
    key = utils.make_different_rng_key_on_all_devices(jax.random.PRNGKey(0))
    one, *_ = kfac.step(utils.copy_obj(params), copied, key, batch=batch, **FREE)
    two, *_ = kfac.step(params, state, key, batch=batch, **FREE)
    assert_same(one, jax.tree.map(lambda x: x[0], two))


def test_state_is_restored_from_a_pickle(num_devices):
    loss = cases.loss_of(LIBRARY)
    kfac, params, state, _ = train_stacked(loss, num_devices, OPTIONS, FREE, steps=2)
    batch = stacked(cases.BATCH, num_devices)
    key = utils.make_different_rng_key_on_all_devices(jax.random.PRNGKey(0))
    saved = pickle.dumps(jax.device_get((params, state)))
    expected, *_ = kfac.step(params, state, key, batch=batch, **FREE)
    other = optimizer.Optimizer(jax.value_and_grad(loss), multi_device=True, **OPTIONS)
    params, state = pickle.loads(saved)
    assert isinstance(state, optimizer.Optimizer.State)
    restored, *_ = other.step(params, state, key, batch=batch, **FREE)
    assert_same(restored, jax.tree.map(lambda x: x[0], expected))


def test_every_array_must_have_a_row_for_each_device():
    loss = cases.loss_of(LIBRARY)
    kfac = optimizer.Optimizer(jax.value_and_grad(loss), multi_device=True, **OPTIONS)
    key = utils.make_different_rng_key_on_all_devices(jax.random.PRNGKey(0))
    batch = stacked(cases.BATCH, jax.local_device_count())
    with pytest.raises(ValueError, match=r"leading axis of the 8 local devices, but params\['fir"):
        kfac.init(cases.PARAMS, key, batch)
