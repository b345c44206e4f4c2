"""Prints what a plan says a call will add, and what it adds to the resident memory of a process.

A process of its own, since the peak of resident memory is one number for all of its life:

    python tests/memory/resident_programs.py chain
"""

import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

import curvax


def energy(x, up, down):
    """Two products and a tanh between each: what XLA on CPU may turn into one library call."""
    return jnp.sum(jnp.tanh(jnp.tanh(x @ up) @ down) @ up)


def chain(size):
    """All at once, for the first `size` rows."""
    return lambda x, up, down: energy(x[:size], up, down)


def mapped(size):
    """Row by row, in chunks."""
    return lambda x, up, down: curvax.chunked_vmap(lambda x: energy(x, up, down), size)(x)


PROGRAMS = {"chain": chain, "map": mapped}


def peak():
    """The most resident memory there was, in bytes.

    Not `ru_maxrss` of `getrusage`: a process that another one starts begins with the peak of that.
    """
    [kilobytes] = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(kilobytes)


def main(name):
    rows, width, hidden = 8192, 64, 8192
    shapes = [(rows, width), (width, hidden), (hidden, width)]
    args = [jax.jit(lambda shape=shape: jnp.full(shape, 0.01))() for shape in shapes]
    jax.block_until_ready(args)
    plan = curvax.plan_batch_size(PROGRAMS[name], args, max_size=rows, memory_budget="200MB")
    jax.block_until_ready(jax.jit(lambda x: jnp.tanh(x @ x.T) @ x)(jnp.ones((64, 64))))
    before = peak()
    jax.block_until_ready(plan(*args))
    sys.stdout.write(f"{plan.usage.added_bytes} {peak() - before}\n")


if __name__ == "__main__":
    main(sys.argv[1])
