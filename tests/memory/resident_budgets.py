"""Prints a memory budget, and the most that calls within it add to the resident memory.

    MALLOC_MMAP_THRESHOLD_=65536 python tests/memory/resident_budgets.py eigh

The first call plans and compiles; the next are measured. So that what a call frees is given back,
and what it allocates shows, the allocator is told to map whatever is large.
"""

import ctypes
import gc
import itertools
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

import curvax


def eigh():
    budget = 20_000_000
    x = jax.random.normal(jax.random.key(0), (600, 64, 64))
    run = curvax.chunked_vmap(lambda a: jnp.linalg.eigh(a @ a.T)[0], memory_budget=budget)
    return budget, lambda: run(x)


def convolutions():
    budget = 20_000_000
    x, kernel = jnp.ones((256, 28, 28, 8)), jnp.ones((5, 5, 8, 8))

    def energy(x):
        dimensions = ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(
            x[None], kernel, (1, 1), "SAME", dimension_numbers=dimensions
        )
        return jnp.sum(jnp.tanh(y))

    run = curvax.chunked_vmap(energy, memory_budget=budget)
    return budget, lambda: run(x)


def fisher():
    budget = 30_000_000
    data = jax.random.normal(jax.random.key(0), (3000, 50))
    x = {"w": jnp.ones((50, 30)) / 50, "v": jnp.ones(30)}

    def loglike(x, d):
        return jnp.sum(jnp.tanh(d @ x["w"]) * x["v"])

    return budget, lambda: curvax.fisher_information(loglike, x, data, memory_budget=budget)[0]


def step(**options):
    budget = 20_000_000
    keys = jax.random.split(jax.random.key(0), 4)
    widths = (64, 256, 256, 32)
    params = [
        jax.random.normal(k, shape) / shape[0] ** 0.5
        for k, shape in zip(keys, itertools.pairwise(widths), strict=False)
    ]
    batch = jax.random.normal(keys[0], (8192, 64)), jax.random.normal(keys[1], (8192, 32))

    def loss(params, batch):
        x, y = batch
        for w in params[:-1]:
            x = jnp.tanh(x @ w)
        output = curvax.register_squared_error_loss(x @ params[-1], y)
        return jnp.mean(jnp.sum((output - y) ** 2, axis=1))

    optimizer = curvax.Optimizer(
        jax.value_and_grad(loss),
        l2_reg=0.0,
        num_burnin_steps=0,
        inverse_update_period=1,
        memory_budget=budget,
        momentum_schedule=lambda _: 0.9,
        **options,
    )
    reached = [params, optimizer.init(params, jax.random.key(0), batch)]
    values = {} if options else {"learning_rate": 1e-3, "damping": 1e-2}

    def run():
        *reached[:], stats = optimizer.step(*reached, jax.random.key(1), batch=batch, **values)
        return reached, stats

    return budget, run


def adaptive_step():
    return step(use_adaptive_learning_rate=True, use_adaptive_damping=True, initial_damping=1.0)


PROGRAMS = {f.__name__: f for f in (eigh, convolutions, fisher, step, adaptive_step)}


def resident(field):
    """`VmRSS`, what is resident, or `VmHWM`, the most that was; in bytes."""
    [kilobytes] = re.findall(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(kilobytes)


def added(run):
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # Resets the peak.
    before = resident("VmRSS")
    jax.block_until_ready(run())
    return resident("VmHWM") - before


def main(name):
    budget, run = PROGRAMS[name]()
    for _ in range(2):
        jax.block_until_ready(run())
    sys.stdout.write(f"{budget} {max(added(run) for _ in range(3))}\n")


if __name__ == "__main__":
    main(sys.argv[1])
