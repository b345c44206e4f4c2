"""A network fitted to data with a gap, and error bars on its predictions.

A network is fitted by Levenberg-Marquardt steps, which need the Gauss-Newton matrix of its
residuals. Near the best fit, the inverse of that matrix approximates the covariance of the
parameters (Laplace's approximation), and the Jacobian of the predictions turns it into error bars.
They should be wide where there is no data.

All matrices are computed within a memory budget: curvax asks the compiler how much a block of
columns needs, and chooses the largest block that fits.
"""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

import curvax
from examples import _show

WIDTH = 24
NOISE = 0.1
BUDGET = "40MB"
PRIOR = 1.0  # precision of the prior on each parameter


def observations() -> tuple[np.ndarray, np.ndarray]:
    """Return noisy samples of a wave, with none between -1 and 1.5."""
    random = np.random.default_rng(0)
    x = np.concatenate([random.uniform(-4, -1, 1000), random.uniform(1.5, 4, 1000)])
    y = np.sin(1.5 * x) + NOISE * random.normal(size=x.size)
    return x.astype(np.float32), y.astype(np.float32)


def first_guess() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(3), 3)
    return {
        "in": 2 * jax.random.normal(keys[0], (2, WIDTH)),
        "hidden": jax.random.normal(keys[1], (WIDTH + 1, WIDTH)) / WIDTH**0.5,
        "out": jax.random.normal(keys[2], (WIDTH + 1,)) / WIDTH**0.5,
    }


def predict(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Return the network's predictions at points, an array with one axis."""
    with_one = lambda h: jnp.concatenate([h, jnp.ones((*h.shape[:-1], 1))], axis=-1)
    hidden = jnp.tanh(with_one(x[:, None]) @ params["in"])
    return with_one(jnp.tanh(with_one(hidden) @ params["hidden"])) @ params["out"]


def run() -> None:
    x, y = observations()
    residuals = lambda params: (predict(params, jnp.asarray(x)) - y) / NOISE
    params = first_guess()
    flat, unflatten = ravel_pytree(params)
    loss = lambda params: 0.5 * jnp.sum(residuals(params) ** 2)
    _show.text(
        f"""A network with {flat.size} parameters is fitted to {x.size} noisy samples of a wave,
        none of them between -1 and 1.5. The computation of each matrix below may take {BUDGET},
        the matrix included."""
    )

    whole = jax.jit(jax.hessian(lambda flat: loss(unflatten(flat))))
    with curvax.recorded_plans() as plans:
        ours, _ = curvax.hessian(loss, params, memory_budget=BUDGET)
    naive_size = curvax.memory_usage(whole, flat).temp_bytes / 1e6
    our_size = plans[0].usage.temp_bytes / 1e6
    _show.memory([("the Hessian", naive_size, our_size)], "jax.hessian", "curvax.hessian")
    print(f"\n  They agree {_show.agreement(ours, whole(flat))}. The choice of the block size:\n")
    print("\n".join(f"    {line}" for line in str(plans[0]).splitlines()))

    gradient = jax.jit(jax.grad(loss))
    value = jax.jit(loss)
    damping = 1e2
    print("\n  Levenberg-Marquardt step      misfit    damping")
    for number in range(18):
        matrix, _ = curvax.gauss_newton(residuals, params, memory_budget=BUDGET)
        slope, _ = ravel_pytree(gradient(params))
        step = np.linalg.solve(matrix + (PRIOR + damping) * np.eye(flat.size), -np.asarray(slope))
        moved = jax.tree.map(jnp.add, params, unflatten(jnp.asarray(step, jnp.float32)))
        better = bool(value(moved) < value(params))
        params, damping = (moved, damping / 3) if better else (params, damping * 4)
        if number % 6 == 5:
            print(f"  {number + 1:24}{float(value(params)) / x.size:12.4f}{damping:11.1e}")
    print("  (the noise alone accounts for a misfit of 0.5)")

    matrix, _ = curvax.gauss_newton(residuals, params, memory_budget=BUDGET)
    points = np.linspace(-4, 4, 33, dtype=np.float32)
    jacobian, _ = curvax.jacobian(
        lambda params: predict(params, jnp.asarray(points)), params, memory_budget=BUDGET
    )
    precision = np.asarray(matrix, float) + PRIOR * np.eye(flat.size)
    variance = np.sum(jacobian * np.linalg.solve(precision, np.asarray(jacobian).T).T, axis=1)
    print("\n  at       fitted    truth    error bar")
    for at, fitted, bar in zip(points, predict(params, jnp.asarray(points)), variance, strict=True):
        bar = float(np.sqrt(bar))
        length = min(44, round(44 * bar / 4))
        print(f"  {at:5.2f} {fitted:9.2f} {np.sin(1.5 * at):8.2f} {bar:10.3f}  {'#' * length}")

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "hessian.zarr"
        stored, _ = curvax.hessian(loss, params, out=path, memory_budget="20MB")
        in_memory, _ = curvax.hessian(loss, params, memory_budget=BUDGET)
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) / 1e6
        same = _show.agreement(stored[:], in_memory)
        print(f"\n  The Hessian on disk, in blocks of {stored.chunks[0]} rows: {size:.1f} MB.")
        print(f"  It agrees {same} with the one in memory.")
