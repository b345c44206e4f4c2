"""Every option with every other: sizes, checkpoints, modes, auxiliary values, disk, jit and vmap.

Combinations that contradict each other are refused, as other tests show. Some of the others are
tried by default, so that each pair of options meets; all of them are a slow test.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax
from curvax.derivatives import hessian as hessian_module
from derivatives.functions import BY_NAME, LOSS_BY_NAME, flattened, naive_hessian, tolerance
from helpers import assert_same

OPTIONS = {
    "size": [{}, {"nbatches": 3}, {"batch_size": 2}, {"memory_budget": "1MB"}],
    "checkpoint": [False, True],
    "has_aux": [False, True],
    "how": ["call", "jit", "vmap", "disk", "not compiled"],
    "progress": [False, True],
}
HESSIANS = OPTIONS | {"name": ["MLP", "oscillator", "mixed dtypes"]}
JACOBIANS = OPTIONS | {
    "name": ["network", "oscillator", "mixed dtypes"],
    "mode": ["forward", "reverse", "auto"],
}


def possible(choice):
    by_budget = "memory_budget" in choice["size"]
    return not (choice["how"] == "not compiled" and by_budget)


def combinations(options):
    """All choices; and, greedily, some of them in which each pair of values occurs."""
    every = [
        dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())
    ]
    every = [choice for choice in every if possible(choice)]
    pairs_of = lambda choice: set(
        itertools.combinations([(k, str(v)) for k, v in choice.items()], 2)
    )
    missing = set().union(*map(pairs_of, every))
    while missing:
        chosen = max(every, key=lambda choice: len(pairs_of(choice) & missing))
        missing -= pairs_of(chosen)
        every.remove(chosen)
        yield pytest.param(chosen, id=name_of(chosen))
    for choice in every:
        yield pytest.param(choice, id=name_of(choice), marks=pytest.mark.slow)


def name_of(choice):
    return "-".join(f"{key}={value}".replace(" ", "") for key, value in choice.items())


@functools.cache
def naive(kind, name):
    if kind == "hessian":
        return naive_hessian(LOSS_BY_NAME[name].f, LOSS_BY_NAME[name].x)
    f, flat = flattened(BY_NAME[name].f, BY_NAME[name].x)
    return jax.jit(jax.jacfwd(f))(flat)


def check(kind, case, choice, folder):
    options = choice["size"] | {"checkpoint": choice["checkpoint"], "progress": choice["progress"]}
    if "mode" in choice:
        options["mode"] = choice["mode"]
    if choice["how"] == "not compiled":
        options["jit"] = False
    if choice["how"] == "disk":
        options["out"] = folder / "result.zarr"
    f = case.f
    if choice["has_aux"]:
        f = lambda x: (case.f(x), {"twice": jax.tree.map(lambda leaf: 2 * leaf, x)})

    def compute(x):
        matrix, _, *aux = getattr(curvax, kind)(f, x, has_aux=choice["has_aux"], **options)
        return matrix, aux

    x = jax.tree.map(jnp.asarray, case.x)
    twice = [{"twice": jax.tree.map(lambda leaf: 2 * np.asarray(leaf), x)}]
    if choice["how"] == "vmap":
        found = jax.jit(jax.vmap(compute))(jax.tree.map(lambda leaf: leaf[None], x))
        found = jax.tree.map(lambda leaf: np.asarray(leaf)[0], found)
    else:
        found = (jax.jit(compute) if choice["how"] == "jit" else compute)(x)
    accuracy = tolerance(case.x)
    matrix = jax.tree.map(np.asarray, found[0])
    assert_same(matrix, naive(kind, case.name), accuracy, accuracy)
    assert_same(found[1], twice if choice["has_aux"] else [])


@pytest.mark.parametrize("choice", list(combinations(HESSIANS)))
def test_hessian(choice, tmp_path, monkeypatch):
    monkeypatch.setattr(hessian_module, "LEAST_COLUMNS", 2)
    check("hessian", LOSS_BY_NAME[choice["name"]], choice, tmp_path)


@pytest.mark.parametrize("choice", list(combinations(JACOBIANS)))
def test_jacobian(choice, tmp_path):
    check("jacobian", BY_NAME[choice["name"]], choice, tmp_path)
