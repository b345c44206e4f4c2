"""The ground state of the hydrogen atom, by variational Monte Carlo with K-FAC.

A network is the logarithm of a wave function ψ of the electron's position. Its energy is the mean
of the local energy `E(x) = (Hψ)(x) / ψ(x)` over positions that are drawn from ψ² (by Metropolis'
algorithm). No wave function has a lower energy than the ground state, so the network is trained to
lower it. As H is self-adjoint and ψ real, the derivative of the mean energy Ē by parameters is

    dĒ = 2 mean((E(x) - Ē) d log ψ(x)),

which has no derivative of E. So the energy has a derivative rule of its own.

That rule is also where K-FAC learns of the curvature. A step is as long as it changes the state:
`mean((d log ψ)²)`, but for what changes only the norm of ψ. That is what the Fisher matrix of a
normal distribution with mean log ψ measures; registered with the variance of one half that is the
default, it is twice that. The twos cancel: but for damping and constraint, a step is one of length
learning_rate in imaginary time, from ψ to `ψ - learning_rate * (H - Ē) ψ`, as far as the network
can follow and K-FAC's blocks are exact.

At the ground state E(x) is the same everywhere: what is left of its variance says how far it is.
"""

import functools
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray

import curvax
from examples import _show

EXACT = -0.5  # hartree
WALKERS = 1024
HIDDEN = (16, 16)
STEPS = 500
DAMPING = 1e-4
MOVES = 20  # of each walker, between two steps
WARM_UP = 10  # times as many, before the first one
STRIDE = 0.8  # the standard deviation of a move along an axis, in bohr
CHUNK = 256  # walkers whose local energies are computed at once
ROUNDS = 200  # of so many moves, for the energy in the end

Params = dict[str, Any]
Walker = Float[Array, "electrons 3"]
Walkers = Float[Array, "walkers electrons 3"]


def first_guess(rng: PRNGKeyArray, hidden: tuple[int, ...] = HIDDEN) -> Params:
    """A network with random weights, around an orbital that is twice too wide."""
    keys = jax.random.split(rng, len(hidden) + 1)
    sizes = (4, *hidden)
    return {
        "decay": jnp.array(0.5),
        "hidden": [
            {"w": jax.random.normal(key, (i, o)) / i**0.5, "b": jnp.zeros(o)}
            for key, i, o in zip(keys, sizes, hidden, strict=False)
        ],
        "out": jax.random.normal(keys[-1], (hidden[-1], 1)) / hidden[-1] ** 0.5,
    }


def dense(x: Float[Array, "electrons i"], params) -> Float[Array, "electrons o"]:
    """A layer that each electron goes through."""
    w, b = params
    return x @ w + b[None]


def log_psi(params: Params, walker: Walker) -> Float[Array, ""]:
    """The logarithm of the wave function. It has the cusp that a nucleus makes, but for its slope.

    There is one electron; the network would do for any number that need not be antisymmetric.
    """
    distance = jnp.linalg.norm(walker, axis=1)
    h = jnp.concatenate([walker, distance[:, None]], axis=1)
    for layer in params["hidden"]:
        h = jnp.tanh(dense(h, (layer["w"], layer["b"])))
    return jnp.sum(h @ params["out"]) - jnp.sum(params["decay"] * distance)


log_psis = jax.vmap(log_psi, in_axes=(None, 0))


def local_energy(params: Params, walker: Walker) -> Float[Array, ""]:
    """`Hψ / ψ = -(∇² log ψ + |∇ log ψ|²) / 2 - 1 / r`."""
    flat = walker.ravel()
    slope = jax.grad(lambda x: log_psi(params, x.reshape(walker.shape)))
    second = lambda axis: jax.jvp(slope, (flat,), (axis,))[1] @ axis
    laplacian = jnp.sum(jax.vmap(second)(jnp.eye(flat.size, dtype=flat.dtype)))
    potential = -jnp.sum(1 / jnp.linalg.norm(walker, axis=1))
    return -(laplacian + jnp.sum(slope(flat) ** 2)) / 2 + potential


local_energies = curvax.chunked_vmap(local_energy, CHUNK, in_axes=(None, 0))


class Aux(NamedTuple):
    """What else there is to know of a batch of walkers."""

    local_energies: Float[Array, " walkers"]
    variance: Float[Array, ""]


@jax.custom_jvp
def energy(params: Params, rng: PRNGKeyArray, walkers: Walkers) -> tuple[Float[Array, ""], Aux]:
    """The mean local energy of walkers that were drawn from ψ²."""
    del rng  # For Hamiltonians that draw: pseudopotentials, say.
    each = local_energies(params, walkers)
    return jnp.mean(each), Aux(each, jnp.var(each))


@energy.defjvp
def _energy_jvp(primals, tangents):
    """As if walkers would follow ψ²; see above."""
    params, _, walkers = primals
    value, aux = energy(*primals)
    at_params = lambda params: log_psis(params, walkers)
    log_psi, d_log_psi = jax.jvp(at_params, (params,), (tangents[0],))
    curvax.register_normal_predictive_distribution(log_psi[:, None])
    tangent = 2 * jnp.mean(centred(aux.local_energies) * d_log_psi)
    return (value, aux), (tangent, jax.tree.map(jnp.zeros_like, aux))


def centred(energies: Float[Array, " walkers"]) -> Float[Array, " walkers"]:
    """Without their mean; the few that are far off, near the nucleus, do not count for more."""
    middle = jnp.median(energies)
    reach = 5 * jnp.mean(jnp.abs(energies - middle))
    clipped = jnp.clip(energies, middle - reach, middle + reach)
    return clipped - jnp.mean(clipped)


def value_and_grad(params: Params, rng: PRNGKeyArray, walkers: Walkers):
    """What the optimizer is given: `((energy, aux), gradient)`."""
    return jax.value_and_grad(energy, has_aux=True)(params, rng, walkers)


repeated_dense_tag = curvax.LayerTag("repeated_dense_tag", num_inputs=1, num_outputs=1)

repeated_dense = curvax.GraphPattern(
    name="repeated_dense",
    tag_primitive=repeated_dense_tag,
    compute_func=jax.vmap(dense, in_axes=(0, None)),
    parameters_extractor_func=lambda equations: {},
    example_args=[np.zeros((2, 3, 4)), [np.zeros((4, 5)), np.zeros(5)]],
)


class RepeatedDense(curvax.DenseTwoKroneckerFactored):
    """The curvature of a layer that each electron goes through."""

    def update_curvature_matrix_estimate(
        self, state, estimation_data, ema_old, ema_new, batch_size, pmap_axis_name
    ):
        (x,), (dy,) = estimation_data["inputs"], estimation_data["outputs_tangents"]
        x, dy = (a.reshape(-1, a.shape[-1]) for a in (x, dy))
        x = jnp.concatenate([x, jnp.ones_like(x[:, :1])], axis=1)
        state.inputs_factor.update(x.T @ x / len(x), ema_old, ema_new)
        state.outputs_factor.update(dy.T @ dy / batch_size, ema_old, ema_new)
        state.inputs_factor.sync(pmap_axis_name)
        state.outputs_factor.sync(pmap_axis_name)
        return state


def optimizer_of(value_and_grad_func, **options: Any) -> curvax.Optimizer:
    """K-FAC, as is usual for wave functions."""
    return curvax.Optimizer(
        value_and_grad_func,
        l2_reg=0,
        norm_constraint=1e-3,
        value_func_has_aux=True,
        value_func_has_rng=True,
        learning_rate_schedule=lambda step: 0.5 / (1 + step / 100),
        curvature_ema=0.95,
        inverse_update_period=1,
        min_damping=1e-4,
        num_burnin_steps=0,
        estimation_mode="fisher_exact",
        auto_register_kwargs={"graph_patterns": (repeated_dense, *curvax.DEFAULT_GRAPH_PATTERNS)},
        **options,
    )


@jax.jit
def walk(params: Params, rng: PRNGKeyArray, walkers: Walkers) -> tuple[Walkers, Float[Array, ""]]:
    """Where walkers are after some moves, and the share of moves that were made.

    Metropolis' algorithm: a move to where ψ² is larger is made, and others with a probability that
    is the ratio of both. Walkers that are drawn from ψ² stay so.
    """

    def move(carry, key):
        walkers, before = carry
        for_move, for_choice = jax.random.split(key)
        moved = walkers + STRIDE * jax.random.normal(for_move, walkers.shape)
        after = log_psis(params, moved)
        is_made = jnp.log(jax.random.uniform(for_choice, before.shape)) < 2 * (after - before)
        walkers = jnp.where(is_made[:, None, None], moved, walkers)
        return (walkers, jnp.where(is_made, after, before)), jnp.mean(is_made)

    begin = walkers, log_psis(params, walkers)
    (walkers, _), made = lax.scan(move, begin, jax.random.split(rng, MOVES))
    return walkers, jnp.mean(made)


class Training(NamedTuple):
    """A trained network, walkers that are drawn from it, the optimizer, and what happened."""

    params: Params
    walkers: Walkers
    optimizer: curvax.Optimizer
    stats: list[dict[str, Any]]


def train(
    rng: PRNGKeyArray,
    params: Params,
    steps: int = STEPS,
    num_walkers: int = WALKERS,
    value_and_grad_func=value_and_grad,
    **options: Any,
) -> Training:
    """Moves of walkers and steps of the optimizer, in turn; the options are the optimizer's."""
    for_walkers, for_state, for_warm_up, for_steps = jax.random.split(rng, 4)
    walkers = jax.random.normal(for_walkers, (num_walkers, 1, 3))
    for key in jax.random.split(for_warm_up, WARM_UP):
        walkers, _ = walk(params, key, walkers)
    optimizer = optimizer_of(value_and_grad_func, **options)
    with curvax.set_default_tag_to_block_ctor("repeated_dense_tag", RepeatedDense):
        state = optimizer.init(params, for_state, walkers)
    stats = []
    for for_moves, for_step in jax.random.split(for_steps, (steps, 2)):
        walkers, moved = walk(params, for_moves, walkers)
        params, state, found = optimizer.step(
            params=params, state=state, rng=for_step, batch=walkers, momentum=0, damping=DAMPING
        )
        stats.append({**found, "moved": moved})
    return Training(params, walkers, optimizer, stats)


class Measurement(NamedTuple):
    """An energy, its standard error, and the variance of the local energy."""

    energy: Float[Array, ""]
    error: Float[Array, ""]
    variance: Float[Array, ""]


@functools.partial(jax.jit, static_argnames="rounds")
def measure(
    params: Params, rng: PRNGKeyArray, walkers: Walkers, rounds: int = ROUNDS
) -> Measurement:
    """The energy of a wave function, by walkers that are drawn from it, after each of many moves.

    A walker is near to where it was a round before, but knows nothing of the others. So the
    standard error is that of the mean of all walkers, each of which counts by its own mean.
    """

    def one_round(walkers, key):
        walkers, _ = walk(params, key, walkers)
        return walkers, local_energies(params, walkers)

    _, energies = lax.scan(one_round, walkers, jax.random.split(rng, WARM_UP + rounds))
    energies = energies[WARM_UP:]
    by_walker = jnp.mean(energies, axis=0)
    error = jnp.std(by_walker, ddof=1) / len(by_walker) ** 0.5
    return Measurement(jnp.mean(energies), error, jnp.var(energies))


def run() -> None:
    begin = time.perf_counter()
    for_params, for_training, for_measure = jax.random.split(jax.random.key(0), 3)
    params = first_guess(for_params)
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    _show.text(
        f"""A network with {size} parameters is the wave function of the electron in a hydrogen
        atom. It begins anywhere, and is trained to have the lowest energy: by K-FAC, with the
        local energies of {WALKERS} walkers, which make {MOVES} moves from step to step. The
        curvature is registered in the rule for the derivative of the energy."""
    )
    trained = train(for_training, params)
    print("\n  What the optimizer found in that rule:\n")
    print(
        "\n".join(f"    {line}" for line in str(trained.optimizer.estimator.report()).splitlines())
    )

    print("\n  step    energy of the walkers [hartree]    variance    learning rate    moves made")
    for number in (0, 2, 5, 10, 20, 50, 100, 200, 300, 400, STEPS - 1):
        stats = trained.stats[number]
        variance = float(stats["aux"].variance)
        energy = f"{float(stats['loss']):.4f} ± {(variance / WALKERS) ** 0.5:.4f}"
        rate, moved = float(stats["learning_rate"]), 100 * float(stats["moved"])
        print(f"  {number:4}{energy:>24}{variance:23.5f}{rate:17.3f}{moved:12.0f} %")
    seconds = time.perf_counter() - begin

    found = measure(trained.params, for_measure, trained.walkers)
    energy, error = float(found.energy), float(found.error)
    print(f"\n  After training, {ROUNDS} rounds of moves give an energy of")
    print(f"\n    {energy:.5f} ± {error:.5f} hartree.    Exact: {EXACT} hartree.")
    print(f"\n  The local energy has a variance of {float(found.variance):.1e}; it has none where")
    print(f"  the wave function is exact. The training took {seconds:.0f} seconds, with compiling.")
    if abs(energy - EXACT) > 0.003:
        raise AssertionError(f"the energy is {energy}, and not {EXACT}")


def main() -> None:
    begin = time.perf_counter()
    run()
    print(f"\n  All this took {time.perf_counter() - begin:.0f} seconds.")


if __name__ == "__main__":
    main()
