"""Functions to differentiate, and what their derivatives are: a new line joins every test.

`FUNCTIONS` have any outputs and `LOSSES` are real scalars. The oracles are those of the docstrings:
`jax.jacfwd` and `jax.hessian` of the function of a flat vector.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree


class Case(NamedTuple):
    name: str
    f: Callable[[Any], Any]
    x: Any


def normal(seed: int, *shape: int, dtype: Any = jnp.float64) -> jax.Array:
    """Normal random numbers; NumPy's, for which nothing has to be compiled."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


INPUTS = normal(10, 5, 2)
LABELS = (normal(11, 5) > 0).astype(jnp.float64)


def network(p: Any) -> jax.Array:
    hidden = jnp.tanh(INPUTS @ p["up"] + jnp.broadcast_to(p["bias"], (5, 3)))
    return hidden @ p["down"]


NETWORK = {"up": normal(1, 2, 3), "bias": normal(2, 3), "down": normal(3, 3)}


def mlp_loss(p: Any) -> jax.Array:
    return jnp.mean((network(p) - LABELS) ** 2)


def oscillator(p: Any) -> jax.Array:
    """An equation of motion, step by step."""

    def step(state: Any, _: Any) -> Any:
        place, speed = state
        speed = speed - 0.1 * (p["k"] * place + p["damping"] * speed**3)
        place = place + 0.1 * speed
        return (place, speed), place

    return jax.lax.scan(step, (p["start"][0], p["start"][1]), None, length=6)[1]


OSCILLATOR = {"damping": normal(4), "k": normal(5), "start": normal(6, 2)}


def image(phases: jax.Array) -> jax.Array:
    """The light behind a lens: the squared modulus of a Fourier transform."""
    return jnp.abs(jnp.fft.fft2(jnp.exp(1j * phases.astype(jnp.complex128)))) ** 2 / phases.size


def log_likelihood(p: Any) -> jax.Array:
    weights, intercept = p
    logits = INPUTS @ weights + jnp.full(5, intercept)
    return jnp.sum(LABELS * jax.nn.log_sigmoid(logits) + (1 - LABELS) * jax.nn.log_sigmoid(-logits))


def kinks(x: jax.Array) -> jax.Array:
    return jnp.concatenate([jax.nn.relu(x) ** 2, jnp.where(x > 0, jnp.sin(x), x**3)])


def branches(x: jax.Array) -> jax.Array:
    return jax.lax.cond(x[0] > 0, lambda x: x[0] * x**3, lambda x: jnp.exp(x) * x[1], x)


def mixed(p: Any) -> Any:
    small = jnp.sin(p["single"]) * p["double"].astype(jnp.float32)[0]
    return {"single": small, "double": (p["scalar"] * p["double"], jnp.sum(p["double"] ** 3))}


MIXED = {
    "double": normal(7, 2),
    "empty": jnp.zeros((3, 0)),
    "scalar": normal(8),
    "single": normal(9, 2, 2, dtype=jnp.float32),
}


def numbers(p: Any) -> Any:
    a, (b, c) = p
    return jnp.stack([a * b, jnp.sin(b) * jnp.asarray(c), a**2]), a * b


def spectrum(x: jax.Array) -> Any:
    return {"wave": jnp.fft.fft((x**2).astype(jnp.complex128)), "real": jnp.sum(x**3)}


FUNCTIONS = [
    Case("network", network, NETWORK),
    Case("oscillator", oscillator, OSCILLATOR),
    Case("image", image, normal(12, 2, 3)),
    Case("log-likelihood", log_likelihood, (normal(13, 2), normal(14))),
    Case("kinks", kinks, normal(15, 4)),
    Case("branches", branches, normal(16, 3)),
    Case("mixed dtypes", mixed, MIXED),
    Case("numbers", numbers, (0.5, (1.5, np.float64(2.5)))),
    Case("few of many", lambda x: jnp.stack([jnp.sum(x**3), jnp.sum(jnp.sin(x))]), normal(17, 9)),
    Case("complex outputs", spectrum, normal(18, 3)),
]
REAL_FUNCTIONS = [case for case in FUNCTIONS if case.name != "complex outputs"]


def mixed_loss(p: Any) -> jax.Array:
    values = mixed(p)
    return jnp.sum(values["single"] ** 2).astype(jnp.float64) * values["double"][1]


LOSSES = [
    Case("MLP", mlp_loss, NETWORK),
    Case("oscillator", lambda p: jnp.sum(oscillator(p) ** 2), OSCILLATOR),
    Case("image", lambda phases: jnp.sum(jnp.log(1 + image(phases))), normal(12, 2, 3)),
    Case("log-likelihood", log_likelihood, (normal(13, 2), normal(14))),
    Case("kinks", lambda x: jnp.sum(kinks(x)) ** 2, normal(15, 4)),
    Case("branches", lambda x: jnp.sum(branches(x)) ** 2, normal(16, 3)),
    Case("mixed dtypes", mixed_loss, MIXED),
    Case("numbers", lambda p: p[0] ** 2 * jnp.sin(p[1][0]) * jnp.asarray(p[1][1]), FUNCTIONS[7].x),
]

BY_NAME = {case.name: case for case in FUNCTIONS}
LOSS_BY_NAME = {case.name: case for case in LOSSES}


def name_of(case: Case) -> str:
    return case.name


def flattened(f: Callable[[Any], Any], x: Any) -> tuple[Callable[[jax.Array], Any], jax.Array]:
    """The function of a flat vector, and that vector."""
    x = jax.tree.map(jnp.asarray, x)
    with jax.numpy_dtype_promotion("standard"):
        flat, _ = ravel_pytree(x)
    leaves, structure = jax.tree.flatten(x)
    ends = np.cumsum([leaf.size for leaf in leaves])

    def of_vector(vector: jax.Array) -> Any:
        parts = [
            vector[end - leaf.size : end].reshape(leaf.shape).astype(leaf.dtype)
            for leaf, end in zip(leaves, ends, strict=True)
        ]
        return f(jax.tree.unflatten(structure, parts))

    return of_vector, flat


def naive_jacobian(f: Callable[[Any], Any], x: Any) -> Any:
    of_vector, flat = flattened(f, x)
    return jax.jit(jax.jacfwd(of_vector))(flat)


def naive_hessian(f: Callable[[Any], Any], x: Any) -> jax.Array:
    of_vector, flat = flattened(f, x)
    return jax.jit(jax.hessian(of_vector))(flat)


def tolerance(x: Any) -> float:
    """Single precision anywhere is single precision at the end."""
    single = any(jnp.asarray(leaf).dtype == jnp.float32 for leaf in jax.tree.leaves(x))
    return 1e-5 if single else 1e-11
