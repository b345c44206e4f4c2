"""Programs whose blocks are planned for a budget, each with what runs and what it is built of.

As a script, what a Hessian adds to the resident memory of a process, in bytes:

    python tests/derivatives/budgeted.py within 150000000
    python tests/derivatives/budgeted.py at-once
    python tests/derivatives/budgeted.py to-disk path.zarr
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import curvax


class Program(NamedTuple):
    """`run(budget)` computes within a budget, and `build(size)` is the function of a size."""

    run: Callable[[int], Any]
    build: Callable[[int], Callable[..., Any]]
    args: tuple[Any, ...]


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def of(compute: Callable[..., Any], f: Callable[..., Any], x: Any, **options: Any) -> Program:
    return Program(
        lambda budget: compute(f, x, **options, memory_budget=budget),
        lambda size: lambda x: compute(f, x, **options, batch_size=size)[0],
        (x,),
    )


def mlp_hessian() -> Program:
    data, target = normal(0, 256, 6), normal(1, 256)

    def loss(p: Any) -> jax.Array:
        return jnp.mean((jnp.tanh(data @ p["up"]) @ p["down"] - target) ** 2)

    return of(curvax.hessian, loss, {"up": normal(2, 6, 12), "down": normal(3, 12)})


def convolution_jacobian() -> Program:
    picture = normal(4, 1, 24, 24, 2)

    def features(p: Any) -> jax.Array:
        image = picture
        for kernel in p:
            image = jnp.tanh(
                jax.lax.conv_general_dilated(
                    image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
                )
            )
        return jnp.mean(image, axis=(0, 1))

    return of(
        curvax.jacobian, features, [normal(5, 3, 3, 2, 3), normal(6, 3, 3, 3, 2)], mode="forward"
    )


def ode_jacobian() -> Program:
    """Waves from some sources, at a few places."""
    sources, places = normal(7, 100, 1000), slice(None, None, 100)

    def waves(amplitudes: jax.Array) -> jax.Array:
        def step(state: Any, _: Any) -> Any:
            u, v = state
            force = jnp.roll(u, 1) - 2 * u + jnp.roll(u, -1) - 0.1 * u**3
            v = v + 0.1 * force
            return (u + 0.1 * v, v), None

        start = jnp.tanh(amplitudes @ sources)
        return jax.lax.scan(step, (start, jnp.zeros_like(start)), None, length=4)[0][0][places]

    return of(curvax.jacobian, waves, normal(8, 100), mode="forward")


def optics_jacobian() -> Program:
    """The light in a few rings behind a lens, by its aberrations."""
    modes = normal(9, 80, 32, 32)
    radius = jnp.hypot(*jnp.meshgrid(*[jnp.fft.fftfreq(32).astype(jnp.float32)] * 2))
    rings = jnp.stack([(radius >= a / 10) & (radius < (a + 1) / 10) for a in range(5)])

    def light(coefficients: jax.Array) -> jax.Array:
        phase = jnp.tensordot(coefficients, modes, 1)
        intensity = jnp.abs(jnp.fft.fft2(jax.lax.complex(jnp.cos(phase), jnp.sin(phase)))) ** 2
        return jnp.tensordot(rings.astype(jnp.float32), intensity, 2)

    return of(curvax.jacobian, light, normal(10, 80), mode="forward")


def per_example_gradients() -> Program:
    params, data = {"up": normal(11, 20, 30), "down": normal(12, 30)}, normal(13, 200, 20)
    loss = lambda p, x: jnp.sum((jnp.tanh(x @ p["up"]) @ p["down"]) ** 2)
    clip = lambda g: jax.tree.map(lambda leaf: jnp.clip(leaf, -1, 1), g)
    options = {"keep_batch_dim": False, "transform_fn": clip}
    return Program(
        lambda budget: curvax.micro_grad(loss, memory_budget=budget, **options)(params, data),
        lambda size: curvax.micro_grad(loss, microbatch_size=size, **options),
        (params, data),
    )


def log_likelihood_information() -> Program:
    data = {"input": normal(14, 400, 20), "label": jnp.sign(normal(15, 400))}

    def log_likelihood(w: jax.Array, example: Any) -> jax.Array:
        hidden = jnp.tanh(jnp.outer(example["input"], w))
        return jax.nn.log_sigmoid(example["label"] * jnp.sum(hidden))

    return of(curvax.fisher_information, log_likelihood, normal(16, 20), data=data)


PROGRAMS = {
    "MLP Hessian": mlp_hessian,
    "convolutional network": convolution_jacobian,
    "ODE by scan": ode_jacobian,
    "FFT optics": optics_jacobian,
    "per-example gradients": per_example_gradients,
    "log-likelihood": log_likelihood_information,
}


def large_hessian() -> tuple[Callable[[Any], jax.Array], jax.Array]:
    data = normal(0, 128, 32)
    loss = lambda w: jnp.sum(jnp.tanh(jnp.tanh(data @ w) @ w.T) ** 2)
    return loss, normal(1, 32, 64)


def peak() -> int:
    """The most resident memory there was, in bytes; see `memory/resident_programs.py`."""
    [kilobytes] = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(kilobytes)


def huge_hessian() -> tuple[Callable[[Any], jax.Array], jax.Array]:
    """Of 20,000 parameters: 1.6 GB."""
    data = normal(0, 8, 100)
    return lambda w: jnp.sum(jnp.tanh(data @ w) ** 2) ** 2, normal(1, 100, 200) / 10


def main(way: str, value: str = "") -> None:
    loss, x = huge_hessian() if way == "to-disk" else large_hessian()
    options: Any = {
        "within": lambda: {"memory_budget": int(value)},
        "at-once": lambda: {"nbatches": 1},
        "to-disk": lambda: {"out": value},
    }[way]()
    if way != "to-disk":  # Compilers and threads take their memory too; so does the first result.
        jax.block_until_ready(curvax.hessian(loss, x, batch_size=8)[0])
    jax.block_until_ready(x)
    before = peak()
    H, _ = curvax.hessian(loss, x, **options)
    if way != "to-disk":
        jax.block_until_ready(H)
    sys.stdout.write(f"{peak() - before}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
