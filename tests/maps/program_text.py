"""The jaxpr and the HLO of maps, printed; run by `test_program.py` with one device."""

import sys

import jax
import jax.numpy as jnp

import curvax
from curvax import AccumulationType


def maps():
    for kind in AccumulationType:
        for order in ("strided", "contiguous"):
            yield curvax.micro_vmap(jnp.sin, microbatch_size=4, accumulator=kind, order=order)
    yield curvax.chunked_vmap(jnp.sin, 4)
    yield curvax.microbatch(jnp.sin, 0, 4)
    micro_grad = curvax.micro_grad(lambda w, x: jnp.sum(jnp.sin(w * x[0])), microbatch_size=4)
    yield lambda x: micro_grad(jnp.ones(4), x)


def program_text():
    x = jnp.linspace(-1.0, 1.0, 64).reshape(16, 4)
    traced = [jax.jit(fun).trace(x) for fun in maps()]
    return "".join(f"{each.jaxpr}\n{each.lower().as_text()}\n" for each in traced)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    assert len(jax.devices()) == 1
    sys.stdout.write(program_text())
