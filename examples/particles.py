"""Particles identified by their time of flight, learned with differential privacy.

A particle of momentum p and mass m flies at the speed β = p / √(p² + m²). So a clock at the end of
a path of known length distinguishes pions, kaons and protons, as well as its resolution allows. A
network learns this from examples under differential privacy: per-example gradients are clipped to
norm one and summed, and noise is added to the sum. `jax.vmap` computes all per-example gradients at
once; `micro_grad` computes them in microbatches.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int

from curvax import micro_grad
from examples import _show

MASSES = np.array([0.140, 0.494, 0.938], np.float32)  # GeV: pion, kaon, proton
FLIGHT = 12.0  # time of flight of light, in nanoseconds
RESOLUTION = 0.15  # nanoseconds
EXAMPLES = 10_007  # a prime: no microbatch size divides it
MICROBATCH = 256
HIDDEN = 48
STEPS = 60
NOISE = 12.0  # standard deviation, in units of the largest norm of a clipped gradient


def arrival(momentum: np.ndarray, mass: np.ndarray) -> np.ndarray:
    """Return the time of flight in nanoseconds."""
    return FLIGHT * np.sqrt(1 + (mass / momentum) ** 2)


def observe(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return momenta and measured times of random particles, and their kinds."""
    random = np.random.default_rng(seed)
    momentum = random.uniform(0.6, 4.0, count)
    kind = random.integers(0, len(MASSES), count)
    time = arrival(momentum, MASSES[kind]) + RESOLUTION * random.normal(size=count)
    return np.stack([momentum, time], axis=1).astype(np.float32), kind


def best_guess(x: np.ndarray) -> np.ndarray:
    """Return the most likely kinds, by the exact formula: on average nothing does better."""
    expected = arrival(x[:, :1], MASSES[None])
    return np.argmin(np.abs(x[:, 1:] - expected), axis=1)


def initial_network(seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(seed)
    sizes = itertools.pairwise((2, HIDDEN, HIDDEN, len(MASSES)))
    return [
        ((random.normal(size=(i, o)) / i**0.5).astype(np.float32), np.zeros(o, np.float32))
        for i, o in sizes
    ]


def scores(network, x: Float[Array, " 2"]) -> Float[Array, " kinds"]:
    h = jnp.stack([x[0] - 2.3, 2 * jnp.log(x[1] - FLIGHT + 1.0) - 1.0])
    for weights, bias in network[:-1]:
        h = jnp.tanh(h @ weights + bias)
    weights, bias = network[-1]
    return h @ weights + bias


def loss(network, x: Float[Array, " 2"], kind: Int[Array, ""]) -> Float[Array, ""]:
    return -jax.nn.log_softmax(scores(network, x))[kind]


def clip(gradient):
    length = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradient)))
    return jax.tree.map(lambda g: g / jnp.maximum(1.0, length), gradient)


def all_at_once(network, x, kind):
    """Compute the sum of clipped gradients, and per-example losses, by `jax.vmap`."""
    each = jax.vmap(jax.value_and_grad(loss), (None, 0, 0))
    values, gradients = each(network, x, kind)
    return jax.tree.map(lambda g: g.sum(0), jax.vmap(clip)(gradients)), values


def in_microbatches(network, x, kind):
    """Equal to `all_at_once`, by `micro_grad`."""
    gradient, examples = micro_grad(
        loss,
        batch_argnums=(1, 2),
        keep_batch_dim=False,
        microbatch_size=MICROBATCH,
        transform_fn=clip,
    )(network, x, kind)
    return gradient, examples.values


@jax.jit
def adam(state, gradient, seed):
    """Perform a step of Adam with the noisy mean of clipped gradients."""
    key = jax.random.key(seed)
    network, mean, square, t = state
    flat, unflatten = ravel_pytree(network)
    gradient = ravel_pytree(gradient)[0] + NOISE * jax.random.normal(key, flat.shape)
    gradient, t = gradient / EXAMPLES, t + 1
    mean = 0.8 * mean + 0.2 * gradient
    square = 0.95 * square + 0.05 * gradient**2
    rate = 0.05 * jnp.sqrt(1 - 0.95**t) / (1 - 0.8**t)
    return unflatten(flat - rate * mean / (jnp.sqrt(square) + 1e-4)), mean, square, t


def train(network, gradient_and_losses):
    """Return the trained network, and the loss at each step."""
    zeros = np.zeros(sum(leaf.size for leaf in jax.tree.leaves(network)), np.float32)
    state, losses = (network, zeros, zeros, 0), []
    for seed in range(STEPS):
        gradient, values = gradient_and_losses(state[0])
        state = adam(state, gradient, seed)
        losses.append(np.mean(values))
    return state[0], losses


def run() -> None:
    x, kind = observe(0, EXAMPLES)
    network = initial_network(1)
    size = sum(leaf.size for leaf in jax.tree.leaves(network))
    _show.text(
        f"""A clock distinguishes pions, kaons and protons of known momentum. A network with
        {size} weights learns this from {EXAMPLES} examples, with differential privacy: the
        gradient of each example is clipped to norm one, and noise is added to their sum.
        jax.vmap computes {EXAMPLES} gradients at once, micro_grad {MICROBATCH} at a time, which
        does not divide {EXAMPLES}, a prime."""
    )
    call = (network, x, kind)
    naive, naive_size = _show.compiled(all_at_once, *call)
    ours, our_size = _show.compiled(in_microbatches, *call)
    _show.memory([("the sum of clipped gradients", naive_size, our_size)], "jax.vmap", "micro_grad")
    print(f"\n  Gradients and losses agree {_show.agreement(ours(*call), naive(*call))}.")

    network, losses = train(network, lambda network: ours(network, x, kind))
    print("\n  step    " + "".join(f"{i:8}" for i in range(0, STEPS, 10)))
    print("  loss    " + "".join(f"{losses[i]:8.3f}" for i in range(0, STEPS, 10)))

    rho = STEPS / (2 * NOISE**2)
    epsilon = rho + 2 * np.sqrt(rho * np.log(1e5))
    fresh, truth = observe(2, 20_000)
    guess = np.argmax(jax.jit(jax.vmap(scores, (None, 0)))(network, fresh), axis=1)
    print(f"\n  On 20000 new particles its accuracy is {100 * np.mean(guess == truth):.1f} %.")
    best = 100 * np.mean(best_guess(fresh) == truth)
    print(f"  That of the exact formula is {best:.1f} %; on average nothing does better.")
    print(f"  With noise from a secret seed, {STEPS} such steps are differentially private")
    print(f"  with epsilon = {epsilon:.1f} at delta = 1e-5.")
