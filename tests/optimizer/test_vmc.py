"""Variational Monte Carlo: losses that are registered in the rule of a `jax.custom_jvp`."""

import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from examples import vmc_hydrogen as vmc
from jax.flatten_util import ravel_pytree
from scipy import stats

import curvax
from helpers import as_users_run, key

ROOT = Path(__file__).parents[2]
STATS = {
    *("step", "batch_size", "data_seen", "loss", "aux", "learning_rate", "momentum", "damping"),
    *("rho", "new_loss", "quad_model_change", "scaled_grad_norm_sq"),
}
NORMS = {"param_norm", "grad_norm", "precon_grad_norm", "update_norm"}


def walkers(count=32):
    return jax.random.normal(key(1), (count, 1, 3))


def start(params, value_and_grad, batch, **options):
    """An optimizer and its state."""
    optimizer = vmc.optimizer_of(value_and_grad, donate_buffers=False, **options)
    with curvax.set_default_tag_to_block_ctor("repeated_dense_tag", vmc.RepeatedDense):
        return optimizer, optimizer.init(params, key(2), batch)


def step(optimizer, params, state, batch):
    return optimizer.step(
        params=params, state=state, rng=key(3), batch=batch, momentum=0, damping=1e-3
    )


def after_a_step(params, value_and_grad, batch, **options):
    """Parameters, the matrix that was estimated before, and statistics."""
    optimizer, state = start(params, value_and_grad, batch, **options)
    params, state, found = step(optimizer, params, state, batch)
    return params, optimizer.estimator.to_dense_matrix(state.estimator_state), found


def fisher_matrix(log_psis, params, batch):
    """Of normal distributions with variance one half: twice the mean of products of gradients."""
    flat, unflatten = ravel_pytree(params)
    slopes = jax.jacrev(lambda flat: log_psis(unflatten(flat), batch))(flat)
    return 2 * slopes.T @ slopes / len(slopes)


def only_blocks(matrix, sizes):
    """The blocks on the diagonal, and zeros between them."""
    numbers = np.repeat(np.arange(len(sizes)), sizes)
    return np.where(numbers[:, None] == numbers[None], matrix, 0)


@pytest.fixture(scope="module")
def trained():
    params = vmc.first_guess(key(0), (6,))
    return vmc.train(key(1), params, 15, 128, include_norms_in_stats=True)


@pytest.fixture(scope="module")
def stepped():
    """Parameters and walkers, the matrix that they have, and statistics of a step."""
    params, batch = vmc.first_guess(key(4), (3,)), walkers()
    _, matrix, found = after_a_step(params, vmc.value_and_grad, batch)
    return params, batch, matrix, found


class TestHydrogen:
    def test_a_few_steps_lower_the_energy(self, trained):
        energies = np.array([found["loss"] for found in trained.stats])
        assert np.isfinite(energies).all()
        assert energies[-3:].mean() < energies[:3].mean() - 0.05
        assert energies[-3:].mean() > vmc.EXACT - 0.05

    def test_all_statistics_are_there(self, trained):
        for number, found in enumerate(trained.stats):
            assert set(found) >= STATS | NORMS
            assert found["step"] == number
            assert found["batch_size"] == 128
            assert found["data_seen"] == 128 * (number + 1)
            assert found["aux"].local_energies.shape == (128,)
            np.testing.assert_allclose(found["learning_rate"], 0.5 / (1 + number / 100), 1e-6)
            np.testing.assert_allclose(found["loss"], jnp.mean(found["aux"].local_energies), 1e-12)
            assert all(found[name] > 0 for name in NORMS)

    def test_norms_are_only_there_on_request(self, stepped):
        *_, found = stepped
        assert set(found) >= STATS
        assert not NORMS & set(found)

    def test_layers_are_found_by_the_pattern_and_by_meaning(self, trained):
        rows = {row.params: row.block for row in trained.optimizer.estimator.report().rows}
        assert rows == {
            ("['decay']",): "ScaleAndShiftDiagonal",
            ("['hidden'][0]['w']", "['hidden'][0]['b']"): "RepeatedDense",
            ("['out']",): "DenseTwoKroneckerFactored",
        }

    def test_a_measurement_has_an_error_bar(self, trained):
        found = vmc.measure(trained.params, key(3), trained.walkers, rounds=20)
        assert vmc.EXACT - 4 * found.error < found.energy < -0.4
        assert 0 < found.error < 0.02

    def test_the_rule_is_the_derivative_of_the_energy(self, monkeypatch):
        """For ψ = exp(-a r) that is known: the energy is a² / 2 - a, and r has a Gamma density."""
        monkeypatch.setattr(vmc, "centred", lambda each: each - jnp.mean(each))  # Without clipping.
        params = jax.tree.map(jnp.zeros_like, vmc.first_guess(key(0), (2,)))
        params["decay"] = jnp.array(0.8)
        count = 4000
        distance = stats.gamma.ppf((np.arange(count) + 0.5) / count, 3, scale=1 / 1.6)
        batch = jnp.asarray(distance)[:, None, None] * jnp.array([0.6, 0.0, 0.8])[None, None]
        (energy, aux), gradient = vmc.value_and_grad(params, key(0), batch)
        np.testing.assert_allclose(aux.local_energies, -0.32 - 0.2 / distance, 1e-10)
        np.testing.assert_allclose(energy, 0.8**2 / 2 - 0.8, 1e-3)
        np.testing.assert_allclose(gradient["decay"], 0.8 - 1, 1e-2)

    def test_the_exact_wave_function_stays_as_it_is(self):
        params = jax.tree.map(jnp.zeros_like, vmc.first_guess(key(0), (2,)))
        params["decay"] = jnp.array(1.0)
        (energy, aux), gradient = vmc.value_and_grad(params, key(0), walkers())
        np.testing.assert_allclose(energy, vmc.EXACT, 1e-12)
        np.testing.assert_allclose(aux.variance, 0, atol=1e-20)
        assert all(np.abs(leaf).max() < 1e-12 for leaf in jax.tree.leaves(gradient))

    @pytest.mark.slow
    def test_the_example_finds_the_ground_state(self):
        run = subprocess.run(
            [sys.executable, "-W", "error", "-m", "examples.vmc_hydrogen"],
            env=as_users_run(),
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stdout + run.stderr
        energy, error = map(float, re.findall(r"(-0\.\d+) ± (\d\.\d+) hartree", run.stdout)[0])
        assert abs(energy - vmc.EXACT) < 0.003
        assert error < 0.001


class TestCurvature:
    """It is that of what the rule registers."""

    def test_blocks_that_are_exact_equal_the_fisher_matrix(self, stepped):
        params, batch, found, _ = stepped
        expected = fisher_matrix(vmc.log_psis, params, batch)
        np.testing.assert_allclose(found[:1, :1], expected[:1, :1], 1e-10)
        np.testing.assert_allclose(found[-3:, -3:], expected[-3:, -3:], 1e-10)
        np.testing.assert_allclose(found, only_blocks(found, [1, 15, 3]))

    def test_the_user_supplied_block_is_the_product_of_its_factors(self, stepped):
        params, batch, found, _ = stepped
        ((layer,), out) = params["hidden"], params["out"]
        x = batch[:, 0]
        x = np.concatenate([x, np.linalg.norm(x, axis=1, keepdims=True)], axis=1)
        dy = (1 - np.tanh(x @ layer["w"] + layer["b"][None]) ** 2) * out.T
        with_one = np.concatenate([np.ones((len(x), 1)), x], axis=1)  # The bias comes first.
        inputs, outputs = (a.T @ a / len(a) for a in (with_one, dy))
        np.testing.assert_allclose(found[1:16, 1:16], np.kron(inputs, 2 * outputs), 1e-9, 1e-12)

    def test_with_exact_blocks_all_of_it_is(self):
        params, batch = vmc.first_guess(key(4), (3, 2)), walkers()
        _, found, _ = after_a_step(
            params,
            vmc.value_and_grad,
            batch,
            patterns_to_skip=["repeated_dense"],
            layer_tag_to_block_ctor={"dense": curvax.DenseFull},
        )
        expected = fisher_matrix(vmc.log_psis, params, batch)
        np.testing.assert_allclose(found, only_blocks(expected, [1, 15, 8, 2]), 1e-9, 1e-12)


def log_psis(params, x):
    """Of a list, without a pattern."""
    (w, b), (v,) = params
    return (jnp.tanh(x @ w + b[None]) @ v)[:, 0]


PARAMS = [
    (jax.random.normal(key(5), (3, 2)), jnp.zeros(2)),
    [jax.random.normal(key(6), (2, 1))],
]
X = jax.random.normal(key(7), (16, 3))
EXACT_BLOCKS = {"layer_tag_to_block_ctor": {"dense": curvax.DenseFull}}


def register(y):
    return curvax.register_normal_predictive_distribution(y[:, None])[:, 0]


def energy_by(tangents_of):
    """An energy whose rule gets the tangents of log ψ by a function that registers, or not."""

    @jax.custom_jvp
    def energy(params, rng, x):
        each = jnp.sum(x**2, axis=1) + log_psis(params, x) ** 2
        return jnp.mean(each), each

    @energy.defjvp
    def _(primals, tangents):
        params, _, x = primals
        value, each = energy(*primals)
        tangent = 2 * jnp.mean((each - value) * tangents_of(params, tangents[0], x))
        return (value, each), (tangent, jnp.zeros_like(each))

    return energy


def as_usual(params, d_params, x):
    """Register the value that is computed next to its tangent."""
    y, dy = jax.jvp(lambda params: log_psis(params, x), (params,), (d_params,))
    register(y)
    return dy


def compiled_tag(params, d_params, x):
    y, dy = jax.jvp(lambda params: log_psis(params, x), (params,), (d_params,))
    jax.jit(register)(y)
    return dy


def compiled_rule(params, d_params, x):
    return jax.jit(as_usual)(params, d_params, x)


def compiled_function(params, d_params, x):
    """Registered in the function that is differentiated."""

    @jax.jit
    def function(params):
        y = log_psis(params, x)
        register(y)
        return y

    return jax.jvp(function, (params,), (d_params,))[1]


def checkpointed_and_used(params, d_params, x):
    function = jax.checkpoint(lambda params: register(log_psis(params, x)))
    return jax.jvp(function, (params,), (d_params,))[1]


def checkpointed_and_unused(params, d_params, x):
    """Nothing depends on what is registered, so that nothing is left of it."""

    @jax.checkpoint
    def function(params):
        y = log_psis(params, x)
        register(y)
        return y

    return jax.jvp(function, (params,), (d_params,))[1]


def in_a_branch(params, d_params, x):
    y, dy = jax.jvp(lambda params: log_psis(params, x), (params,), (d_params,))
    jax.lax.cond(y[0] > 0, register, lambda y: y, y)
    return dy


def nowhere(params, d_params, x):
    return jax.jvp(lambda params: log_psis(params, x), (params,), (d_params,))[1]


def by_hand(energy):
    return lambda params, rng, x: jax.value_and_grad(energy, has_aux=True)(params, rng, x)


def by_vjp(energy):
    def value_and_grad(params, rng, x):
        value, pull_back, aux = jax.vjp(lambda p: energy(p, rng, x), params, has_aux=True)
        return (value, aux), pull_back(jnp.ones_like(value))[0]

    return value_and_grad


WRAPPED = {
    "by hand": by_hand,
    "by vjp": by_vjp,
    "compiled": lambda energy: jax.jit(by_hand(energy)),
    "as it is": lambda energy: jax.value_and_grad(energy, has_aux=True),
}
KEPT = (as_usual, compiled_tag, compiled_rule, compiled_function, checkpointed_and_used)
LOST = {
    "nowhere": (by_hand(energy_by(nowhere)), "registers no loss"),
    "checkpoint": (by_hand(energy_by(checkpointed_and_unused)), r"test_vmc\.py:\d+ is not in the"),
    "cond": (by_hand(energy_by(in_a_branch)), r"test_vmc\.py:\d+\) is inside `cond`"),
    "compiled energy": (
        by_hand(jax.jit(energy_by(as_usual))),
        r"test_vmc\.py:\d+ is not in the",
    ),
    "compiled energy, as it is": (
        jax.value_and_grad(jax.jit(energy_by(as_usual)), has_aux=True),
        r"test_vmc\.py:\d+ is not in the",
    ),
}


class TestRegistration:
    """Whatever is around a registration: it counts, or it is an error that it is lost."""

    def check(self, value_and_grad):
        new, found, _ = after_a_step(PARAMS, value_and_grad, X, **EXACT_BLOCKS)
        expected = only_blocks(fisher_matrix(log_psis, PARAMS, X), [8, 2])
        np.testing.assert_allclose(found, expected, 1e-9, 1e-12)
        assert jax.tree.structure(new) == jax.tree.structure(PARAMS)

    @pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
    def test_whoever_makes_the_gradient(self, wrap):
        self.check(wrap(energy_by(as_usual)))

    @pytest.mark.parametrize("tangents_of", KEPT, ids=lambda fun: fun.__name__)
    def test_wherever_in_the_rule_it_is(self, tangents_of):
        self.check(by_hand(energy_by(tangents_of)))

    @pytest.mark.parametrize("name", LOST)
    def test_one_that_is_lost_is_an_error(self, name):
        value_and_grad, message = LOST[name]
        optimizer = vmc.optimizer_of(value_and_grad)
        with pytest.raises(curvax.RegistrationError, match=message):
            optimizer.init(PARAMS, key(0), X)

    def test_it_is_also_one_if_it_was_traced_before(self):
        value_and_grad = by_hand(jax.jit(energy_by(as_usual)))
        jax.block_until_ready(value_and_grad(PARAMS, key(0), X))
        with pytest.raises(curvax.RegistrationError, match="JAX may have dropped it"):
            vmc.optimizer_of(value_and_grad).init(PARAMS, key(0), X)

    def test_one_in_the_body_of_the_energy_is_an_error(self):
        @jax.custom_jvp
        def energy(params, rng, x):
            each = register(log_psis(params, x))
            return jnp.mean(each), each

        energy.defjvp(lambda primals, tangents: (energy(*primals), energy(*primals)))
        with pytest.raises(curvax.RegistrationError, match="`energy`, which has derivatives of"):
            vmc.optimizer_of(by_hand(energy)).init(PARAMS, key(0), X)


@pytest.mark.parametrize("decay", [0.5, jnp.array(0.5)], ids=["number", "array"])
@pytest.mark.usefixtures("unchecked")
def test_a_parameter_that_began_as_a_number_does_not_compile_twice(decay):
    """Its type is weak at first, and that of the updated one is not."""
    calls = []

    def value_and_grad(params, rng, batch):
        calls.append(params)
        return vmc.value_and_grad(params, rng, batch)

    params = {**vmc.first_guess(key(0), (2,)), "decay": decay}
    optimizer, state = start(params, value_and_grad, walkers())
    counts = []
    for _ in range(3):
        params, state, _ = step(optimizer, params, state, walkers())
        counts.append(len(calls))
    assert counts[0] == counts[1] == counts[2]
