"""Steps of kfac_jax's `OptaxPreconditioner`, taken with kfac_jax 0.0.8 and with curvax alike.

    .venv-kfac/bin/python tests/drop_in/optax_cases.py > tests/drop_in/optax_values.json

records what kfac_jax returns; `test_optax_preconditioner.py` compares.
"""

import json
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import jax
import jax.numpy as jnp

from drop_in import optimizer_cases

CASES = {
    "defaults": {"damping": 0.05},
    "l2_reg": {"damping": 0.05, "l2_reg": 0.1},
    "norm_constraint": {"damping": 0.05, "norm_constraint": 0.01},
    "inverse_update_period": {"damping": 0.05, "inverse_update_period": 3},
    "use_exact_inverses": {"damping": 0.05, "use_exact_inverses": True},
    "use_sqrt_inv": {"damping": 0.05, "use_exact_inverses": True, "use_sqrt_inv": True},
    "no decay": {"damping": 0.05},
}


def run(library, name, **options):
    """Return what the methods return in a few steps, in which parameters move."""
    params = jax.tree.map(jnp.asarray, optimizer_cases.PARAMS)
    batch = jax.tree.map(jnp.asarray, optimizer_cases.BATCH)
    loss = optimizer_cases.loss_of(library)
    preconditioner = library.OptaxPreconditioner(
        loss, estimation_mode="fisher_exact", **CASES[name], **options
    )
    key = jax.random.PRNGKey(0)
    state = preconditioner.init((params, batch), key)
    inverse = preconditioner.as_gradient_transform()
    product = preconditioner.as_gradient_transform(use_inverse=False)
    steps = []
    for _ in range(4):
        args = params, batch
        gradient = jax.grad(loss)(*args)
        flags = [
            preconditioner.should_update_estimator_curvature(state),
            preconditioner.should_update_inverse_cache(state),
            preconditioner.should_sync_estimate_curvature(state),
        ]
        weight = preconditioner.get_identity_weight(state)
        if name == "no decay":
            state = preconditioner.maybe_update_estimator_curvature(
                state, args, key, decay_old_ema=False
            )
            state = preconditioner.maybe_update_inverse_cache(state)
        else:
            state = preconditioner.maybe_update(state, args, key)
        found, _ = inverse.update(gradient, inverse.init(params), precond_state=state)
        multiplied, _ = product.update(gradient, product.init(params), precond_state=state)
        state = preconditioner.increment_count(state)
        steps.append({"flags": flags, "weight": weight, "found": found, "multiplied": multiplied})
        params = jax.tree.map(lambda x, d: x - 0.3 * d, params, found)
    return {"steps": [{k: optimizer_cases.plain(x) for k, x in s.items()} for s in steps]}


if __name__ == "__main__":
    import kfac_jax

    # Outside of pmap, kfac_jax cannot distribute.
    apart = {"distributed_inverses": False, "distributed_precon_apply": False}
    json.dump({name: run(kfac_jax, name, **apart) for name in CASES}, sys.stdout)
