"""`micro_vmap` equals `jax.vmap` followed by a reduction over examples."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import curvax
from curvax import AccumulationType, Accumulator
from helpers import MAPPED, MAPPED_BY_NAME, assert_same, derivatives, key

REDUCE = {
    AccumulationType.SUM: lambda x: jnp.sum(x, axis=0),
    AccumulationType.MEAN: lambda x: jnp.mean(x, axis=0),
    AccumulationType.RUNNING_MEAN: lambda x: jnp.mean(x, axis=0),
    AccumulationType.CONCAT: lambda x: x,
}
ORDERS = ["strided", "contiguous"]
kinds = st.sampled_from(list(AccumulationType))
orders = st.sampled_from(ORDERS)


def naive(fun, kind, in_axes=(None, 0)):
    """Vectorise, then reduce each leaf over its examples."""
    return lambda *args: jax.tree.map(REDUCE[kind], jax.vmap(fun, in_axes)(*args))


@pytest.mark.parametrize("case", MAPPED, ids=lambda case: case.name)
@settings(max_examples=4)
@given(st.integers(1, 9), st.one_of(st.none(), st.integers(1, 11)), kinds, orders)
def test_values_and_derivatives_equal_vmap_then_reduce(case, length, size, kind, order):
    args = case.arguments(length)
    micro = curvax.micro_vmap(
        case.fun, (None, 0), microbatch_size=size, accumulator=kind, order=order
    )
    assert_same(derivatives(micro)(*args), derivatives(naive(case.fun, kind))(*args))


@pytest.mark.parametrize("kind", AccumulationType)
def test_it_composes_with_an_outer_vmap(kind):
    case = MAPPED_BY_NAME["layer"]
    args = jax.tree.map(lambda x: np.stack([x, -x]), case.arguments(5))
    expected = jax.vmap(derivatives(naive(case.fun, kind)))(*args)
    for order in ORDERS:
        micro = curvax.micro_vmap(
            case.fun, (None, 0), microbatch_size=2, accumulator=kind, order=order
        )
        assert_same(jax.vmap(derivatives(micro))(*args), expected)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", AccumulationType)
def test_no_examples_reduce_as_empty_arrays_do(kind, order):
    x = jnp.zeros((0, 3))
    fun = lambda x: jnp.sin(x)
    micro = curvax.micro_vmap(fun, microbatch_size=2, accumulator=kind, order=order)
    expected = naive(fun, kind, 0)(x) if kind is not AccumulationType.CONCAT else x
    if "MEAN" in kind.name:
        expected = jnp.full(3, jnp.nan)
    assert_same(micro(x), expected)


@settings(max_examples=8)
@given(length=st.integers(1, 9), size=st.integers(1, 5), kind=kinds, order=orders, data=st.data())
def test_num_real_microbatches_runs_the_first_of_the_order(length, size, kind, order, data):
    num_microbatches = -(-length // size)
    number = data.draw(st.integers(1, num_microbatches))
    x = jax.random.normal(key(), (length, 2), jnp.float64)
    deal = (
        [range(length)[i::num_microbatches] for i in range(num_microbatches)]
        if order == "strided"
        else [range(length)[i * size : (i + 1) * size] for i in range(num_microbatches)]
    )
    ran = np.array([i for microbatch in deal[:number] for i in microbatch])
    if kind is AccumulationType.CONCAT:
        mask = np.isin(np.arange(length), ran)[:, None]
        expected = jnp.where(mask, jnp.sin(x), 0.0)
    else:
        expected = REDUCE[kind](jnp.sin(x[ran]))

    def micro(number, x):
        return curvax.micro_vmap(
            jnp.sin,
            microbatch_size=size,
            accumulator=kind,
            order=order,
            num_real_microbatches=number,
        )(x)

    assert_same(micro(number, x), expected)
    assert_same(jax.jit(micro)(number, x), expected)
    assert_same(jax.jvp(functools.partial(jax.jit(micro), number), (x,), (x,))[0], expected)


@pytest.mark.parametrize("kind", AccumulationType)
def test_a_python_number_of_microbatches_is_differentiable_in_reverse(kind):
    x = jnp.linspace(0.0, 1.0, 7)
    micro = curvax.micro_vmap(jnp.sin, microbatch_size=2, accumulator=kind, num_real_microbatches=2)
    gradient = jax.grad(lambda x: jnp.sum(micro(x)))(x)
    ran = np.isin(np.arange(7), [0, 4, 1, 5])
    weight = 0.25 if "MEAN" in kind.name else 1.0
    np.testing.assert_allclose(gradient, np.where(ran, weight * np.cos(x), 0.0), rtol=1e-12)


def test_no_microbatches_give_empty_reductions():
    run = lambda kind, number: curvax.micro_vmap(
        jnp.sin, microbatch_size=2, accumulator=kind, num_real_microbatches=number
    )(jnp.ones(5))
    for number in (0, jnp.array(0)):
        np.testing.assert_array_equal(run(AccumulationType.SUM, number), 0.0)
        np.testing.assert_array_equal(run(AccumulationType.CONCAT, number), np.zeros(5))
        assert jnp.isnan(run(AccumulationType.MEAN, number))
        assert jnp.isnan(run(AccumulationType.RUNNING_MEAN, number))


def test_one_compiled_program_serves_every_number_of_microbatches():
    traces = []

    @jax.jit
    def run(x, number):
        traces.append(number)
        return curvax.micro_vmap(
            lambda x: x,
            microbatch_size=2,
            accumulator=AccumulationType.MEAN,
            order="contiguous",
            num_real_microbatches=number,
        )(x)

    x = jnp.arange(7.0)
    results = [run(x, number) for number in (1, 2, 3, 4, 100)]
    np.testing.assert_allclose(results, [0.5, 1.5, 2.5, 3.0, 3.0])
    assert len(traces) == 1


@pytest.mark.parametrize("out_axis", [0, 1, -1])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("size", [2, 3])
def test_out_axes_says_where_examples_come_out(out_axis, order, size):
    x = jax.random.normal(key(), (6, 2, 3), jnp.float64)
    fun = lambda x: (jnp.sin(x), jnp.sum(x))
    micro = curvax.micro_vmap(
        fun,
        out_axes=(out_axis, 0),
        microbatch_size=size,
        order=order,
        accumulator=(AccumulationType.CONCAT, AccumulationType.SUM),
    )
    assert_same(micro(x), (jnp.moveaxis(jnp.sin(x), 0, out_axis), jnp.sum(x)))


def test_an_accumulator_may_be_any_prefix_of_the_outputs():
    x = jnp.linspace(0.0, 1.0, 7)
    fun = lambda x: {"a": (x, x**2), "b": [x**3, x**4], "c": x}
    kinds = {
        "a": (AccumulationType.SUM, AccumulationType.CONCAT),
        "b": AccumulationType.MEAN,
        "c": AccumulationType.RUNNING_MEAN,
    }
    result = curvax.micro_vmap(fun, microbatch_size=3, accumulator=kinds)(x)
    expected = {
        "a": (jnp.sum(x), x**2),
        "b": [jnp.mean(x**3), jnp.mean(x**4)],
        "c": jnp.mean(x),
    }
    assert_same(result, expected)


def test_all_that_real_users_combine_works_at_once():
    """A list of in_axes, a vmap_fn with a mesh axis, accumulators, keywords, a traced number."""
    w = jnp.linspace(0.0, 1.0, 3)
    x, y = (jax.random.normal(key(i), (8, 3), jnp.float64) for i in range(2))
    weight = jnp.arange(8.0)

    def fun(w, x, y, *, weight):
        residual = jnp.dot(w, x) - y[0]
        return weight * residual * x, residual**2, {"residual": residual}

    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    @jax.jit
    def micro(w, x, y, weight, number):
        return curvax.micro_vmap(
            fun,
            [None, 0, 0],
            microbatch_size=2,
            vmap_fn=functools.partial(jax.vmap, spmd_axis_name="data"),
            accumulator=(
                AccumulationType.SUM,
                AccumulationType.MEAN,
                AccumulationType.CONCAT,
            ),
            num_real_microbatches=number,
        )(w, x, y, weight=weight)

    with jax.set_mesh(mesh):
        result = micro(w, x, y, weight, 3)
    ran = np.array([0, 4, 1, 5, 2, 6])
    gradient, loss, aux = jax.vmap(functools.partial(fun, w))(x, y, weight=weight)
    residual = jnp.zeros(8).at[ran].set(aux["residual"][ran])
    expected = (jnp.sum(gradient[ran], 0), jnp.mean(loss[ran]), {"residual": residual})
    assert_same(result, expected)


MAXIMUM = Accumulator(
    init=lambda like: jax.tree.map(lambda x: jnp.full(x.shape, -jnp.inf, x.dtype), like),
    update=lambda carry, value, index: jax.tree.map(jnp.maximum, carry, value),
    finalize=lambda carry: jax.tree.map(lambda x: 2 * x, carry),
    aggregate=lambda values: jax.tree.map(lambda x: jnp.max(x, axis=0), values),
    uneven=True,
)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("size", [None, 1, 2, 3, 4])
def test_accumulators_may_be_user_supplied(size, order):
    x = jax.random.normal(key(), (7, 2), jnp.float64)
    fun = lambda x: ({"a": x, "b": x[0]}, x[1])
    micro = curvax.micro_vmap(
        fun,
        microbatch_size=size,
        accumulator=(MAXIMUM, AccumulationType.CONCAT),
        order=order,
    )
    largest = {"a": 2 * jnp.max(x, axis=0), "b": 2 * jnp.max(x[:, 0])}
    assert_same(micro(x), (largest, x[:, 1]))


INDICES = [jnp.int8, jnp.uint8, jnp.int16, jnp.int32, jnp.uint32, jnp.int64]


@pytest.mark.parametrize("dtype", INDICES)
def test_the_number_of_microbatches_may_be_of_any_integer_type(dtype):
    run = jax.jit(
        lambda number: curvax.micro_vmap(
            lambda x: x,
            microbatch_size=200,
            accumulator=AccumulationType.MEAN,
            order="contiguous",
            num_real_microbatches=number,
        )(jnp.arange(500.0))
    )
    assert run(jnp.ones((), dtype)) == 99.5


def test_a_running_mean_of_infinity_is_infinite():
    x = jnp.array([1.0, jnp.inf, 2.0, 3.0, 4.0])
    micro = curvax.micro_vmap(
        lambda x: x, microbatch_size=2, accumulator=AccumulationType.RUNNING_MEAN
    )
    assert micro(x) == jnp.inf


def test_a_user_supplied_carry_may_be_a_python_number_and_use_the_index():
    own = Accumulator(
        init=lambda like: 0.0,
        update=lambda carry, value, index: carry + value * index.astype(value.dtype),
        finalize=lambda carry: carry,
        aggregate=lambda values: jnp.sum(values),
        uneven=True,
    )
    x = jnp.arange(5.0, dtype=jnp.float32)
    micro = curvax.micro_vmap(lambda x: x, microbatch_size=2, accumulator=own, order="contiguous")
    assert_same(micro(x), jnp.float32(0 * 1 + 1 * 5 + 2 * 4))


def test_an_accumulator_gets_the_index_of_the_microbatch():
    history = Accumulator(
        init=lambda like: jnp.zeros((3, *like.shape), like.dtype),
        update=lambda carry, value, index: carry.at[index].set(value),
        finalize=lambda carry: carry,
        aggregate=lambda values: jnp.sum(values, axis=0),
    )
    x = jnp.arange(6.0)
    strided = curvax.micro_vmap(lambda x: x, microbatch_size=2, accumulator=history)(x)
    np.testing.assert_array_equal(strided, [0 + 3, 1 + 4, 2 + 5])


INTEGERS = [jnp.int32, jnp.int8, jnp.uint8, jnp.bool_]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_are_summed_as_by_jnp_sum(dtype):
    x = (jnp.arange(300) % 7).astype(dtype)
    micro = curvax.micro_vmap(lambda x: x, microbatch_size=7, accumulator=AccumulationType.SUM)
    assert_same(micro(x), jnp.sum(x))


@pytest.mark.parametrize("kind", ["SUM", "MEAN", "RUNNING_MEAN"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.complex64])
def test_half_precision_is_accumulated_in_float32(kind, dtype):
    """Adding 0.01 five hundred times in bfloat16 would stop short at 2."""
    x = jnp.full(500, 0.01, dtype)
    micro = curvax.micro_vmap(lambda x: x, microbatch_size=3, accumulator=AccumulationType[kind])
    result = micro(x)
    assert result.dtype == dtype
    exact = np.asarray(x).astype(np.complex128).real
    exact = exact.sum() if kind == "SUM" else exact.mean()
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(result).astype(complex).real, exact, rtol=20 * eps / 2)


def test_a_running_mean_does_not_overflow():
    x = jnp.full(64, 1e38, jnp.float32)
    run = lambda kind: curvax.micro_vmap(lambda x: x, microbatch_size=1, accumulator=kind)(x)
    np.testing.assert_allclose(run(AccumulationType.RUNNING_MEAN), 1e38, rtol=1e-6)
    assert jnp.isinf(run(AccumulationType.MEAN))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, jnp.complex64])
@pytest.mark.parametrize("order", ["strided", "contiguous"])
def test_rows_of_every_dtype_come_back_in_order(dtype, order):
    x = jnp.arange(14).reshape(7, 2).astype(dtype)
    options = {"accumulator": AccumulationType.CONCAT, "order": order}
    mapped = curvax.micro_vmap(lambda x: x * x, microbatch_size=3, **options)
    batched = curvax.microbatch(lambda x: x * x, 0, 3, **options)
    for fun in (mapped, batched):
        assert_same(jax.jit(fun)(x), x * x, rtol=0, atol=0)


@pytest.mark.parametrize("size", [1, 3, 7, None])
@pytest.mark.parametrize("order", ORDERS)
def test_a_running_mean_does_not_overflow_where_the_mean_does_not(size, order):
    """Nor inside a microbatch, whose own sum would; and its gradient is that of the mean."""
    x = jnp.full(10, 3e38, jnp.float32)
    mean = curvax.micro_vmap(
        lambda x: x,
        microbatch_size=size,
        accumulator=AccumulationType.RUNNING_MEAN,
        order=order,
    )
    assert jnp.isinf(jnp.sum(x))
    np.testing.assert_allclose(mean(x), 3e38, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(mean)(x), np.full(10, 0.1), rtol=1e-6)


@pytest.mark.parametrize("number", [0, 1, 3, jnp.array(1)])
def test_without_microbatches_their_number_is_ignored(number):
    x = jnp.arange(5.0)
    options = {"microbatch_size": None, "num_real_microbatches": number}
    assert_same(curvax.micro_vmap(jnp.sin, **options)(x), jnp.sin(x))
    assert_same(curvax.microbatch(jnp.sum, 0, **options)(x), jnp.sum(x))
    gradient, _ = curvax.micro_grad(lambda w, x: jnp.sum(w * x), **options)(2.0, x)
    assert_same(gradient, jnp.sum(x))


@pytest.mark.parametrize("make", [curvax.micro_vmap, curvax.chunked_vmap])
class TestArgumentsByName:
    """An entry of `in_axes` is for a parameter, however its argument is passed."""

    w, x, y = 2.0, jnp.arange(6.0).reshape(2, 3), jnp.arange(3.0)

    @staticmethod
    def fun(w, x, y=0.0):
        return w * x + y

    def expected(self):
        return jax.vmap(self.fun, (None, 1, 0))(self.w, self.x, self.y[:, None])

    def mapped(self, make, in_axes=(None, 1, 0)):
        size = {"microbatch_size": 2} if make is curvax.micro_vmap else {"chunk_size": 2}
        return make(self.fun, in_axes=in_axes, **size)

    def test_all_or_some_by_name(self, make):
        mapped, y = self.mapped(make), self.y[:, None]
        assert_same(mapped(self.w, self.x, y), self.expected())
        assert_same(mapped(self.w, self.x, y=y), self.expected())
        assert_same(mapped(self.w, y=y, x=self.x), self.expected())
        assert_same(jax.jit(mapped)(y=y, x=self.x, w=self.w), self.expected())

    def test_names_without_an_entry_are_mapped_over_axis_0(self, make):
        mapped = self.mapped(make, in_axes=(None, 1))
        assert_same(mapped(self.w, self.x, y=self.y[:, None]), self.expected())
        assert_same(mapped(w=self.w, x=self.x, y=self.y[:, None]), self.expected())

    @pytest.mark.parametrize("names", [{"y"}, set()])
    def test_an_entry_without_an_argument_is_an_error(self, make, names):
        kwargs = {name: getattr(self, name) for name in names}
        with pytest.raises(ValueError, match=r"in_axes has 3 entries but .* 1 positional"):
            self.mapped(make)(self.w, **kwargs)

    def test_a_function_without_a_signature_takes_entries_by_position(self, make):
        options = {"microbatch_size" if make is curvax.micro_vmap else "chunk_size": 2}
        mapped = make(lambda *args, **named: args[0] + named["y"], in_axes=(0, 0), **options)
        with pytest.raises(ValueError, match=r"keywords \['y'\]"):
            mapped(self.y, y=self.y)
