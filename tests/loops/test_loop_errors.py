"""Every mistake in the use of a loop is answered in the user's words."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax

LOOPS = {
    "sliced_scan": curvax.sliced_scan,
    "checkpoint_chunked_scan": curvax.checkpoint_chunked_scan,
    "checkpointed_scan": curvax.checkpointed_scan,
}
XS = jnp.linspace(0.0, 1.0, 5)


def body(carry, x):
    return carry, x


# Types are checked as they are for users, who have no run-time checks of annotations.
pytestmark = pytest.mark.usefixtures("unchecked")


@dataclass(frozen=True)
class Loop:
    name: str

    def __call__(self, *args, **options):
        return LOOPS[self.name](*args, **options)

    def refuses(self, error, words):
        """As `pytest.raises`, where the message opens with the name of the loop."""
        return pytest.raises(error, match=rf"^curvax\.{self.name}: .*{words}")


@pytest.fixture(params=LOOPS)
def loop(request):
    return Loop(request.param)


class TestSizes:
    def test_a_length_that_disagrees_with_xs(self, loop):
        with loop.refuses(ValueError, r"length=4 disagrees with xs, which has 5"):
            loop(body, 0.0, XS, 4)
        with loop.refuses(ValueError, r"length=4 disagrees with xs\['a'\], which has 5"):
            loop(body, 0.0, {"a": XS}, 4)

    def test_sizes_that_disagree_are_named(self, loop):
        xs = {"a": XS, "b": [jnp.zeros((4, 2))]}
        with loop.refuses(ValueError, r"same leading size, .*\['a'\] has 5, .*\[0\] has 4"):
            loop(body, 0.0, xs)

    def test_a_scalar_cannot_be_scanned_over(self, loop):
        with loop.refuses(ValueError, r"xs\['b'\] is zero-dimensional .* leading axis"):
            loop(body, 0.0, {"a": XS, "b": 1.0})

    @pytest.mark.parametrize("xs", [None, (), {"a": None}])
    def test_there_must_be_something_to_scan_over(self, loop, xs):
        with loop.refuses(ValueError, r"nothing to scan over: give xs, or length"):
            loop(body, 0.0, xs)

    @pytest.mark.parametrize(
        ("length", "error"),
        [(-1, ValueError), (2.0, TypeError), (True, TypeError), ("5", TypeError)],
    )
    def test_the_length_is_a_number_of_steps(self, loop, length, error):
        with loop.refuses(error, rf"length must be a non-negative integer or None, got {length!r}"):
            loop(body, 0.0, None, length)

    def test_the_length_must_be_known(self, loop):
        with loop.refuses(TypeError, r"length must be .*, got .*Tracer"):
            jax.jit(lambda length: loop(body, 0.0, None, length))(3)

    @pytest.mark.parametrize("length", [0, 5])
    @pytest.mark.parametrize(
        ("unroll", "error"),
        [(0, ValueError), (-1, ValueError), (1.5, TypeError), (None, TypeError)],
    )
    def test_unroll_is_a_number_of_steps(self, loop, unroll, error, length):
        words = rf"unroll must be a positive integer or a bool, got {unroll}\."
        with loop.refuses(error, words):
            loop(body, 0.0, None, length, unroll=unroll)


class TestChunkSize:
    @pytest.mark.parametrize("size", [0, -3])
    def test_it_is_positive(self, size):
        with pytest.raises(ValueError, match=rf"chunk_size must be at least 1, got {size}"):
            curvax.checkpoint_chunked_scan(body, 0.0, XS, chunk_size=size)

    @pytest.mark.parametrize("size", [2.0, True, "2"])
    def test_it_is_an_integer(self, size):
        words = rf"chunk_size must be a Python integer, got {type(size).__name__} {size!r}"
        with pytest.raises(TypeError, match=words):
            curvax.checkpoint_chunked_scan(body, 0.0, XS, chunk_size=size)

    def test_it_must_be_known(self):
        run = lambda size: curvax.checkpoint_chunked_scan(body, 0.0, XS, chunk_size=size)
        with pytest.raises(TypeError, match=r"chunk_size must be a Python integer, got \w*Tracer"):
            jax.jit(run)(2)


class TestLevels:
    @pytest.mark.parametrize("levels", [0, -3])
    def test_there_is_at_least_one(self, levels):
        words = rf"^curvax\.checkpointed_scan: levels must be at least 1, got {levels}"
        with pytest.raises(ValueError, match=words):
            curvax.checkpointed_scan(body, 0.0, XS, levels=levels)

    @pytest.mark.parametrize("levels", [2.0, True, "2"])
    def test_their_number_is_an_integer(self, levels):
        words = rf"levels must be a Python integer, got {type(levels).__name__} {levels!r}"
        with pytest.raises(TypeError, match=words):
            curvax.checkpointed_scan(body, 0.0, XS, levels=levels)

    def test_their_number_must_be_known(self):
        run = lambda levels: curvax.checkpointed_scan(body, 0.0, XS, levels=levels)
        with pytest.raises(TypeError, match=r"levels must be a Python integer, got \w*Tracer"):
            jax.jit(run)(2)


@pytest.mark.parametrize("name", ["start", "stop", "step"])
class TestSlice:
    @pytest.mark.parametrize("bound", [1.0, True, "1", np.ones(2)])
    def test_a_bound_is_an_integer(self, name, bound):
        words = rf"{name} must be a Python integer or None, got {type(bound).__name__}"
        with pytest.raises(TypeError, match=words):
            curvax.sliced_scan(body, 0.0, XS, **{name: bound})

    def test_a_bound_must_be_known(self, name):
        run = lambda bound: curvax.sliced_scan(body, 0.0, XS, **{name: bound})
        with pytest.raises(TypeError, match=rf"{name} must be a Python integer .* got \w*Tracer"):
            jax.jit(run)(2)


def test_the_step_of_a_slice_is_not_zero():
    with pytest.raises(ValueError, match=r"curvax\.sliced_scan: step must not be zero"):
        curvax.sliced_scan(body, 0.0, XS, step=0)


INIT = {"a": jnp.zeros(2), "b": jnp.array(1, jnp.int64)}
CHANGES = {
    "dtype": (
        lambda carry: carry | {"a": carry["a"].astype(jnp.float32)},
        r"carry\['a'\] was float64\[2\] and came back as float32\[2\]\.",
    ),
    "shape": (
        lambda carry: carry | {"b": carry["b"][None]},
        r"carry\['b'\] was int64\[\] and came back as int64\[1\]\.",
    ),
    "all": (
        lambda carry: {"a": carry["b"], "b": carry["a"]},
        r"carry\['a'\] was float64\[2\] .* int64\[\], carry\['b'\] was int64\[\] .* float64\[2\]",
    ),
    "structure": (
        lambda carry: (carry["a"], carry["b"]),
        r"it was given PyTreeDef\(\{'a': \*, 'b': \*\}\) and returned PyTreeDef\(\(\*, \*\)\)",
    ),
    "nothing": (lambda carry: None, r"it was given PyTreeDef\(.*\) and returned PyTreeDef\(None\)"),
}


class TestBody:
    @pytest.mark.parametrize("length", [0, 5])
    @pytest.mark.parametrize("change", CHANGES)
    def test_the_carry_comes_back_as_it_went_in(self, loop, change, length):
        changed, words = CHANGES[change]
        with loop.refuses(TypeError, rf"f must return a carry like .* given; {words}"):
            loop(lambda carry, x: (changed(carry), x), INIT, XS[:length])

    def test_no_digits_of_a_python_number_are_lost(self, loop):
        """A float does not become an integer to suit the body."""
        with (
            jax.numpy_dtype_promotion("standard"),
            loop.refuses(TypeError, r"carry was float64\[\] and came back as int64\[\]"),
        ):
            loop(lambda carry, x: (x, carry), 1.5, jnp.arange(5))

    @pytest.mark.parametrize(
        "returned", [None, (), jnp.ones(2), (1.0, 2.0, 3.0), {"carry": 1.0, "y": 2.0}]
    )
    def test_it_returns_a_pair(self, loop, returned):
        with loop.refuses(TypeError, r"f must return a pair \(carry, y\), got .* structure"):
            loop(lambda carry, x: returned, 0.0, XS)

    def test_errors_of_the_body_come_through(self):
        def broken(carry, x):
            raise RuntimeError("from the body")

        for run in LOOPS.values():
            with pytest.raises(RuntimeError, match="from the body"):
                run(broken, 0.0, XS)

    def test_it_is_a_function(self):
        for run in LOOPS.values():
            with pytest.raises(TypeError, match="callable"):
                run(functools, 0.0, XS)
