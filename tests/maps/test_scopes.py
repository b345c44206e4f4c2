"""Profiles of maps can be read: operations are named by the map and its microbatches."""

import re

import jax
import jax.numpy as jnp
import pytest

import curvax
from helpers import mesh_of

MAPS = {
    "chunked_vmap": lambda **options: curvax.chunked_vmap(jnp.sin, 2, **options),
    "micro_vmap": lambda **options: curvax.micro_vmap(jnp.sin, microbatch_size=2, **options),
    "microbatch": lambda **options: curvax.microbatch(jnp.sin, 0, 2, **options),
    "micro_grad": lambda **options: (
        lambda x: curvax.micro_grad(
            lambda w, x: jnp.sum(jnp.sin(w * x)), microbatch_size=2, **options
        )(1.0, x)
    ),
}


def names_of(fun, *args) -> set[str]:
    """The names of operations of the compiled program."""
    return set(re.findall(r'op_name="([^"]*)"', jax.jit(fun).lower(*args).compile().as_text()))


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("devices", [None, 2])
def test_operations_are_named_by_map_and_microbatch(name, devices):
    options = {} if devices is None else {"mesh": mesh_of(devices)}
    names = names_of(MAPS[name](**options), jnp.linspace(0.0, 1.0, 8))
    sines = [each for each in names if each.endswith(("/sin", "/cos"))]
    assert sines
    assert all(re.search(rf"\b{name}\b.*\bmicrobatch\b", each) for each in sines), sines


def test_scopes_of_the_function_are_inside():
    def fun(x):
        with jax.named_scope("inner"):
            return jnp.sin(x)

    names = names_of(curvax.chunked_vmap(fun, 2), jnp.linspace(0.0, 1.0, 8))
    assert any(re.search(r"chunked_vmap\b.*microbatch\b.*inner\b.*sin", each) for each in names)
