"""The ground state of the hydrogen atom, by variational Monte Carlo with K-FAC.

A network computes the logarithm of a wave function ψ of the electron's position. Its energy is the
mean of the local energy `E(x) = (Hψ)(x) / ψ(x)` over positions that are sampled from ψ² (by the
Metropolis algorithm). No wave function has a lower energy than the ground state, so the network is
trained to minimise it. As H is self-adjoint and ψ real, the derivative of the mean energy Ē with
respect to the parameters is

    dĒ = 2 mean((E(x) - Ē) d log ψ(x)),

which does not contain the derivative of E. So the energy is a `jax.custom_jvp`.

Its rule is also where the curvature is registered. The natural length of a step is the change of
the state, `mean((d log ψ)²)` up to changes of the norm of ψ. This is the metric of the Fisher
matrix of a normal distribution with mean log ψ, times two if that is registered with the default
variance of one half. The factors of two cancel: apart from damping and norm constraint, a step is
one of length learning_rate in imaginary time, from ψ to `ψ - learning_rate * (H - Ē) ψ`, as far as
the network can represent it and K-FAC's blocks are exact.

At the ground state E(x) is constant, so its variance measures the distance from it.
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
MOVES = 20  # Metropolis moves of each walker between two steps
WARM_UP = 10  # times as many before the first step
STRIDE = 0.8  # standard deviation of a move along an axis, in bohr
CHUNK = 256  # walkers whose local energies are computed at once
ROUNDS = 200  # rounds of moves for the final energy

Params = dict[str, Any]
Walker = Float[Array, "electrons 3"]
Walkers = Float[Array, "walkers electrons 3"]


def first_guess(rng: PRNGKeyArray, hidden: tuple[int, ...] = HIDDEN) -> Params:
    """Return a network with random weights, around an orbital that is twice too wide."""
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
    """Apply a dense layer to each electron."""
    w, b = params
    return x @ w + b[None]


def log_psi(params: Params, walker: Walker) -> Float[Array, ""]:
    """Return the logarithm of the wave function. It has a cusp at the nucleus, of trainable slope.

    Here is one electron; without antisymmetry the network works for any number of them.
    """
    distance = jnp.linalg.norm(walker, axis=1)
    h = jnp.concatenate([walker, distance[:, None]], axis=1)
    for layer in params["hidden"]:
        h = jnp.tanh(dense(h, (layer["w"], layer["b"])))
    return jnp.sum(h @ params["out"]) - jnp.sum(params["decay"] * distance)


log_psis = jax.vmap(log_psi, in_axes=(None, 0))


def local_energy(params: Params, walker: Walker) -> Float[Array, ""]:
    """Return `Hψ / ψ = -(∇² log ψ + |∇ log ψ|²) / 2 - 1 / r`."""
    flat = walker.ravel()
    slope = jax.grad(lambda x: log_psi(params, x.reshape(walker.shape)))
    second = lambda axis: jax.jvp(slope, (flat,), (axis,))[1] @ axis
    laplacian = jnp.sum(jax.vmap(second)(jnp.eye(flat.size, dtype=flat.dtype)))
    potential = -jnp.sum(1 / jnp.linalg.norm(walker, axis=1))
    return -(laplacian + jnp.sum(slope(flat) ** 2)) / 2 + potential


local_energies = curvax.chunked_vmap(local_energy, CHUNK, in_axes=(None, 0))


class Aux(NamedTuple):
    """Auxiliary results for a batch of walkers."""

    local_energies: Float[Array, " walkers"]
    variance: Float[Array, ""]


@jax.custom_jvp
def energy(params: Params, rng: PRNGKeyArray, walkers: Walkers) -> tuple[Float[Array, ""], Aux]:
    """Return the mean local energy of walkers that are sampled from ψ²."""
    del rng  # For Hamiltonians that sample, such as pseudopotentials.
    each = local_energies(params, walkers)
    return jnp.mean(each), Aux(each, jnp.var(each))


@energy.defjvp
def _energy_jvp(primals, tangents):
    """Differentiate as if the walkers followed ψ²; see the module docstring."""
    params, _, walkers = primals
    value, aux = energy(*primals)
    at_params = lambda params: log_psis(params, walkers)
    log_psi, d_log_psi = jax.jvp(at_params, (params,), (tangents[0],))
    curvax.register_normal_predictive_distribution(log_psi[:, None])
    tangent = 2 * jnp.mean(centred(aux.local_energies) * d_log_psi)
    return (value, aux), (tangent, jax.tree.map(jnp.zeros_like, aux))


def centred(energies: Float[Array, " walkers"]) -> Float[Array, " walkers"]:
    """Subtract the mean, after clipping the few outliers near the nucleus."""
    middle = jnp.median(energies)
    reach = 5 * jnp.mean(jnp.abs(energies - middle))
    clipped = jnp.clip(energies, middle - reach, middle + reach)
    return clipped - jnp.mean(clipped)


def value_and_grad(params: Params, rng: PRNGKeyArray, walkers: Walkers):
    """Return `((energy, aux), gradient)`, as the optimizer expects it."""
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
    """The curvature of a layer that is applied to each electron."""

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
    """Return K-FAC with options that are usual for wave functions."""
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
    """Return the walkers after some moves, and the fraction of moves that were accepted.

    The Metropolis algorithm: a move is accepted with the probability `min(1, ratio)`, with the
    ratio of ψ² after and before. It leaves the distribution ψ² invariant.
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
    """A trained network, walkers sampled from it, the optimizer, and statistics of all steps."""

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
    """Alternate moves of walkers and steps of the optimizer, which gets the options."""
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
    """Return the energy of a wave function, by walkers sampled from it over many rounds.

    Successive positions of a walker are correlated, but walkers are independent. So the standard
    error is computed from the means of each walker over time.
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
        atom. From random weights it is trained to have the lowest energy: by K-FAC, with the
        local energies of {WALKERS} walkers, which make {MOVES} moves between steps. The
        curvature is registered in the derivative rule of the energy."""
    )
    trained = train(for_training, params)
    print("\n  The layers that the optimizer found in that rule:\n")
    print(
        "\n".join(f"    {line}" for line in str(trained.optimizer.estimator.report()).splitlines())
    )

    print("\n  step    energy of the walkers [hartree]    variance    learning rate    acceptance")
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
    print(f"\n  The local energy has a variance of {float(found.variance):.1e}; it is zero for the")
    print(f"  exact wave function. Training took {seconds:.0f} seconds, including compilation.")
    if abs(energy - EXACT) > 0.003:
        raise AssertionError(f"the energy is {energy}, and not {EXACT}")


def main() -> None:
    begin = time.perf_counter()
    run()
    print(f"\n  The example took {time.perf_counter() - begin:.0f} seconds.")


if __name__ == "__main__":
    main()
