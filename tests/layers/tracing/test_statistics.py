"""Statistics that the backward pass sums are those of the inputs and cotangents at each layer."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import curvax
from curvax import layer_statistics, microbatch
from curvax.layers.tracing.loss_map import TracedFunction
from curvax.layers.tracing.statistics import Statistic, statistics_at
from helpers import assert_same, temporaries
from layers.models import B, W, X, biased, normal
from layers.tracing.book import at_layers

pytestmark = pytest.mark.optimised


def with_loss(f):
    def loss(params, x):
        y = f(params, x).astype(jnp.float64)
        curvax.register_squared_error_loss(y.reshape(y.shape[0], -1))

    return loss


def deep(p, x):
    return jnp.tanh(biased(x @ p["w"], p["b"])) @ p["v"]


P = {"w": W, "b": B, "v": normal(9, 4, 2)}
FACTORS = {"inputs": lambda x, _: x[0].T @ x[0], "outputs": lambda _, g: g[0].T @ g[0]}


def factors(layer, place):
    return FACTORS


def statistics_of(f, rule=factors):
    def compute(p, x):
        losses, pull_back = layer_statistics(f, rule)((p, x))
        return pull_back([losses[0].parameter_dependants])

    return compute


def outer_products(p, x):
    """By hand: sums over examples of outer products, each from its own gradient."""
    hidden = jnp.tanh(biased(x @ p["w"], p["b"]))
    output = hidden @ p["v"]
    back = (output @ p["v"].T) * (1 - hidden**2)
    last = {"inputs": hidden.T @ hidden, "outputs": output.T @ output}
    return [last, {"inputs": x.T @ x, "outputs": back.T @ back}]


def by_hand(f, p, x):
    found, gradient = statistics_of(with_loss(f))(p, x)
    assert_same(found, outer_products(p, x), 1e-12, 1e-12)
    assert_same(gradient, jax.grad(lambda p: jnp.sum(deep(p, x) ** 2) / 2)(p), 1e-12, 1e-12)


class TestByHand:
    def test_plain(self):
        by_hand(deep, P, X)

    def test_under_jit_and_checkpoint(self):
        by_hand(jax.jit(jax.checkpoint(jax.jit(deep))), P, X)

    def test_one_example_at_a_time(self):
        by_hand(lambda p, x: jax.vmap(lambda x: deep(p, x[None])[0])(x), P, X)

    @pytest.mark.parametrize("size", [1, 2, 5])
    def test_by_microbatches_of_examples(self, size):
        sums = curvax.AccumulationType.SUM
        compute = microbatch(statistics_of(with_loss(deep)), 1, size, sums)
        found, gradient = jax.jit(compute)(P, X)
        assert_same(found, outer_products(P, X), 1e-12, 1e-12)
        assert_same(gradient, jax.grad(lambda p: jnp.sum(deep(p, X) ** 2) / 2)(P), 1e-12, 1e-12)

    def test_for_many_batches_at_once(self):
        batches = normal(3, 4, 5, 3)
        found, _ = jax.vmap(statistics_of(with_loss(deep)), (None, 0))(P, batches)
        expected = jax.vmap(outer_products, (None, 0))(P, batches)
        assert_same(found, expected, 1e-12, 1e-12)

    def test_for_many_cotangents_at_once(self):
        losses, pull_back = layer_statistics(with_loss(deep), factors)((P, X))
        (y,) = losses[0].parameter_dependants
        several = jnp.stack([y, 2 * y, -y])
        found, _ = jax.vmap(lambda y: pull_back([(y,)]))(several)
        for number, factor in enumerate((1, 4, 1)):
            one = jax.tree.map(lambda x: x[number], found)  # noqa: B023
            for layer, expected in zip(one, outer_products(P, X), strict=True):
                assert_same(layer["inputs"], expected["inputs"])
                assert_same(layer["outputs"], factor * expected["outputs"])


def test_under_shard_map():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("data")

    def total(p, x):
        found, _ = statistics_of(with_loss(deep))(p, x)
        return lax.psum(found, "data")

    specs = {"in_specs": (PartitionSpec(), spec), "out_specs": PartitionSpec()}
    shared = jax.shard_map(total, mesh=mesh, check_vma=False, **specs)
    assert_same(jax.jit(shared)(P, X), outer_products(P, X), 1e-12, 1e-12)


def test_the_jacobian_and_the_hessian_are_not_changed():
    """A probe is the identity for every derivative but the one that it is there for."""
    from curvax.layers.tracing.statistics import probe

    zeros = [jnp.zeros((2, 2))]
    f = lambda x: jnp.sum(probe([jnp.sin(x)], [x], zeros, lambda x, g: [x[0] + g[0]])[0] ** 3)
    g = lambda x: jnp.sum(jnp.sin(x) ** 3)
    x = normal(1, 2, 2)
    for derivative in (jax.grad, jax.hessian, lambda f: jax.jacfwd(jax.jacfwd(f))):
        assert_same(derivative(f)(x), derivative(g)(x), 1e-12, 1e-12)


def test_a_vectorised_linear_map_is_transposed_example_by_example():
    from curvax.layers.tracing.statistics import probe

    rule = lambda x, g: [g[0] ** 2 * x[0]]
    x, y = normal(0, 4), normal(1, 5)

    def linear(shared, own):
        at = lambda y, own: probe([y], [y], [shared, own], lambda x, g: rule(x, g) + rule(x, g))[0]
        return jax.vmap(at)(y, own)

    _, pull_back = jax.vjp(linear, jnp.zeros(()), jnp.zeros(5))
    g = normal(2, 5)
    assert_same(pull_back(g), (jnp.sum(g**2 * y), g**2 * y))
    del x


def test_layers_that_a_loss_does_not_see():
    """Where no cotangent comes back, nothing is counted."""

    def f(p, x):
        y = x @ p["w"] + lax.stop_gradient(jnp.sin(x) @ p["w"])
        curvax.register_squared_error_loss(y)

    found, _ = statistics_of(f)({"w": W}, X)
    assert_same(found[0]["inputs"], X.T @ X)


class TestTyped:
    """What a statistic depends on, and how it is reduced, is said by its type, not by its name."""

    def test_sums_are_grouped_by_what_they_depend_on(self):
        typed = {
            "a": Statistic(FACTORS["inputs"], "inputs"),
            "b": Statistic(FACTORS["outputs"], "cotangents"),
            "inputs": Statistic(FACTORS["outputs"]),
        }
        traced = TracedFunction.of(with_loss(deep), 0, True)
        operands, pull_back = statistics_at(traced.at((P, X)), lambda layer, place: typed)
        found, _ = pull_back([operands[0][0]])
        for sums, expected in zip(found, outer_products(P, X), strict=True):
            outputs = expected["outputs"]
            assert_same(sums.of_inputs, {"a": expected["inputs"]}, 1e-12, 1e-12)
            assert_same(sums.of_cotangents, {"b": outputs, "inputs": outputs}, 1e-12, 1e-12)

    @pytest.mark.parametrize("reduce", [None, (True,), (False,)])
    def test_steps_that_are_not_summed(self, reduce):
        def recurrent(p, x):
            return lax.scan(lambda h, _: (jnp.tanh(h @ p), None), x, None, length=3)[0]

        rule = lambda layer, place: {0: Statistic(FACTORS["inputs"], "inputs", reduce)}
        p, x, expected = normal(0, 3, 3), X, []
        (found,), _ = statistics_of(with_loss(recurrent), rule)(p, x)
        for _ in range(3):
            expected.append(x.T @ x)
            x = jnp.tanh(x @ p)
        steps = jnp.stack(expected)
        assert_same(found[0], steps if reduce == (False,) else steps.sum(0), 1e-12, 1e-12)


class TestErrors:
    def test_statistics_that_differ_between_uses(self):
        f = with_loss(lambda p, x: (x @ p["w"])[:2] + x[:2] @ p["w"])
        sizes = lambda layer, place: {"inputs": lambda x, _: x[0]}
        with pytest.raises(ValueError, match=r"'inputs' of the layer .* Give them different names"):
            statistics_of(f, sizes)({"w": W}, X)

    def test_statistics_that_are_not_real(self):
        counts = lambda layer, place: {"count": lambda x, _: jnp.ones((), jnp.int32)}
        with pytest.raises(ValueError, match=r"'count' of dense_tag is of the types \['int32'\]"):
            statistics_of(with_loss(deep), counts)(P, X)


def operations(fun, *args):
    return jax.jit(fun).lower(*args).compile().cost_analysis()["flops"]


def test_unused_statistics_are_not_computed():
    p = {"w": normal(0, 64, 64), "b": normal(1, 64), "v": normal(2, 64, 64)}
    x = normal(3, 128, 64)
    compute = statistics_of(with_loss(deep))
    product = 2 * 128 * 64 * 64
    outputs = lambda p, x: [layer["outputs"] for layer in compute(p, x)[0]]
    inputs = lambda p, x: [layer["inputs"] for layer in compute(p, x)[0]]
    everything = operations(compute, p, x)
    # Two products forward, one back, two of parameters, and two of statistics for each layer.
    assert everything == pytest.approx(9 * product, rel=0.1)
    assert operations(outputs, p, x) == pytest.approx(5 * product, rel=0.1)
    assert operations(inputs, p, x) == pytest.approx(3 * product, rel=0.1)


LSTM = {
    "wx": normal(0, 8, 64),
    "wh": normal(1, 16, 64),
    "b": normal(2, 64),
    "out": normal(3, 16, 2),
}


class TestLstm:
    """Over 500 steps: statistics cost no memory that the gradient does not cost already."""

    @staticmethod
    def run(p, x):
        def step(state, x):
            h, c = state
            gates = biased(x @ p["wx"] + h @ p["wh"], p["b"])
            i, f, o, g = jnp.split(gates, 4, axis=1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zero = jnp.zeros((x.shape[1], p["wh"].shape[0]))
        return lax.scan(step, (zero, zero), x)[1]

    def loss(self, p, x, checkpoint=False):
        run = jax.checkpoint(self.run) if checkpoint else self.run
        y = run(p, x)[-1] @ p["out"]
        curvax.register_squared_error_loss(y)
        return jnp.sum(y**2) / 2

    @pytest.mark.parametrize("checkpoint", [False, True])
    def test_memory(self, checkpoint):
        x = normal(4, 500, 8, 8)
        loss = functools.partial(self.loss, checkpoint=checkpoint)
        rule = lambda layer, place: {} if place.node.name == "scale_and_shift_tag" else FACTORS
        # At least the gradient.
        gradient = temporaries(jax.grad(loss), LSTM, x)
        assert temporaries(statistics_of(loss, rule), LSTM, x) <= 1.1 * gradient

    def test_values(self):
        x = normal(4, 5, 3, 8)
        ours, naive = at_layers(self.loss, LSTM, x)
        assert_same(ours, naive, 1e-9, 1e-9)


class TestStacks:
    def test_a_scanned_stack_is_the_unrolled_one(self):
        stack = {"w": normal(0, 4, 3, 3), "b": normal(1, 4, 3)}
        layer = lambda h, p: jnp.tanh(biased(h @ p["w"], p["b"]))

        def scanned(p, x):
            return lax.scan(lambda h, p: (layer(h, p), None), x, p)[0]

        def unrolled(p, x):
            return functools.reduce(layer, p, x)

        slices = [jax.tree.map(lambda leaf: leaf[k], stack) for k in range(4)]  # noqa: B023
        (one,), _ = statistics_of(with_loss(scanned))(stack, X)
        many, _ = statistics_of(with_loss(unrolled))(slices, X)
        assert_same(one, jax.tree.map(lambda *xs: jnp.stack(xs), *many), 1e-12, 1e-12)

    def test_a_stack_that_is_gone_through_in_each_step(self):
        """One loop takes slices, the loop around it takes the whole."""
        stack = {"w": normal(0, 4, 3, 3)}

        def f(p, x):
            inner = lambda h: lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, p["w"])[0]
            return lax.scan(lambda h, _: (inner(h), None), x, None, length=2)[0]

        ours, naive = at_layers(with_loss(f), stack, X)
        assert all(leaf.shape[0] == 4 for leaf in jax.tree.leaves(ours[0]))
        assert_same(ours, naive, 1e-9, 1e-9)

    def test_a_stack_that_two_nested_loops_take(self):
        stack = {"w": normal(0, 3, 3, 3)}

        def f(p, x):
            step = lambda v: lambda h, w: (jnp.tanh(jnp.tanh(h @ v) @ w), None)
            outer = lambda h, v: (lax.scan(step(v), h, p["w"])[0], None)
            return lax.scan(outer, x, p["w"])[0]

        ours, naive = at_layers(with_loss(f), stack, X)
        assert_same(ours, naive, 1e-9, 1e-9)

    def test_parts_of_a_stack(self):
        """Under one name they would be added up."""

        def f(p, x):
            step = lambda h, w: (jnp.tanh(h @ w), None)
            return lax.scan(step, lax.scan(step, x, p[:2])[0], p[2:])[0]

        with pytest.raises(ValueError, match="another part of the parameters"):
            statistics_of(with_loss(f))(normal(0, 4, 3, 3), X)

    def test_convolutions(self):
        images, kernels = normal(0, 2, 5, 5, 3), normal(1, 4, 3, 3, 3, 3)
        numbers = ("NHWC", "OIHW", "NHWC")
        conv = lambda x, w: lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=numbers
        )
        f = lambda w, x: lax.scan(lambda h, w: (jnp.tanh(conv(h, w)), None), x, w)[0]
        report = curvax.explain_registration(with_loss(f), (kernels, images))
        assert report.rows[0].tag == "conv2d_tag"
        ours, naive = at_layers(with_loss(f), kernels, images)
        assert_same(ours, naive, 1e-9, 1e-9)
