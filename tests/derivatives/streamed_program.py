"""Computes a Hessian to disk, in small blocks and slowly, until it is killed or done.

python tests/derivatives/streamed_program.py path.zarr seconds-per-block
"""

import sys
import time

import jax
import jax.numpy as jnp

import curvax
from curvax.derivatives.disk import stream

N = 24


def loss(x):
    return jnp.sum(jnp.sin(x) * jnp.roll(x, 1) ** 2) * jnp.sum(jnp.cos(x))


def slowly(compute, seconds):
    def slow(*args):
        time.sleep(seconds)
        return compute(*args)

    return slow


def main(path, seconds):
    programs = stream.BlockPrograms
    programs.compute = slowly(programs.compute, seconds)
    x = jax.block_until_ready(jnp.linspace(-1.0, 1.0, N))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    H, _ = curvax.hessian(loss, x, batch_size=1, out=path)
    sys.stdout.write(f"{H.shape}\n")


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
