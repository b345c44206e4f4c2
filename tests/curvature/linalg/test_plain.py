"""The plain formulations, which other platforms run, give the numbers of the workarounds for CPUs.

Here they are forced. All tests of linear algebra run with them again, and some steps of K-FAC.
"""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax import lax

from curvature.linalg import test_finite, test_kronecker, test_psd, test_symmetric
from curvature.linalg.matrices import STACKS, normal, positive
from curvax import _cpu, _jax
from curvax.curvature.linalg.psd import psd_power
from optimizer import test_reference

WORKAROUNDS = [
    "all_finite",
    "one_by_one",
    "positive_inverse",
    "row_products",
    "run_if",
]


@pytest.fixture(autouse=True, scope="module")
def _plain():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_cpu, "PLAIN", frozenset({"1"}))
        jax.clear_caches()
        yield
    jax.clear_caches()


def renamed(module):
    """The tests of a module, under names of their own."""
    name = module.__name__.rpartition(".")[2]
    own = {key: value for key, value in vars(module).items() if key.startswith("test_")}
    return {f"{key}__{name}": value for key, value in own.items()}


no_eigenvalues, product = test_psd.no_eigenvalues, test_kronecker.product
for each in (test_finite, test_kronecker, test_psd, test_symmetric):
    vars().update(renamed(each))


@pytest.mark.parametrize("name", ["fixed", "adaptive, l2, exact inverses"])
def test_steps_of_kfac(name):
    test_reference.test_twenty_steps_equal_the_reference(name)


def equations(power, matrix):
    """The operations of a power of a matrix, at any depth, with their parameters."""
    program = jax.make_jaxpr(lambda x: psd_power(x, 0.1, power))(matrix)
    found = _jax.equations_inside(program)
    return [(_jax.operation_name(each), _jax.parameters(each)) for each in found]


def test_none_of_the_workarounds_is_in_the_program():
    """A program for other platforms: a Cholesky factorisation, a solution, and a `cond`."""
    names = [name for name, _ in equations(-1, jnp.asarray(positive((3, 300, 300))))]
    for wanted in ("cholesky", "triangular_solve", "cond"):
        assert names.count(wanted) == 1
    assert not {"while", "scan", "dynamic_slice", "xla_metadata_value"} & set(names)


@pytest.mark.parametrize("power", [-1, -0.5])
def test_products_of_a_power_have_the_highest_precision(power):
    """On other platforms products of float32 are less precise by default."""
    found = equations(power, jnp.asarray(positive((30, 30)), jnp.float32))
    precisions = [params["precision"] for name, params in found if name == "dot_general"]
    assert precisions
    assert set(precisions) == {(lax.Precision.HIGHEST, lax.Precision.HIGHEST)}


def test_a_condition_in_python_stays_in_python():
    assert _cpu.run_if(True, lambda x: x + 1, 1) == 2
    assert _cpu.run_if(False, lambda x: x + 1, 1) == 1


@pytest.mark.parametrize("flag", [False, True])
def test_run_if_runs_the_function_conditionally(flag):
    state = {"a": jnp.arange(3.0), "b": jnp.ones(2)}
    run = jax.jit(lambda flag, state: _cpu.run_if(flag, lambda s: s | {"a": 2 * s["a"]}, state))
    found = run(flag, state)
    np.testing.assert_array_equal(found["a"], state["a"] * (1 + flag))
    np.testing.assert_array_equal(found["b"], state["b"])


@given(stack=STACKS, rows=st.integers(1, 3))
def test_products_of_rows(stack, rows):
    x, y = normal((*stack, rows, 5)), normal((*stack, rows, 5), seed=1)
    expected = np.einsum("...i,...i->...", x, y)
    found = _cpu.row_products(jnp.asarray(x), jnp.asarray(y))
    np.testing.assert_allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize(("value", "names"), [("", []), ("1", WORKAROUNDS), ("run_if", ["run_if"])])
def test_the_environment_selects(value, names):
    code = "from curvax import _cpu; print(*(n for n in NAMES if not _cpu.is_used(n)))"
    call = [sys.executable, "-c", code.replace("NAMES", repr(WORKAROUNDS))]
    env = os.environ | {"CURVAX_PLAIN": value}
    output = subprocess.run(call, check=True, capture_output=True, text=True, env=env).stdout
    assert output.split() == names


def test_other_platforms_use_none_of_them(monkeypatch):
    monkeypatch.setattr(_cpu, "PLAIN", frozenset())
    assert all(map(_cpu.is_used, WORKAROUNDS))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert not any(map(_cpu.is_used, WORKAROUNDS))
