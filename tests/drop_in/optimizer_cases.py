"""Seven steps of kfac_jax's `Optimizer`, taken with kfac_jax 0.0.8 and with curvax alike.

    .venv-kfac/bin/python tests/drop_in/optimizer_cases.py > tests/drop_in/optimizer_values.json

records what kfac_jax returns, on eight virtual devices; `test_optimizer.py` compares. A case is the
options of the optimizer. The curvature is exact, so that no case depends on random numbers.
"""

import json
import os
import sys

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np

STEPS = 7
GIVEN = {"learning_rate": 0.3, "momentum": 0.8, "damping": 0.05}
RANDOM = np.random.default_rng(0)


def random(*shape):
    return RANDOM.standard_normal(shape).astype(np.float32)


PARAMS = {
    "first": {"w": 0.5 * random(3, 4), "b": 0.1 * random(4)},
    "last": {"w": 0.5 * random(4, 2), "b": 0.1 * random(2)},
}
BATCH = random(16, 3), random(16, 2)


def network(params, x, dense=lambda y, *_: y):
    """Return predictions of an MLP; `dense` registers its layers, if it has to."""
    first, last = params["first"], params["last"]
    hidden = jnp.tanh(dense(x @ first["w"] + first["b"], x, first["w"], first["b"]))
    return dense(hidden @ last["w"] + last["b"], hidden, last["w"], last["b"])


def squared_error(library, params, batch, dense=lambda y, *_: y):
    x, y = batch
    prediction = network(params, x, dense)
    library.register_squared_error_loss(prediction, y)
    return jnp.mean(jnp.sum((prediction - y) ** 2, axis=1))


def loss_of(library, *, registers_layers=False, l2_reg=0.0, has_aux=False, has_state=False):
    """Return a loss; with L2 regularisation, `aux`, or a state that counts, on request."""
    dense = library.register_dense if registers_layers else lambda y, *_: y

    def loss(params, *args):
        *state, batch = args
        value = squared_error(library, params, batch, dense)
        value += l2_reg / 2 * sum(jnp.sum(x**2) for x in jax.tree.leaves(params))
        aux = {"predictions": network(params, batch[0])[:, 0], "mean": jnp.mean(batch[0])}
        state = {"count": state[0]["count"] + 1, "mean": jnp.mean(batch[0])} if has_state else None
        if has_aux and has_state:
            return value, (state, aux)
        return (value, aux) if has_aux else (value, state) if has_state else value

    return loss


ADAPTIVE = {"use_adaptive_damping": True, "initial_damping": 1.0, "damping_adaptation_interval": 2}
BOTH = {"use_adaptive_learning_rate": True, "use_adaptive_momentum": True}
CASES = {
    "defaults": {},
    "l2_reg": {"l2_reg": 0.1},
    "l2_reg without biases": (
        BOTH | {"l2_reg": 1.0, "regularized_parameters_path_exclusions": "b,bias"}
    ),
    "norm_constraint": {"norm_constraint": 0.01},
    "use_exact_inverses": {"use_exact_inverses": True, "damping_schedule": lambda step: 0.5},
    "precon_power": {"precon_power": -0.5, "use_exact_inverses": True},
    "curvature_update_period": {"curvature_update_period": 2},
    "estimation_mode": {"estimation_mode": "ggn_exact"},
    "num_burnin_steps": {"num_burnin_steps": 3},
    "adaptive damping": ADAPTIVE,
    "adaptive everything": ADAPTIVE | BOTH,
    "include_damping_in_quad_change": ADAPTIVE | BOTH | {"include_damping_in_quad_change": True},
    "always_use_exact_qmodel_for_damping_adjustment": (
        ADAPTIVE | {"always_use_exact_qmodel_for_damping_adjustment": True}
    ),
    "precon_damping_mult": {"precon_damping_mult": 3.0},
    "precon_damping_mult, adaptive": ADAPTIVE | BOTH | {"precon_damping_mult": 3.0, "l2_reg": 0.1},
    "precon_damping_schedule": (
        ADAPTIVE | BOTH | {"precon_damping_schedule": lambda step: 0.1 / (1 + step)}
    ),
    "exact_quad_model_matrix_type": BOTH | {"exact_quad_model_matrix_type": "ggn"},
    "invalid_metric_value": ADAPTIVE | {"invalid_metric_value": -1.0},
    "use_automatic_registration": {"use_automatic_registration": False},
    "use_initial_damping_calibration": (
        ADAPTIVE | BOTH | {"use_initial_damping_calibration": True, "num_burnin_steps": 2}
    ),
    # kfac_jax scales the damping of exact inverses only, and curvax that of all.
    "norm_to_scale_identity_weight_per_block": {
        "norm_to_scale_identity_weight_per_block": "1_norm",
        "use_exact_inverses": True,
    },
    "fisher_empirical_direct": {
        "estimation_mode": "fisher_empirical_direct",
        "damping_schedule": lambda step: 5.0,
        "register_only_generic": True,
    },
    "fisher_empirical_direct_synced": {
        "estimation_mode": "fisher_empirical_direct_synced",
        "damping_schedule": lambda step: 5.0,
        "register_only_generic": True,
        "precon_power": -0.5,
        "use_exact_inverses": True,
    },
    "custom_estimator_ctor": {"custom_estimator_ctor": None},
    "learning_rate_schedule": {"learning_rate_schedule": lambda step: 0.3 / (1 + step)},
    "schedule of data_seen": {
        "learning_rate_schedule": lambda step, data_seen: 5 / (16 + data_seen)
    },
}
USUAL = {"l2_reg": 0.0, "estimation_mode": "fisher_exact", "num_burnin_steps": 0}


def given(options):
    """Return the values that a step has to be given."""
    is_free = lambda name: (
        not (options.get(f"use_adaptive_{name}") or options.get(f"{name}_schedule"))
    )
    return {name: jnp.float32(value) for name, value in GIVEN.items() if is_free(name)}


def halving_estimator(library):
    """Return a class of estimators whose products with powers are half as long."""

    class Halving(library.BlockDiagonalCurvature):
        def multiply_matpower(self, *args, **kwargs):
            product = super().multiply_matpower(*args, **kwargs)
            return jax.tree.map(lambda x: x / 2, product)

    return Halving


def run(library, name):
    """Return the parameters after all steps, and the statistics of each."""
    options = USUAL | CASES[name]
    if "custom_estimator_ctor" in options:
        options["custom_estimator_ctor"] = halving_estimator(library)
    registers = not options.get("use_automatic_registration", True)
    loss = loss_of(library, registers_layers=registers, l2_reg=options["l2_reg"])
    optimizer = library.Optimizer(jax.value_and_grad(loss), **options)
    params = jax.tree.map(jnp.asarray, PARAMS)
    batch = jax.tree.map(jnp.asarray, BATCH)
    key = jax.random.PRNGKey(0)
    state = optimizer.init(params, key, batch)
    stats = []
    for index in range(STEPS):
        values = given(options)
        batches = {"data_iterator": iter([batch] * 20)} if index == 0 else {"batch": batch}
        params, state, found = optimizer.step(params, state, key, **batches, **values)
        stats.append(found)
    return {"params": params, "stats": {key: [s[key] for s in stats] for key in stats[0]}}


def plain(tree):
    """Return a result as nested lists and numbers of six digits."""
    if isinstance(tree, dict):
        return {key: plain(x) for key, x in tree.items()}
    if isinstance(tree, list | tuple):
        return [plain(x) for x in tree]
    if tree is None:
        return None
    array = np.asarray(tree)
    if array.dtype.kind != "f":
        return array.tolist()
    return np.vectorize(lambda x: float(f"{x:.7g}"), otypes=[float])(array).tolist()


if __name__ == "__main__":
    import kfac_jax

    names = sys.argv[1:] or CASES
    json.dump({name: plain(run(kfac_jax, name)) for name in names}, sys.stdout)
