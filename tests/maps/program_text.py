"""Print the jaxpr and the HLO of maps. Run by `test_program.py` with one device and with eight."""

import sys

import jax
import jax.numpy as jnp

import curvax
from curvax import AccumulationType

X = jnp.linspace(-1.0, 1.0, 64).reshape(16, 4)


def maps():
    for kind in AccumulationType:
        for order in ("strided", "contiguous"):
            yield curvax.micro_vmap(jnp.sin, microbatch_size=4, accumulator=kind, order=order)
    yield curvax.chunked_vmap(jnp.sin, 4)
    yield curvax.microbatch(jnp.sin, 0, 4)
    yield curvax.micro_grad(lambda w, x: jnp.sum(jnp.sin(w * x)), microbatch_size=4)


for fun in maps():
    mapped = fun if fun.__name__ != "<lambda>" else lambda x, fun=fun: fun(jnp.ones(4), x)
    traced = jax.jit(mapped).trace(X)
    sys.stdout.write(f"{traced.jaxpr}\n{traced.lower().as_text()}\n")
