"""Maps over the devices of a mesh compute what one device computes, exactly once each."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax
from curvax import AccumulationType
from helpers import assert_same, mesh_of
from maps.mesh_cases import (
    BATCH_MAPS,
    CONCAT,
    MAPS,
    MEAN,
    NORM,
    RUNNING_MEAN,
    SUM,
    W,
    derivatives,
    example,
    examples,
    rows_of,
)

same = functools.partial(assert_same, rtol=1e-11, atol=1e-12)


def assert_agrees(make, devices, length, size):
    mapped, naive = make(mesh_of(devices), size)
    args = W, examples(length)
    same(derivatives(mapped)(*args), derivatives(naive)(*args))


@pytest.mark.parametrize("name", MAPS)
def test_values_and_derivatives_with_one_more_example_on_some_devices(name):
    assert_agrees(MAPS[name], devices=3, length=13, size=2)


@pytest.mark.parametrize("name", MAPS)
def test_values_and_derivatives_of_fewer_examples_than_devices(name):
    assert_agrees(MAPS[name], devices=8, length=5, size=None)


@pytest.mark.parametrize("name", BATCH_MAPS)
def test_values_and_derivatives_of_a_batch(name):
    assert_agrees(BATCH_MAPS[name], devices=8, length=24, size=2)


# A map, and numbers of devices and examples; the batch of a function of batches must be even.
CROSSED = [
    pytest.param(name, *numbers, id="-".join(map(str, (name, *numbers))))
    for name in MAPS | BATCH_MAPS
    for numbers in itertools.product((1, 2, 3, 8), (24, 19, 5), (1, 2, 5, None))
    if name in MAPS or numbers[1] % numbers[0] == 0
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "devices", "length", "size"), CROSSED)
def test_values_and_derivatives_for_all_numbers_of_devices_and_examples(
    name, devices, length, size
):
    assert_agrees((MAPS | BATCH_MAPS)[name], devices, length, size)


@pytest.mark.parametrize("devices", [2, 8])
def test_an_infinite_derivative_stays_with_its_example(devices):
    """Padding is never computed: it would make a NaN of the derivative of a square root."""
    root = lambda w, x: jnp.sqrt(w - x)
    x = jnp.arange(9.0)
    gradient = lambda fun: jax.jit(jax.grad(lambda w, x: jnp.sum(fun(w, x)), (0, 1)))
    expected = gradient(jax.vmap(root, (None, 0)))
    found = gradient(curvax.chunked_vmap(root, 2, in_axes=(None, 0), mesh=mesh_of(devices)))
    # The example whose derivative is infinite is at several positions.
    for w in (8.0, 7.0, 5.0, 4.0, 2.0):
        args = jnp.array(w), jnp.minimum(x, w)
        assert jnp.isinf(expected(*args)[0])
        same(found(*args), expected(*args))


def test_each_example_is_computed_once():
    seen = []

    def noted(x):
        jax.debug.callback(lambda x: seen.append(int(x)), x)
        return x

    jax.block_until_ready(curvax.chunked_vmap(noted, 2, mesh=mesh_of(4))(jnp.arange(11)))
    jax.effects_barrier()
    assert sorted(seen) == list(range(11))


@pytest.mark.parametrize(("length", "size"), [(8, None), (8, 3), (11, 2), (3, None)])
def test_the_function_is_traced_once(length, size):
    traced = []

    def counted(x):
        traced.append(x)
        return jnp.sin(x)

    mapped = curvax.chunked_vmap(counted, size, mesh=mesh_of(4))
    jax.jit(jax.grad(lambda x: jnp.sum(mapped(x)))).lower(jnp.ones(length))
    assert len(traced) == 1


@pytest.mark.parametrize("order", ["strided", "contiguous"])
def test_microbatches_are_made_of_the_examples_of_each_device(order):
    spread = lambda x: jnp.std(x, axis=0)
    micro = functools.partial(curvax.microbatch, spread, 0, 2, order=order)
    shards = jnp.split(examples(12), 3)
    same(jax.jit(micro(mesh=mesh_of(3)))(examples(12)), sum(map(micro(), shards)))


class TestDtypes:
    """On three devices, of which one has more examples."""

    def test_keys(self):
        keys = jax.random.split(jax.random.key(0), 7)
        sample = curvax.chunked_vmap(lambda key: (key, jax.random.normal(key)), 2, mesh=mesh_of(3))
        same(sample(keys), (keys, jax.vmap(jax.random.normal)(keys)))

    @staticmethod
    def outputs(x):
        return (
            x.astype(jnp.int32),
            (x > 0.5),
            x.astype(jnp.bfloat16),
            jnp.exp(1j * x.astype(complex)),
        )

    @pytest.mark.parametrize("length", [600, 599])
    def test_integers_booleans_half_precision_and_complex_numbers_are_reduced(self, length):
        kinds = (SUM, SUM, MEAN, RUNNING_MEAN)
        micro = functools.partial(
            curvax.micro_vmap, self.outputs, microbatch_size=7, accumulator=kinds
        )
        x = jnp.arange(600.0)[:length]
        same(jax.jit(micro(mesh=mesh_of(3)))(x), jax.jit(micro())(x))

    def test_nothing_is_reduced(self):
        kinds = (SUM, CONCAT, MEAN, RUNNING_MEAN)
        micro = functools.partial(curvax.micro_vmap, self.outputs, accumulator=kinds)
        same(micro(mesh=mesh_of(3))(jnp.ones(0)), micro()(jnp.ones(0)))


class TestFirstMicrobatches:
    """`num_real_microbatches`: each microbatch has examples of all devices."""

    x = examples(48)

    @pytest.fixture(scope="class", params=[3, pytest.param(2, marks=pytest.mark.slow)])
    @classmethod
    def maps(cls, request):
        """The map on one device and on several, as functions of the number of microbatches."""
        devices = request.param
        kinds = {kind.name: kind for kind in AccumulationType} | {"norm": NORM}
        micro = functools.partial(
            curvax.micro_vmap,
            lambda w, x: dict.fromkeys(kinds, example(w, x)),
            (None, 0),
            accumulator=kinds,
        )
        on_one = lambda limit: micro(microbatch_size=4 * devices, num_real_microbatches=limit)
        on_mesh = lambda limit: micro(
            microbatch_size=4, num_real_microbatches=limit, mesh=mesh_of(devices)
        )
        traced = jax.jit(lambda limit, w, x: on_mesh(limit)(w, x))
        return on_one, on_mesh, traced

    @pytest.mark.parametrize("limit", [0, 1])
    def test_values(self, maps, limit):
        on_one, on_mesh, traced = maps
        expected = jax.jit(on_one(limit))(W, self.x)
        same(jax.jit(on_mesh(limit))(W, self.x), expected)
        same(traced(limit, W, self.x), expected)

    def test_values_and_derivatives(self, maps):
        on_one, on_mesh, traced = maps
        expected = derivatives(on_one(2))(W, self.x)
        same(derivatives(on_mesh(2))(W, self.x), expected)
        same(traced(2, W, self.x), expected[0])

    # On three devices of 16 examples each: the first two of four microbatches.
    ran = np.arange(48) % 4 < 2

    def test_of_microbatch(self):
        batch = lambda w, x: jnp.mean(rows_of(w, x), axis=0)
        mean = curvax.microbatch(batch, 1, 4, MEAN, num_real_microbatches=2, mesh=mesh_of(3))
        same(jax.jit(mean)(W, self.x), rows_of(W, self.x)[self.ran].mean(axis=0))

    def test_of_micro_grad(self):
        per_example = curvax.micro_grad(
            lambda w, x: jnp.sum(example(w, x[0])),
            microbatch_size=4,
            num_real_microbatches=2,
            mesh=mesh_of(3),
        )(W, self.x)[1]
        same(per_example.values, jnp.where(self.ran, rows_of(W, self.x).sum(axis=1), 0.0))

    @pytest.mark.parametrize(
        ("devices", "options"),
        [
            (3, {"num_real_microbatches": 1}),
            (1, {"num_real_microbatches": 2, "microbatch_size": 5}),
        ],
        ids=["one microbatch", "one device"],
    )
    def test_may_be_contiguous(self, devices, options):
        """One microbatch has any order, and so has any number of them on one device."""
        micro = functools.partial(
            curvax.micro_vmap, example, (None, 0), order="contiguous", **options
        )
        same(micro(mesh=mesh_of(devices))(W, self.x), micro()(W, self.x))


MAKERS = {
    "chunked_vmap": lambda **options: curvax.chunked_vmap(jnp.sin, **options),
    "micro_vmap": lambda **options: curvax.micro_vmap(jnp.sin, **options),
    "microbatch": lambda **options: curvax.microbatch(jnp.sin, 0, **options),
    "micro_grad": lambda **options: curvax.micro_grad(jnp.vdot, **options),
}


@pytest.mark.parametrize("name", MAKERS)
def test_an_invalid_mesh_or_axis_is_rejected(name, unchecked):
    mesh = mesh_of(1)
    with pytest.raises(TypeError, match=f"curvax.{name}: mesh must be a jax.sharding.Mesh"):
        MAKERS[name](mesh=jax.devices())
    with pytest.raises(ValueError, match=f"curvax.{name}: axis='model' must name"):
        MAKERS[name](mesh=mesh, axis="model")
    with pytest.raises(ValueError, match=f"curvax.{name}: axis='data' .* give mesh"):
        MAKERS[name](axis="data")
    with pytest.raises(ValueError, match=f"curvax.{name}: replicated=True .* give mesh"):
        MAKERS[name](replicated=True)
