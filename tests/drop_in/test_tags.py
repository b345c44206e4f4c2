"""Losses, tags and tracer return what kfac_jax 0.0.8 returned, as `tags_cases.py` recorded it."""

import json
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax
from curvax.kfac_jax import (
    layers_and_loss_tags as tags,
    loss_functions,
    tag_graph_matcher,
    tracer,
)
from drop_in import tags_cases
from drop_in.test_utils import assert_close
from drop_in.utils_cases import plain

VALUES = json.loads(Path(__file__).with_name("tags_values.json").read_text())
OURS = SimpleNamespace(
    layers_and_loss_tags=tags,
    loss_functions=loss_functions,
    tag_graph_matcher=tag_graph_matcher,
    tracer=tracer,
)
X, W = jnp.ones((4, 3)), jnp.ones((3, 2))


@pytest.mark.parametrize("name", VALUES)
def test_equal_to_kfac_jax(name):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        assert_close(plain(tags_cases.CASES[name](OURS)), VALUES[name])


def test_every_case_was_recorded():
    assert set(tags_cases.CASES) == set(VALUES)


def test_names_of_tags_and_variants():
    for name in ("dense", "conv2d", "scale_and_shift", "generic", "repeated_dense", "mine"):
        assert tags.curvax_tag_name(name) == f"{name}_tag"
        assert tags.curvax_tag_name(f"{name}_tag") == f"{name}_tag"
        assert tags.variant_name(f"{name}_tag") == name


def test_both_ways_to_tag_put_the_same_tag_into_the_program():
    old = tags.LayerTag("mine_tag", num_inputs=1, num_outputs=1)
    meta = tags_cases.meta(OURS)
    last = lambda f: jax.make_jaxpr(f)(X, W).eqns[-1]
    one = last(lambda x, w: old.bind(x @ w, x, w))
    two = last(lambda x, w: tags.layer_tag.bind(x @ w, x, w, meta=meta))
    assert one.primitive.name == two.primitive.name == "mine_tag"
    for eqn in (one, two):
        data = tags.layer_eqn_data(eqn)
        assert [v.aval.shape for v in (*data.outputs, *data.inputs, *data.params)] == [
            (4, 2),
            (4, 3),
            (3, 2),
        ]


def test_operands_may_be_in_any_order():
    meta = tags_cases.meta(OURS, outputs_index=(2,), inputs_index=(1,), params_index=(0,))

    def loss(w, x):
        y = tags.layer_tag.bind(w, x, x @ w, meta=meta)
        return curvax.register_squared_error_loss(jnp.tanh(y))

    (row,) = curvax.explain_registration(loss, (W, X)).rows
    assert row.tag == "mine_tag"
    eqn = next(e for e in jax.make_jaxpr(loss)(W, X).eqns if e.primitive.name == "mine_tag")
    assert tags.layer_tag.layer_data(eqn.invars, eqn.params) == tags.layer_eqn_data(eqn)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({}, "Meta must be LayerMetaData, but found meta=None"),
        (
            {"meta": tags_cases.meta(OURS, params_index=(2, 3))},
            r"params_index=\(2, 3\), but only 3",
        ),
    ],
)
def test_meta_data_is_checked(params, words):
    with pytest.raises(ValueError, match=words):
        tags.layer_tag.bind(X @ W, X, W, **params)


def test_losses_are_registered_by_their_class_and_names():
    meta = tags.LossMetaData(
        loss_class=loss_functions.NormalMeanNegativeLogProbLoss,
        parameter_dependants=("mean",),
        parameter_independants=("targets",),
        argument_names=("targets", "mean"),
    )
    func = lambda w, x: tags.loss_tag.bind(x, x @ w @ W.T, meta=meta)[0]
    (loss,) = tracer.compute_all_losses(func)[0]((W, X))
    assert type(loss) is loss_functions.NormalMeanNegativeLogProbLoss
    np.testing.assert_array_equal(loss.targets, X)
    eqn = jax.make_jaxpr(func)(W, X).eqns[-1]
    assert tags.loss_eqn_class_name(eqn) == "NormalMeanNegativeLogProbLoss"
    assert tags.loss_eqn_parameter_dependants(eqn) == [eqn.invars[0]]
    assert tags.get_loss_outputs([1, 2], {"meta": meta}) == (2,)
    with pytest.raises(ValueError, match=r"Number of arguments 1 must match .* 2"):
        tags.get_loss_outputs([1], {"meta": meta})


def test_several_generic_parameters_are_rejected():
    with pytest.raises(NotImplementedError, match="Register each by itself"):
        tags.register_generic(W, X)


def test_losses_are_pytrees():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for loss in tags_cases.losses(OURS).values():
            doubled = jax.jit(lambda x: jax.tree.map(lambda leaf: leaf, x))(loss)
            assert type(doubled) is type(loss)
            np.testing.assert_allclose(doubled.evaluate(), loss.evaluate(), rtol=1e-6)
            assert isinstance(loss, tracer.LossFunction)


def test_copies_of_an_unnormalised_loss_are_unnormalised():
    make = lambda **options: loss_functions.NormalMeanNegativeLogProbLoss(X, 2 * X, **options)
    loss = make(normalize_log_prob=False)
    copy = loss.copy_with_different_inputs((X,))
    np.testing.assert_allclose(copy.evaluate(), jnp.sum(X**2, axis=1), rtol=1e-12)
    constant = 1.5 * np.log(np.pi)  # Three entries of variance one half.
    np.testing.assert_allclose(make().evaluate() - copy.evaluate(), constant, rtol=1e-12)


def test_the_data_of_layers_are_pytrees():
    data = tags.LayerData(inputs=(X,), outputs=(W,), params=())
    both = tracer.LayerVjpData(primals=data, tangents=data)
    doubled = jax.tree.map(lambda x: 2 * x, both)
    np.testing.assert_array_equal(doubled.tangents.outputs[0], 2 * W)
    assert len(jax.tree.leaves(both)) == 4


def test_a_function_is_traced_once_for_each_shape():
    count = []

    def func(w, x):
        count.append(None)
        curvax.register_squared_error_loss(x @ w)

    at, processed = tracer.cached_transformation(func, lambda p, args, k: len(args) * k)
    assert at((W, X), 3) == 6
    before = len(count)
    assert at((W, X), 5) == 10
    assert processed((W, X)) is processed((2 * W, X))
    assert len(count) == before
    processed((W, X[:2]))
    assert len(count) > before


def test_the_layers_of_later_arguments_must_be_the_same():
    def func(params, x):
        y = x @ params["w"] if len(x) == 4 else x * params["w"].T[:1]
        curvax.register_squared_error_loss(y)

    _, processed = tracer.cached_transformation(func, lambda p, args: p)
    processed(({"w": W}, X))
    with pytest.raises(ValueError, match="raise_error_on_diff_jaxpr=False"):
        processed(({"w": W}, X[:2]))
