"""Programs written for kfac_jax train with one import changed, as if written for curvax.

Each test is a small program, written as users of kfac_jax write theirs, and the same in curvax's
own words. Both see the same batches and keys, and their losses agree step by step.
"""

import dataclasses
import functools
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvax
import curvax.kfac_jax as kfac_jax
from helpers import as_users_run

STEPS = 6
OPTIONS = {
    "l2_reg": 0.0,
    "learning_rate_schedule": lambda step: 0.1 / (1 + step / 10),
    "curvature_ema": 0.95,
    "inverse_update_period": 2,
    "num_burnin_steps": 0,
    "estimation_mode": "fisher_exact",
}


@pytest.fixture(autouse=True)
def _promotion():
    """As users run it, but in double precision, so that programs can be compared closely."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def losses(optimizer, params, batch, **hyperparameters):
    """Train for a few steps; return the loss at each of them."""
    rng = jax.random.PRNGKey(1)
    state = optimizer.init(params, rng, batch)
    found = []
    for _ in range(STEPS):
        rng, key = jax.random.split(rng)
        params, state, stats = optimizer.step(
            params, state, key, batch=batch, momentum=0.9, damping=1e-2, **hyperparameters
        )
        found.append(float(stats["loss"]))
    return found


def assert_trained_alike(theirs, ours):
    np.testing.assert_allclose(theirs, ours, rtol=1e-7)
    assert ours[-1] < ours[0]


def with_merged_rows(arrays):
    """Return arrays in which each electron of each example is a row."""
    return tuple(jax.lax.collapse(x, 0, x.ndim - 1) for x in arrays)


class TestBlockOfOnesOwn:
    """A layer at each of several electrons, found by a pattern of the program's own."""

    @staticmethod
    def start():
        """Return parameters and a batch."""
        rng = np.random.default_rng(0)
        params = {"w": rng.normal(size=(4, 5)) / 2, "b": np.zeros(5), "v": rng.normal(size=(5, 2))}
        batch = rng.normal(size=(12, 3, 4)), rng.normal(size=(12, 2))
        return jax.tree.map(jnp.array, (params, batch))

    @staticmethod
    def loss(register, params, batch):
        def network(params, x):
            return jnp.sum(jnp.tanh(x @ params["w"] + params["b"]), axis=0) @ params["v"]

        x, y = batch
        prediction = jax.vmap(network, in_axes=(None, 0))(params, x)
        register(prediction, y)
        return jnp.mean(jnp.sum((prediction - y) ** 2, axis=-1))

    def train(self, package, **options):
        loss = functools.partial(self.loss, package.register_squared_error_loss)
        optimizer = package.Optimizer(jax.value_and_grad(loss), **OPTIONS, **options)
        return losses(optimizer, *self.start())

    def test_by_a_variant_and_its_data(self):
        """With `LayerVjpData`, the layer tag of kfac_jax, and a variant of the program's own."""

        class ElectronsDense(kfac_jax.DenseTwoKroneckerFactored):
            updates = 0

            def fixed_scale(self):
                ((_, electrons, _),) = self.inputs_shapes
                return float(electrons)

            def update_curvature_matrix_estimate(
                self, state, estimation_data, ema_old, ema_new, identity_weight, batch_size
            ):
                type(self).updates += 1
                primals, tangents = estimation_data.primals, estimation_data.tangents
                merged = dataclasses.replace(
                    estimation_data,
                    primals=dataclasses.replace(primals, inputs=with_merged_rows(primals.inputs)),
                    tangents=dataclasses.replace(
                        tangents, outputs=with_merged_rows(tangents.outputs)
                    ),
                )
                num_rows = batch_size * primals.inputs[0].shape[1]
                return super().update_curvature_matrix_estimate(
                    state, merged, ema_old, ema_new, identity_weight, num_rows
                )

        dense = lambda x, params: jnp.matmul(x, params[0]) + params[1]
        pattern = kfac_jax.tag_graph_matcher.GraphPattern(
            name="electrons_dense",
            tag_primitive=kfac_jax.layers_and_loss_tags.layer_tag,
            compute_func=jax.vmap(dense, in_axes=(0, [None, None])),
            parameters_extractor_func=functools.partial(
                kfac_jax.tag_graph_matcher._dense_parameter_extractor, variant="electrons_dense"
            ),
            example_args=[np.ones((2, 3, 4)), [np.ones((4, 5)), np.ones(5)]],
        )
        patterns = (pattern, *kfac_jax.tag_graph_matcher.DEFAULT_GRAPH_PATTERNS)
        theirs = self.train(
            kfac_jax,
            auto_register_kwargs={"graph_patterns": patterns},
            layer_tag_to_block_ctor={"electrons_dense": ElectronsDense},
        )
        ours = self.train(curvax)
        assert_trained_alike(theirs, ours)
        assert ElectronsDense.updates

    def test_by_a_tag_and_a_dictionary(self):
        """As before `LayerVjpData`: a tag of the program's own, and data by name."""

        class ElectronsDense(kfac_jax.DenseTwoKroneckerFactored):
            updates = 0

            def fixed_scale(self):
                (shape,) = self.inputs_shapes
                return float(kfac_jax.utils.product(shape[1:-1]))

            def update_curvature_matrix_estimate(
                self, state, estimation_data, ema_old, ema_new, identity_weight, batch_size
            ):
                type(self).updates += 1
                names = "inputs", "outputs_tangent"
                merged = {name: with_merged_rows(estimation_data[name]) for name in names}
                return super().update_curvature_matrix_estimate(
                    state=state,
                    estimation_data={**estimation_data, **merged},
                    ema_old=ema_old,
                    ema_new=ema_new,
                    identity_weight=identity_weight,
                    batch_size=len(merged["inputs"][0]),
                )

        tag = kfac_jax.LayerTag("electrons_dense_tag", 1, 1)
        dense = lambda x, params: jnp.matmul(x, params[0]) + params[1]

        def parameters(eqns):
            return next(eqn.params for eqn in eqns if eqn.primitive.name == "dot_general")

        pattern = kfac_jax.tag_graph_matcher.GraphPattern(
            name="electrons_dense",
            tag_primitive=tag,
            compute_func=jax.vmap(dense, in_axes=[0, [None, None]]),
            parameters_extractor_func=parameters,
            example_args=[np.ones((2, 3, 4)), [np.ones((4, 5)), np.ones(5)]],
        )
        patterns = (pattern, *kfac_jax.tag_graph_matcher.DEFAULT_GRAPH_PATTERNS)
        theirs = self.train(
            kfac_jax,
            auto_register_kwargs={"graph_patterns": patterns},
            layer_tag_to_block_ctor={"electrons_dense_tag": ElectronsDense},
        )
        ours = self.train(curvax)
        assert_trained_alike(theirs, ours)
        assert ElectronsDense.updates


class TestOptaxPreconditioner:
    @staticmethod
    def start():
        """Return parameters and a batch."""
        rng = np.random.default_rng(0)
        params = {"w": np.linspace(-1, 1, 12).reshape(4, 3), "b": np.zeros(3)}
        return jax.tree.map(
            jnp.array, (params, (rng.normal(size=(10, 4)), rng.normal(size=(10, 3))))
        )

    @staticmethod
    def loss(params, batch):
        x, y = batch
        prediction = jnp.tanh(x @ params["w"] + params["b"])
        curvax.register_squared_error_loss(prediction, y)
        return jnp.mean(jnp.sum((prediction - y) ** 2, axis=-1))

    def test_equal_to_a_chain(self):
        """`apply` between a gradient and an optax optimizer, as in a hand-written training loop."""
        options = {"estimation_mode": "fisher_exact", "inverse_update_period": 2}
        precon = kfac_jax.OptaxPreconditioner(self.loss, damping=1e-2, **options)
        sgd = optax.sgd(0.1, momentum=0.9)
        params, batch = self.start()
        opt_state = sgd.init(params)
        precon_state = precon.init((params, batch), jax.random.PRNGKey(0))

        @jax.jit
        def step(params, opt_state, precon_state, rng):
            value, grads = jax.value_and_grad(self.loss)(params, batch)
            precon_state = precon.maybe_update(precon_state, (params, batch), rng)
            updates, opt_state = sgd.update(precon.apply(grads, precon_state), opt_state, params)
            precon_state = precon.increment_count(precon_state)
            return optax.apply_updates(params, updates), opt_state, precon_state, value

        theirs = []
        for i in range(STEPS):
            key = jax.random.PRNGKey(i)
            params, opt_state, precon_state, value = step(params, opt_state, precon_state, key)
            theirs.append(float(value))

        params, batch = self.start()
        chain = optax.chain(
            curvax.scale_by_kfac(self.loss, batch, damping=1e-2, **options),
            optax.sgd(0.1, momentum=0.9),
        )
        state, ours = chain.init(params), []
        for _ in range(STEPS):
            value, grads = jax.value_and_grad(self.loss)(params, batch)
            updates, state = jax.jit(chain.update)(grads, state, params, batch=batch)
            params = optax.apply_updates(params, updates)
            ours.append(float(value))
        assert_trained_alike(theirs, ours)


class TestPmap:
    def test_two_devices(self):
        """In a process with two devices; the program compares with one device by itself."""
        environment = as_users_run() | {
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
            "JAX_ENABLE_X64": "1",
        }
        program = Path(__file__).with_name("pmap_program.py")
        run = subprocess.run(
            [sys.executable, program], env=environment, capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, f"\n{run.stdout}\n{run.stderr}"
        assert run.stdout.startswith("2 devices, equal to one")


class TestVariationalMonteCarlo:
    """Two particles in a harmonic trap; their ground state has the energy 1.

    With exact inverses: the last layer has a factor of size one, to which kfac_jax adds no damping
    otherwise, and curvax does.
    """

    exact = 1.0

    @staticmethod
    def first_params():
        """Return random parameters; `phase` is used by complex wave functions alone."""
        rng = np.random.default_rng(0)
        return {
            "width": jnp.array(0.3),
            "w": jnp.array(rng.normal(size=(1, 6))),
            "b": jnp.array(rng.normal(size=6)),
            "v": jnp.array(rng.normal(size=6) / 3),
            "phase": jnp.array(rng.normal(size=6) / 3),
        }

    @staticmethod
    def log_psi(params, x):
        """Return log |ψ| and the phase of ψ at the positions of the two particles."""
        h = jnp.tanh(x[:, None] @ params["w"] + params["b"])
        magnitude = jnp.sum(h @ params["v"]) - params["width"] * jnp.sum(x**2)
        return magnitude, jnp.sum(h @ params["phase"])

    def make_value_and_grad(self, register, log_psi):
        """Return a hand-made `value_and_grad` of the energy, for a real or complex `log_psi`."""
        log_psis = jax.vmap(log_psi, in_axes=(None, 0))

        def local_energy(params, x):
            slope = jax.jacfwd(log_psi, argnums=1)
            gradient, hessian = slope(params, x), jax.jacfwd(slope, argnums=1)(params, x)
            return -(jnp.trace(hessian) + jnp.sum(gradient**2)) / 2 + jnp.sum(x**2) / 2

        @jax.custom_jvp
        def energy(params, rng, x):
            each = jax.vmap(local_energy, in_axes=(None, 0))(params, x)
            return jnp.mean(each.real), {"local_energies": each}

        @energy.defjvp
        def energy_jvp(primals, tangents):
            params, rng, x = primals
            value, aux = energy(params, rng, x)
            at = lambda params: log_psis(params, x)
            log, d_log = jax.jvp(at, (params,), (tangents[0],))
            register(log)
            centred = aux["local_energies"] - jnp.mean(aux["local_energies"])
            tangent = 2 * jnp.mean((jnp.conj(centred) * d_log).real)
            return (value, aux), (tangent, jax.tree.map(jnp.zeros_like, aux))

        def value_and_grad(params, rng, x):
            return jax.value_and_grad(energy, has_aux=True)(params, rng, x)

        @jax.jit
        def walk(params, rng, x):
            """Move the walkers by the Metropolis algorithm, which samples |ψ|²."""
            for key in jax.random.split(rng, 5):
                for_move, for_choice = jax.random.split(key)
                moved = x + jax.random.normal(for_move, x.shape)
                ratio = 2 * (log_psis(params, moved) - log_psis(params, x)).real
                is_taken = jnp.log(jax.random.uniform(for_choice, ratio.shape)) < ratio
                x = jnp.where(is_taken[:, None], moved, x)
            return x

        return value_and_grad, walk

    def energies(self, package, register, log_psi, steps=12, **options):
        value_and_grad, walk = self.make_value_and_grad(register, log_psi)
        optimizer = package.Optimizer(
            value_and_grad,
            l2_reg=0.0,
            norm_constraint=1e-2,
            value_func_has_aux=True,
            value_func_has_rng=True,
            learning_rate_schedule=lambda step: 0.5 / (1 + step / 100),
            curvature_ema=0.9,
            inverse_update_period=1,
            min_damping=1e-4,
            num_burnin_steps=0,
            register_only_generic=False,
            estimation_mode="fisher_exact",
            use_exact_inverses=True,
            multi_device=False,
            **options,
        )
        rng, params = jax.random.PRNGKey(4), self.first_params()
        x = walk(params, rng, jax.random.normal(rng, (256, 2)))
        state, found = optimizer.init(params, rng, x), []
        for key in jax.random.split(rng, steps):
            for_walk, for_step = jax.random.split(key)
            x = walk(params, for_walk, x)
            params, state, stats = optimizer.step(
                params=params, state=state, rng=for_step, batch=x, momentum=0.0, damping=1e-3
            )
            assert stats["aux"]["local_energies"].shape == (256,)
            found.append(float(stats["loss"]))
        return np.array(found)

    def assert_trained_alike(self, theirs, ours):
        np.testing.assert_allclose(theirs, ours, rtol=1e-6)
        assert ours[-3:].mean() < ours[:3].mean() - 0.05
        assert ours[-3:].mean() > self.exact - 0.05

    def test_a_loss_registered_in_the_rule_of_a_custom_jvp(self):
        """One parameter is not used; kfac_jax accepts that, and curvax on request."""
        magnitude = lambda params, x: self.log_psi(params, x)[0]
        theirs = self.energies(
            kfac_jax,
            lambda log: kfac_jax.register_normal_predictive_distribution(log[:, None]),
            magnitude,
        )
        ours = self.energies(
            curvax,
            lambda log: curvax.register_normal_predictive_distribution(log[:, None]),
            magnitude,
            auto_register_kwargs={"allow_unused_params": True},
        )
        self.assert_trained_alike(theirs, ours)

    def test_a_complex_logarithm_of_the_wave_function(self):
        """The curvature Re(O†O) is that of real and imaginary parts, as two predictions."""

        def log_psi(params, x):
            magnitude, phase = self.log_psi(params, x)
            return magnitude + 1j * phase

        parts = lambda log: jnp.stack([log.real, log.imag], axis=1)
        theirs = self.energies(
            kfac_jax,
            lambda log: kfac_jax.register_normal_predictive_distribution(log[:, None]),
            log_psi,
        )
        ours = self.energies(
            curvax,
            lambda log: curvax.register_normal_predictive_distribution(parts(log)),
            log_psi,
        )
        self.assert_trained_alike(theirs, ours)


class TestDifferences:
    """What the migration page says behaves differently."""

    @staticmethod
    def loss(params, batch):
        prediction = jnp.tanh(batch @ params)
        kfac_jax.register_squared_error_loss(prediction, jnp.ones_like(prediction))
        return jnp.mean(jnp.sum((prediction - 1) ** 2, axis=-1))

    def optimizer(self, num_burnin_steps=0):
        constant = lambda value: lambda step: value
        return kfac_jax.Optimizer(
            jax.value_and_grad(self.loss),
            l2_reg=0.0,
            learning_rate_schedule=constant(0.1),
            momentum_schedule=constant(0.9),
            damping_schedule=constant(0.01),
            num_burnin_steps=num_burnin_steps,
        )

    def step(self, optimizer, *batches):
        key, params = jax.random.PRNGKey(0), jnp.eye(3, 2)
        state = optimizer.init(params, key, batches[0])
        for batch in batches:
            params, state, stats = optimizer.step(params, state, key, batch=batch)
        return np.array(params), stats

    batch = np.linspace(-1.0, 1.0, 24).reshape(8, 3)

    def test_burn_in_without_an_iterator_uses_the_batch(self):
        params, stats = self.step(self.optimizer(num_burnin_steps=2), self.batch)
        assert np.isfinite(stats["loss"])
        assert not np.array_equal(params, np.eye(3, 2))

    def test_a_batch_that_is_not_finite_is_skipped(self):
        params, _ = self.step(self.optimizer(), self.batch * np.nan)
        np.testing.assert_array_equal(params, np.eye(3, 2))
        params, stats = self.step(self.optimizer(), self.batch * np.nan, self.batch)
        assert np.isfinite(params).all()
        assert np.isfinite(stats["loss"])
