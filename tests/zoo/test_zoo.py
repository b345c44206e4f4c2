"""Real models: curvax recognises their layers, and what it says about these is true.

`zoo.models` has the models. Each is compiled once for all of its tests.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax
from zoo.measure import (
    alone,
    compute,
    layer_data,
    measured,
    registered,
    statistics_by_the_book,
)
from zoo.models import ZOO


def one_worker(entry, *others, marks=()):
    """All tests of a model in one process, which keeps what was computed."""
    group = pytest.mark.xdist_group(entry.name)
    return pytest.param(entry, *others, id="-".join([entry.name, *others]), marks=[group, *marks])


def models(wanted):
    """Those models; all but every third are computed only if slow tests are wanted."""
    some = [entry for number, entry in enumerate(ZOO) if number % 3 == 0]
    return [
        one_worker(entry, marks=[] if entry in some else [pytest.mark.slow])
        for entry in ZOO
        if wanted(entry)
    ]


each_model = pytest.mark.parametrize("entry", [one_worker(e) for e in ZOO])
each_computed = pytest.mark.parametrize("entry", models(lambda entry: True))
each_tapped = pytest.mark.parametrize("entry", models(lambda entry: entry.tapped))
each_scanned = pytest.mark.parametrize("entry", models(lambda entry: entry.scanned))


def assert_close(actual, expected, accuracy=1e-9, name=""):
    """Equal to rounding, also where other numbers are added up to something small."""
    size = max(1.0, float(np.max(np.abs(expected), initial=0)))
    np.testing.assert_allclose(actual, expected, accuracy, accuracy * size, err_msg=name)


class TestEachModel:
    @each_model
    def test_its_layers_are_recognised(self, entry):
        report, expected = registered(entry), entry.get().generic
        on_examples = [row for row in report.rows if row.reason.startswith("examples ")]
        assert not (on_examples and entry.get().independent), str(report)
        reasons = {row.path: row.reason for row in report.rows if row not in on_examples}
        generic = {path: reason for path, reason in reasons.items() if reason}
        assert generic.keys() == expected.keys(), str(report)
        assert all(expected[path] in reason for path, reason in generic.items()), str(report)
        elements = {row.path: math.prod(row.shape) for row in report.rows}
        lost = sum(elements[path] for path in generic) / sum(elements.values())
        assert report.coverage == pytest.approx(1 - lost)

    @each_computed
    def test_layers_give_their_outputs_from_their_inputs(self, entry):
        accuracy = entry.get().accuracy
        for data, outputs, _ in alone(entry):
            for site, y in zip(data["sites"], outputs, strict=True):
                assert_close(y, site["outputs"][0].astype(float), accuracy)

    @each_computed
    def test_cotangents_at_layers_give_the_gradient(self, entry):
        accuracy = entry.get().accuracy
        for data, _, total in alone(entry, complete=True):
            for got, want in zip(total, data["params_tangents"], strict=True):
                assert_close(got, want, accuracy)

    @each_computed
    def test_statistics_are_sums_of_outer_products(self, entry):
        found, expected = measured(entry).statistics, statistics_by_the_book(entry)
        accuracy = max(entry.get().accuracy, 1e-8)
        for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert_close(got, want, accuracy)

    @each_computed
    def test_the_gradient_is_that_of_the_loss_by_hand(self, entry):
        found = measured(entry)
        gradient = dict(enumerate(jax.tree.leaves(found.gradient)))
        # Some have none, as biases before a norm, or of keys before a softmax.
        assert np.mean([np.abs(g).max() > 1e-6 for g in gradient.values()]) > 0.8
        for layer, data in zip(found.layers, found.data, strict=True):
            for number, got in zip(layer.params, data["params_tangents"], strict=True):
                assert_close(got, gradient.pop(number), entry.get().accuracy)
        assert not gradient

    @each_computed
    def test_its_curvature_is_estimated_and_inverted(self, entry):
        found = measured(entry)
        numbers = [x for x in jax.tree.leaves((found.state, found.step)) if x.dtype.kind == "f"]
        assert all(np.isfinite(x).all() for x in numbers)
        slopes = jax.tree.map(lambda g, s: np.sum(g * s), found.gradient, found.step)
        assert sum(jax.tree.leaves(slopes)) > 0
        averages = [
            average
            for average in jax.tree.leaves(found.state, is_leaf=is_average)
            if is_average(average)
        ]
        assert all(average.weight == 1 and average.refused == 0 for average in averages)
        assert np.mean([np.abs(average.value).max() > 0 for average in averages]) > 0.9


def is_average(x):
    return isinstance(x, curvax.WeightedMovingAverage)


def layer_of(found, name):
    """The number of the layer whose parameters are at a path."""
    numbers = {n for n, row in enumerate(found.report.rows) if row.path.startswith(name)}
    (layer,) = [k for k, layer in enumerate(found.layers) if numbers & set(layer.params)]
    return layer


@each_tapped
def test_layer_data_is_that_of_taps_by_hand(entry):
    """Cotangents are the derivatives by what is added to the outputs of the model's own layers."""
    model, found = entry.get(), measured(entry)
    params, *batch = model.args
    _, met = jax.eval_shape(lambda *args: model.tapped(args[0], {}, *args[1:]), *model.args)
    zeros = {name: np.zeros(of["outputs"].shape) for name, of in met.items()}

    def by_hand(params, changes, *batch):
        f = lambda changes: model.tapped(params, changes, *batch)
        return jax.grad(f, has_aux=True)(changes)

    cotangents, met = compute(by_hand, params, zeros, *batch)
    structured = sum(len(data["sites"]) for data in found.data)
    assert len(met) >= structured // 2
    for key, expected in met.items():
        name, _, call = key.partition("#")
        site = found.data[layer_of(found, name)]["sites"][int(call)]
        expected = expected | {"outputs_tangents": cotangents[key]}
        for what, want in expected.items():
            assert_close(site[what][0], want.reshape(site[what][0].shape), name=f"{key} {what}")


def each_example(loss):
    """A map over the examples, each a batch of one."""

    def f(params, *batch):
        one = lambda *batch: loss(params, *jax.tree.map(lambda x: x[None], batch))
        return jnp.sum(jax.vmap(one)(*batch))

    return f


def one_batch(loss):
    """A map over a single batch."""

    def f(params, *batch):
        one = lambda *batch: loss(params, *batch)
        return jnp.sum(jax.vmap(one)(*jax.tree.map(lambda x: x[None], batch)))

    return f


WRAPPERS = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "vmap": None,
    "jit of checkpoint": lambda loss: jax.jit(jax.checkpoint(loss)),
}


def marks(number, place):
    """One wrapper for every third model, each after the other, unless slow tests are wanted."""
    is_next = number % 3 == 0 and number // 3 % len(WRAPPERS) == place
    return [] if is_next else [pytest.mark.slow]


PAIRS = [
    one_worker(entry, wrapper, marks=marks(number, place))
    for number, entry in enumerate(ZOO)
    for place, wrapper in enumerate(WRAPPERS)
]


@pytest.mark.parametrize(("entry", "wrapper"), PAIRS)
def test_wrapped_it_is_the_same(entry, wrapper):
    model, bare = entry.get(), measured(entry)
    wrap = WRAPPERS[wrapper] or (each_example if model.independent else one_batch)
    report = curvax.explain_registration(wrap(model.loss), model.args)
    assert report.rows == bare.report.rows
    found = compute(layer_data(wrap(model.loss)), *model.args)
    paths = jax.tree_util.tree_leaves_with_path(bare.data)
    for (path, want), got in zip(paths, jax.tree.leaves(found), strict=True):
        want, got = np.asarray(want, float), np.asarray(got, float)
        assert_close(got.reshape(want.shape), want, model.accuracy, jax.tree_util.keystr(path))


@each_scanned
def test_a_scan_over_layers_is_the_same_unrolled(entry):
    model, found = entry.get(), measured(entry)
    loss, params, stack = model.unrolled
    args = params, *model.batch
    rows = curvax.explain_registration(loss, args).rows
    layers = curvax.ProcessedJaxpr.make_from_func(loss, args).layers
    unrolled = {
        tuple(rows[number].path for number in layer.params): data
        for layer, data in zip(layers, compute(layer_data(loss), *args), strict=True)
    }
    stacked = 0
    for layer, data in zip(found.layers, found.data, strict=True):
        paths = [found.report.rows[number].path for number in layer.params]
        if not paths[0].startswith(stack):
            continue
        for k in range(data["params"][0].shape[0]):
            twin = unrolled[tuple(path.replace(stack, f"{stack}[{k}]", 1) for path in paths)]
            stacked += 1
            for what in ("inputs", "outputs", "outputs_tangents", "params_tangents"):
                for got, want in zip(data[what], twin[what], strict=True):
                    assert_close(got[k], want, name=f"{paths} {what}")
    assert stacked >= 6
