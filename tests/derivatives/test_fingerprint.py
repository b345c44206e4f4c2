"""A fingerprint is the same in every process, and another one for any other computation."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from curvax.derivatives.disk.fingerprint import fingerprint

X = jnp.linspace(0.1, 1.0, 5)
ONES = jnp.ones(5)


def of(f, *inputs, consts=()):
    return fingerprint(jax.make_jaxpr(f)(*inputs), consts, inputs)


# Everything that has printed a memory address or a set, in a process of its own.
PROGRAM = """
import jax, jax.numpy as jnp
from jax import lax
from curvax.derivatives.disk.fingerprint import fingerprint

@jax.custom_vjp
def twice(x):
    return 2 * x
twice.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))

def f(x, key):
    y = jax.nn.relu(x) + jax.nn.softmax(x) + jax.scipy.special.logsumexp(x) + twice(x)
    y = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * jnp.arange(5.0)), (0, y))[1]
    y = lax.cond(y[0] > 0, jnp.sin, jnp.cos, y)
    y = jax.jit(lambda y: y @ jnp.outer(y, y))(y) + jax.random.normal(key, (5,))
    y = y + jnp.linalg.solve(jnp.eye(5) + jnp.outer(y, y), y) + y[jnp.array([1, 2, 3, 0, 0])]
    y = jax.pure_callback(lambda y: y, jax.ShapeDtypeStruct((5,), y.dtype), y)
    return jax.checkpoint(lambda y: lax.scan(lambda c, x: (jnp.sin(c) * x, c), 0.0, y)[1])(y)

x, key = jnp.linspace(0.1, 1.0, 5), jax.random.key(1)
print(fingerprint(jax.make_jaxpr(f)(x, key), [jnp.arange(3)], [x, key]))
g = lambda x: jax.jvp(lambda x: jax.nn.relu(x).sum() + jax.nn.logsumexp(x), (x,), (x,))
print(fingerprint(jax.make_jaxpr(jax.jacrev(g))(x), [], [x]))
"""


def test_it_is_the_same_in_another_process():
    def run(seed):
        environment = os.environ | {"PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    first, second = run("1"), run("2")
    assert first == second
    assert len(set(first)) == 2
    assert all(len(text) == 64 for text in first)


def test_it_is_the_same_when_the_program_is_traced_again():
    make = lambda: lambda x: jax.nn.relu(x) * np.arange(5.0)
    assert of(make(), X) == of(make(), X)


BIG = np.zeros(5000)
CHANGED = BIG.copy()
CHANGED[2500] = 1e-9  # Where the printed form has three dots.


def with_table(table):
    inside = jax.jit(lambda x: x + table.sum() + jnp.asarray(table)[7])
    return lambda x: lax.scan(lambda c, _: (inside(c) + jnp.asarray(table)[3], None), x, length=3)[
        0
    ]


PAIRS = {
    "an operation": (lambda x: jnp.sin(x), lambda x: jnp.cos(x)),
    "which variable is read": (lambda x: (x + 1) / x, lambda x: x / (x + 1)),
    "a literal": (lambda x: x * 2.0, lambda x: x * 2.5),
    "a parameter": (lambda x: jnp.cumsum(x), lambda x: lax.cumsum(x, reverse=True)),
    "a constant": (lambda x: x + np.arange(5.0), lambda x: x + np.arange(5.0)[::-1]),
    "a dropped output": (lambda x: (x, x + 1), lambda x: (x,)),
    "one element of a large constant": (
        lambda x: x + jnp.asarray(BIG)[:5],
        lambda x: x + jnp.asarray(CHANGED)[:5],
    ),
    "a constant in a nested program": (with_table(BIG), with_table(CHANGED)),
    "a branch": (
        lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
        lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.tan, x),
    ),
    "a literal in a loop's body": (
        lambda x: lax.fori_loop(0, 3, lambda _, c: c * 2.0, x),
        lambda x: lax.fori_loop(0, 3, lambda _, c: c * 3.0, x),
    ),
}


@pytest.mark.parametrize("what", PAIRS)
def test_another_program_has_another(what):
    one, other = PAIRS[what]
    assert of(one, X) == of(one, X)
    assert of(one, X) != of(other, X)


@pytest.mark.parametrize(
    "other", [X.at[3].add(1e-15), X.astype(jnp.float32), X[:4], X[None], X[:, None]]
)
def test_other_inputs_have_another(other):
    assert of(jnp.sin, X) != of(jnp.sin, other)


def test_further_constants_count_and_are_not_mistaken_for_inputs():
    program = jax.make_jaxpr(jnp.sin)(X)
    given = [([], [X]), ([ONES], [X]), ([X], [ONES]), ([X, ONES], []), ([2 * ONES], [X])]
    assert len({fingerprint(program, *arrays) for arrays in given}) == len(given)


def test_random_keys_count_by_their_bits_and_their_kind():
    f = lambda key: jax.random.bits(key, (3,))
    keys = [jax.random.key(0), jax.random.key(1), jax.random.key(0, impl="rbg")]
    assert len({of(f, key) for key in keys}) == 3
    program = jax.make_jaxpr(jnp.sin)(X)
    assert len({fingerprint(program, [key], [X]) for key in keys}) == 3


def test_arrays_of_any_dtype_and_shape_are_fine():
    arrays = [jnp.ones((0, 3)), jnp.ones((3, 0)), jnp.float16(2), jnp.ones(2, jnp.bfloat16), 1.5]
    program = jax.make_jaxpr(jnp.sin)(X)
    assert len({fingerprint(program, [x], []) for x in arrays}) == len(arrays)
    view = np.arange(12.0).reshape(3, 4).T
    assert fingerprint(program, [view], []) == fingerprint(program, [view.copy("C")], [])


def test_functions_that_call_each_other_twice_are_walked_once():
    f = jnp.sin
    for _ in range(40):
        f = (lambda g: jax.jit(lambda x: g(x) + g(x)))(f)
    assert len(of(f, X)) == 64
