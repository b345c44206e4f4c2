"""`memory_usage` reports what the compiler does, and what a process then really allocates."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from curvax import MemoryUsage, _jax, memory_usage
from curvax.memory.usage import Program
from helpers import as_users_run, assert_same, num_bytes

pytestmark = pytest.mark.optimised

F64 = 8
ROWS, COLUMNS = 300, 200
MATRIX = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float64)
VECTOR = jax.ShapeDtypeStruct((COLUMNS,), jnp.float64)


def apply(a, x):
    return jnp.sort(jnp.sin(a @ x))


def account(fun, *args):
    """As JAX itself has it, of a program compiled with the same option."""
    lowered = jax.jit(fun).lower(*args)
    return lowered.compile(_jax.exact_memory_options("cpu")).memory_analysis()


def like(x):
    return np.full(x.shape, 0.5)


class TestPlainPrograms:
    def test_it_is_the_account_of_the_compiled_program(self):
        fun = lambda a, x: jnp.sin(a @ a.T) @ (a @ x)
        told, expected = memory_usage(fun, MATRIX, VECTOR), account(fun, MATRIX, VECTOR)
        assert told.argument_bytes == expected.argument_size_in_bytes
        assert told.output_bytes == expected.output_size_in_bytes
        assert told.temp_bytes == expected.temp_size_in_bytes > 0
        assert told.alias_bytes == expected.alias_size_in_bytes == 0

    def test_the_arithmetic(self):
        usage = MemoryUsage(argument_bytes=1000, output_bytes=100, temp_bytes=20, alias_bytes=3)
        assert usage.added_bytes == 117
        told = memory_usage(apply, MATRIX, VECTOR)
        assert told.argument_bytes == num_bytes((MATRIX, VECTOR))
        assert told.output_bytes == ROWS * F64
        assert told.added_bytes == told.output_bytes + told.temp_bytes

    @pytest.mark.parametrize(
        "convert",
        [lambda x: x, like, lambda x: jnp.asarray(like(x))],
        ids=["shapes", "NumPy arrays", "arrays"],
    )
    @pytest.mark.parametrize("wrap", [lambda fun: fun, jax.jit], ids=["plain", "jitted"])
    def test_shapes_and_arrays_say_the_same(self, convert, wrap):
        told = memory_usage(wrap(apply), convert(MATRIX), convert(VECTOR))
        assert told == memory_usage(apply, MATRIX, VECTOR)

    def test_pytrees_keywords_and_numbers(self):
        def fun(tree, scale, *, shift, pair):
            return {"a": tree["a"] * scale + shift, "b": pair[0] * pair[1]}

        told = memory_usage(fun, {"a": VECTOR}, 2.0, shift=VECTOR, pair=(VECTOR, np.float64(3)))
        assert told.argument_bytes == 3 * num_bytes(VECTOR) + 2 * F64
        assert told.output_bytes - told.alias_bytes == pytest.approx(2 * num_bytes(VECTOR), abs=64)

    def test_arguments_that_are_no_arrays_are_passed_unchanged(self):
        def fun(x, kind, flag=None, extra=None):
            assert (kind, flag, extra) == ("twice", None, {"name": "b"})
            return 2 * x

        told = memory_usage(fun, VECTOR, "twice", extra={"name": "b"})
        assert told.argument_bytes == told.output_bytes == num_bytes(VECTOR)

    def test_typed_keys(self):
        told = memory_usage(lambda key: jax.random.normal(key, (1000,)), jax.random.key(0))
        assert told.output_bytes == 1000 * F64

    def test_nothing_is_run(self):
        ran = []

        def fun(x):
            jax.debug.callback(lambda: ran.append(1))
            return x

        memory_usage(fun, jnp.ones(3))
        jax.effects_barrier()
        assert ran == []

    def test_a_program_without_arguments(self):
        assert memory_usage(lambda: jnp.ones(1000)).output_bytes == 1000 * F64

    def test_unknown_accounts_are_said(self, unchecked):
        class Silent:
            def memory_analysis(self):
                return None

        words = r"^curvax\.MemoryUsage: .* does not report .* sizes instead of memory budgets"
        with pytest.raises(NotImplementedError, match=words):
            MemoryUsage.of(Silent())

    def test_it_prints_as_a_table(self):
        usage = MemoryUsage(2**20, 3 * 2**19, 700, 2**20)
        assert str(usage).splitlines() == [
            "arguments           1.00 MiB",
            "output              1.50 MiB",
            "temporaries            700 B",
            "library scratch          0 B",
            "aliased             1.00 MiB",
            "added by a call   512.68 KiB",
        ]


class TestJittedFunctions:
    def test_static_arguments_are_static(self):
        repeat = jax.jit(
            lambda x, n, *, kind: jnp.tile(x, n), static_argnums=1, static_argnames="kind"
        )
        told = memory_usage(repeat, VECTOR, 3, kind="any")
        assert told.output_bytes == 3 * num_bytes(VECTOR)
        assert told.argument_bytes == num_bytes(VECTOR)

    @pytest.mark.parametrize("shift", [0.0, np.linspace(0, 1, COLUMNS)], ids=["", "closing over"])
    def test_donated_arguments_are_written_into(self, shift):
        shift = jnp.asarray(shift)
        step = jax.jit(lambda x, n: n * jnp.sin(x) + shift, static_argnums=1, donate_argnums=0)
        told = memory_usage(step, VECTOR, 3)
        assert told.alias_bytes == num_bytes(VECTOR)
        assert told.added_bytes == told.temp_bytes < num_bytes(VECTOR)

    def test_arguments_are_not_donated_by_asking(self):
        x = jnp.ones(10)
        memory_usage(jax.jit(jnp.sin, donate_argnums=0), x)
        assert not x.is_deleted()


MATRIX_VALUE = np.linspace(0.0, 1.0, ROWS * COLUMNS).reshape(ROWS, COLUMNS)


def closures():
    """Functions of a vector that close over a matrix in different ways."""
    a = jnp.asarray(MATRIX_VALUE)
    inner = jax.jit(lambda x: apply(a, x))
    return {
        "plain": lambda x: apply(a, x),
        "jitted": inner,
        "NumPy": lambda x: apply(jnp.asarray(MATRIX_VALUE), x),
        "scan": lambda x: jax.lax.scan(lambda s, _: (s, apply(a, x)), 0.0, None, length=2)[1],
        "checkpoint": jax.checkpoint(lambda x: apply(a, x)),
        "jitted inside": lambda x: 2 * inner(x),
        "jitted in a loop": lambda x: jax.lax.map(lambda _: inner(x), jnp.arange(2)),
        "jitted in a scan": lambda x: jax.lax.scan(
            lambda s, y: (s + y, inner(x) + s), 0.0, jnp.arange(3.0), reverse=True
        ),
        "jitted in jitted": lambda x: 2 * jax.jit(lambda x: inner(x) + 1)(x),
        "jitted in checkpoint": jax.checkpoint(lambda x: inner(x) + 1),
        "gradient of jitted": jax.grad(lambda x: jnp.sum(inner(x))),
    }


@pytest.mark.parametrize("name", closures())
def test_arrays_that_are_closed_over_count_as_arguments(name):
    told = memory_usage(closures()[name], VECTOR)
    assert told.argument_bytes >= num_bytes((MATRIX, VECTOR))
    assert told.temp_bytes < num_bytes(MATRIX) / 4


@pytest.mark.parametrize("name", closures())
def test_the_measured_program_computes_the_function(name):
    fun, x = closures()[name], jnp.asarray(like(VECTOR))
    assert_same(Program.of(fun, [x]).compile()(x), fun(x), 1e-12, 1e-12)


TRANSFORMATIONS = {
    "jit": lambda fun: jax.jit(fun)(2.0),
    "grad": lambda fun: jax.grad(fun)(2.0),
    "jvp": lambda fun: jax.jvp(fun, (2.0,), (1.0,)),
    "vmap": lambda fun: jax.vmap(fun)(jnp.ones(3)),
    "scan": lambda fun: jax.lax.scan(lambda c, x: (c, fun(x)), 0.0, jnp.ones(3)),
    "checkpoint": lambda fun: jax.grad(jax.checkpoint(fun))(2.0),
    "jit of grad of vmap": lambda fun: jax.jit(
        jax.grad(lambda x: jnp.sum(jax.vmap(fun)(x * jnp.ones(3))))
    )(2.0),
}


class TestUnderTransformations:
    """What is told there is what is told outside."""

    def outside(self):
        return memory_usage(apply, MATRIX, VECTOR)

    def inside(self, transformed, closed_over, wrap=lambda fun: fun):
        """What is told of `apply` for tracers, as arguments or closed over."""
        told = []

        def fun(x):
            a = jnp.ones((ROWS, COLUMNS)) * x
            if closed_over:
                told.append(memory_usage(wrap(lambda v: apply(a, v)), VECTOR))
            else:
                told.append(memory_usage(wrap(apply), a, VECTOR))
            return x * jnp.sum(a)

        transformed(fun)
        assert told
        return told

    @pytest.mark.parametrize("closed_over", [False, True], ids=["argument", "closed over"])
    @pytest.mark.parametrize("transformed", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS)
    def test_tracers_are_shapes(self, transformed, closed_over):
        for told in self.inside(transformed, closed_over):
            assert told == self.outside()

    @pytest.mark.parametrize("transformed", ["jit", "grad", "vmap"])
    def test_jitted_functions_of_tracers(self, transformed):
        for closed_over in (False, True):
            for told in self.inside(TRANSFORMATIONS[transformed], closed_over, jax.jit):
                assert told.argument_bytes == self.outside().argument_bytes
                assert told.added_bytes == self.outside().added_bytes


RESIDENT = Path(__file__).with_name("resident_programs.py")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", ["chain", "map"])
def test_a_call_takes_the_predicted_memory(name):
    """Forward only: there XLA would call a library whose scratch memory is in no account."""
    command = [sys.executable, str(RESIDENT), name]
    run = subprocess.run(command, env=as_users_run(), capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    told, taken = map(int, run.stdout.split())
    assert 100e6 < told < 400e6
    assert abs(taken - told) < max(0.15 * told, 30e6), f"told {told}, taken {taken}"
