"""Patterns of one's own, written as for kfac_jax, find layers before the default patterns do."""

import contextlib
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import curvax
from curvax.kfac_jax import layers_and_loss_tags as tags, tag_graph_matcher as matcher
from helpers import key


@contextlib.contextmanager
def as_users_run():
    """JAX's default promotion, which clients rely on."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


TAG = tags.LayerTag("walker_dense_tag", num_inputs=1, num_outputs=1)
SHAPES = {0: (3, 4), 1: (2, 3, 4), 2: (6, 2, 3, 4)}


def dense(x, params):
    w, *b = params
    y = jnp.matmul(x, w)
    return y + b[0] if b else y


def contracted(x, params):
    """A dense layer as Flax writes it."""
    w, *b = params
    y = lax.dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())))
    return y + b[0].reshape((1, *b[0].shape)) if b else y


def mapped(compute, repeats, num_params):
    for _ in range(repeats):
        compute = jax.vmap(compute, in_axes=[0, [None] * num_params])
    return compute


def first_dot(eqns):
    return next(dict(eqn.params) for eqn in eqns if eqn.primitive.name == "dot_general")


def pattern(compute, repeats, num_params, variant=None):
    """By a tag with a name, as before 0.0.8, or by a variant, as in 0.0.8."""
    extract = functools.partial(matcher._dense_parameter_extractor, variant=variant)
    return matcher.GraphPattern(
        name=f"walkers{repeats}_{num_params}",
        tag_primitive=TAG if variant is None else tags.layer_tag,
        compute_func=compute,
        parameters_extractor_func=first_dot if variant is None else extract,
        example_args=[
            np.zeros(SHAPES[repeats]),
            [np.zeros(s) for s in [(4, 5), (5,)]][:num_params],
        ],
    )


def patterns(compute, variant=None, is_mapped=True):
    of = lambda k, n: mapped(compute, k, n) if is_mapped else compute
    own = [pattern(of(k, n), k, n, variant) for k in (1, 2) for n in (2, 1)]
    return (*own, *matcher.DEFAULT_GRAPH_PATTERNS)


def found(func, params, x, **options):
    with as_users_run():
        report = curvax.explain_registration(func, (params, x), **options)
    return {row.path: row.tag for row in report.rows}


PARAMS = {"w": jax.random.normal(key(0), (3, 2)), "b": jnp.ones(2), "out": jnp.ones((2, 1))}
X = jax.random.normal(key(1), (6, 5, 3))
REGISTER = curvax.register_normal_predictive_distribution


def together(params, x):
    y = jnp.tanh(x @ params["w"] + params["b"])
    return REGISTER(jnp.sum(y, axis=-2) @ params["out"])


def one_walker(params, x):
    y = jnp.tanh(jnp.dot(x, params["w"]) + params["b"])
    return jnp.sum(y, axis=0) @ params["out"]


def walkers(params, x):
    return REGISTER(jax.vmap(one_walker, in_axes=(None, 0))(params, x))


def flax_walkers(params, x):
    def one(params, x):
        y = lax.dot_general(x, params["w"], (((1,), (0,)), ((), ())))
        y = jnp.tanh(y + jnp.reshape(params["b"], (1,) * (y.ndim - 1) + (-1,)))
        return jnp.sum(y, axis=0) @ params["out"]

    return REGISTER(jax.vmap(one, in_axes=(None, 0))(params, x))


def twice_mapped(params, x):
    of_pair = lambda x: jnp.tanh(dense(x, [params["w"], params["b"]]))
    y = jax.vmap(jax.vmap(of_pair))(x[:, :, None] * x[:, None])
    return REGISTER(jnp.sum(y, axis=(1, 2)) @ params["out"])


def jitted(params, x):
    layer = jax.jit(lambda x, w, b: jax.checkpoint(dense)(x, [w, b]))
    return REGISTER(jnp.sum(layer(x, params["w"], params["b"]), axis=1) @ params["out"])


@pytest.mark.parametrize("model", [together, walkers, flax_walkers, twice_mapped, jitted])
@pytest.mark.parametrize(
    "given",
    [
        patterns(dense),
        patterns(dense, is_mapped=False),
        patterns(contracted, is_mapped=False),
        patterns(dense, "walker_dense"),
        patterns(functools.partial(matcher._dense, axes=1, with_reshape=False), "walker_dense"),
        patterns(
            functools.partial(matcher._dense, axes=1, with_reshape=True), "walker_dense", False
        ),
    ],
    ids=["mapped", "plain", "contracted", "variant", "theirs", "theirs reshaped"],
)
def test_repeated_dense_layers_are_found_by_a_pattern_of_ones_own(model, given):
    expected = {"['w']": "walker_dense_tag", "['b']": "walker_dense_tag", "['out']": "dense_tag"}
    assert found(model, PARAMS, X, graph_patterns=given) == expected


@pytest.mark.parametrize("model", [together, walkers, flax_walkers, twice_mapped, jitted])
def test_default_patterns_find_repeated_dense_layers_as_such(model):
    tags_found = found(model, PARAMS, X, graph_patterns=matcher.DEFAULT_GRAPH_PATTERNS)
    repeated = "repeated_dense_tag"
    assert tags_found == {"['w']": repeated, "['b']": repeated, "['out']": "dense_tag"}


def test_the_tag_has_the_inputs_and_outputs_of_the_model():
    given = patterns(dense, "walker_dense")
    with as_users_run():
        _, vjp = curvax.layer_tags_vjp(walkers, graph_patterns=given)((PARAMS, X))
        _, layer = vjp([(jnp.ones((6, 1)),)])
    assert layer["inputs"][0].shape == (6, 5, 3)
    assert layer["outputs_tangents"][0].shape == (6, 5, 2)


def test_no_bias_and_no_input_axis_besides_features():
    func = lambda params, x: REGISTER(jnp.sum(jnp.tanh(x @ params["w"]), axis=1))
    given = patterns(dense, "walker_dense")
    assert found(func, {"w": PARAMS["w"]}, X, graph_patterns=given) == {"['w']": "walker_dense_tag"}
    plain = lambda params, x: REGISTER(x @ params["w"])
    assert found(plain, {"w": PARAMS["w"]}, X[:, 0], graph_patterns=given) == {"['w']": "dense_tag"}


def test_normalisations_are_matched_with_inputs_as_arrays():
    def norm(inputs, params):
        x, inverse = inputs
        return x * (inverse * params[0][None])

    own = matcher.GraphPattern(
        name="my_norm",
        tag_primitive=tags.layer_tag,
        compute_func=norm,
        parameters_extractor_func=functools.partial(
            matcher._scale_and_shift_parameter_extractor, variant="scale_and_shift"
        ),
        example_args=[[np.zeros((3, 4)), np.zeros((3, 1))], [np.zeros(4)]],
        in_values_preprocessor=matcher._normalization_haiku_preprocessor,
    )

    def model(params, x):
        centred = x - jnp.mean(x, axis=-1, keepdims=True)
        inverse = lax.rsqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + 1e-5)
        return REGISTER(centred * (inverse * params["scale"][None]))

    params, x = {"scale": jnp.ones(3)}, X[:, 0]
    given = (own, *matcher.DEFAULT_GRAPH_PATTERNS)
    assert found(model, params, x, graph_patterns=given) == {"['scale']": "scale_and_shift_tag"}
    with as_users_run():
        _, vjp = curvax.layer_tags_vjp(model, graph_patterns=given)((params, x))
        (layer,) = vjp([(jnp.ones((6, 3)),)])
    np.testing.assert_allclose(layer["inputs"][0], layer["outputs"][0], rtol=1e-6)


def test_a_preprocessor_of_equations_is_rejected():
    with pytest.raises(NotImplementedError, match="function of one sequence"):
        matcher.GraphPattern(
            name="old",
            tag_primitive=TAG,
            compute_func=dense,
            parameters_extractor_func=first_dot,
            example_args=[np.zeros((2, 3)), [np.zeros((3, 4))]],
            in_values_preprocessor=lambda in_vars, make_var_func: (in_vars, []),
        )


def test_a_variant_must_be_named():
    given = (pattern(dense, 1, 2), *matcher.DEFAULT_GRAPH_PATTERNS)
    nameless = matcher.GraphPattern(
        "nameless", tags.layer_tag, dense, first_dot, given[0].example_args
    )
    with pytest.raises(ValueError, match=r"'nameless' has the tag layer_tag, so .* LayerMetaData"):
        found(together, PARAMS, X, graph_patterns=(nameless,))


def test_names_of_default_patterns_can_be_skipped():
    func = lambda params, x: REGISTER(jnp.sum(jnp.tanh(x @ params["w"]), axis=1) @ params["out"])
    names = ["repeated[1]_dense_no_bias_no_reshape", "conv2d_with_bias"]
    given = {name: PARAMS[name] for name in ("w", "out")}
    with as_users_run():
        tagged = matcher.auto_register_tags(func, (given, X), patterns_to_skip=names)
    labels = [tagged._param_labels[v] for v in tagged._func_graph.params_vars]
    assert labels == [["Auto[tag_variant=dense(0)]"], ["Auto[tag_variant=generic(0)]"]]


def test_repeated_layers_of_any_number_of_axes_have_the_same_curvature():
    """The tag selects a block; what the layer computes is known as for any dense layer."""

    def attention(params, x):
        y = jnp.einsum("btd,dhk->bthk", x, params["w"]) + params["b"]
        return REGISTER(jnp.sum(jnp.einsum("bthk,hkd->btd", jnp.tanh(y), params["o"]), axis=1))

    shapes = {"w": (3, 2, 4), "b": (2, 4), "o": (2, 4, 3)}
    params = {name: jax.random.normal(key(k), s) for k, (name, s) in enumerate(shapes.items())}
    matrices = []
    with as_users_run():
        for options in (
            {},
            {
                "graph_patterns": matcher.DEFAULT_GRAPH_PATTERNS,
                "layer_tag_to_block_ctor": {"repeated_dense": curvax.DenseTwoKroneckerFactored},
            },
        ):
            estimator = curvax.BlockDiagonalCurvature(attention, **options)
            state = estimator.init(key(4), (params, X), None, None)
            state = estimator.update_curvature_matrix_estimate(
                state, 0.0, 1.0, len(X), key(5), (params, X), None, "fisher_exact"
            )
            matrices.append(estimator.to_dense_matrix(state))
    np.testing.assert_allclose(matrices[1], matrices[0], rtol=1e-10)


def test_tagged_functions_name_the_layers_of_parameters():
    with as_users_run():
        tagged = matcher.auto_register_tags(together, (PARAMS, X), compute_only_loss_tags=False)
        np.testing.assert_allclose(tagged(PARAMS, X), together(PARAMS, X), rtol=1e-6)
    tagged.check_multiple_registrations()
    graph = tagged._func_graph
    labels = ["|".join(tagged._param_labels[v]) for v in graph.params_vars]
    assert jax.tree.unflatten(graph.params_tree, labels) == {
        "w": "Auto[tag_variant=repeated_dense(0)]",
        "b": "Auto[tag_variant=repeated_dense(0)]",
        "out": "Auto[tag_variant=dense(0)]",
    }
    assert len(graph.losses_eqns) == 1
    assert len(graph.manual_registrations) == 2


def test_comparators_can_be_extended():
    rules = matcher.GraphMatcherComparator()
    first = lambda f, *args: jax.make_jaxpr(f)(*args).eqns[0]
    one, other = first(lambda x: x**2, 1.0), first(lambda x: x**3, 1.0)
    assert not rules.are_equivalent(one, other)
    rules.add_special_equivalence_rule("integer_pow", lambda a, b: True)
    assert rules.are_equivalent(one, other)
    rules.add_commutative_op_name("max")
    assert rules.commutative_ops_names == {"add", "mul", "max"}
    with pytest.raises(ValueError, match="already"):
        rules.add_commutative_op_name("max")


@pytest.mark.parametrize("name", ["match_pattern", "GraphMatch", "clean_jaxpr", "make_jax_graph"])
def test_what_is_not_documented_says_so(name):
    func = getattr(matcher, name)
    arguments = inspect.signature(func).parameters.values()
    values = {str: "", bool: True}
    required = [values.get(p.annotation) for p in arguments if p.default is p.empty]
    with pytest.raises(NotImplementedError, match="does not describe"):
        func(*required)


def energy_of(local_energy):
    """An energy with a rule of its own, which registers the logarithm of the wavefunction."""

    def log_psi(params, x):
        return jax.vmap(one_walker, in_axes=(None, 0))(params, x)[:, 0]

    @jax.custom_jvp
    def energy(params, x):
        return jnp.mean(local_energy(log_psi(params, x), x))

    @energy.defjvp
    def rule(primals, tangents):
        params, x = primals
        value, slope = jax.jvp(log_psi, (params, x), (tangents[0], jnp.zeros_like(x)))
        REGISTER(value[:, None])
        each = local_energy(value, x)
        return jnp.mean(each), jnp.mean((each - jnp.mean(each)) * slope)

    return energy


def hand_made_value_and_grad(params, x):
    energy = energy_of(lambda value, x: value**2 + jnp.sum(x**2, axis=(1, 2)))
    return jax.value_and_grad(energy)(params, x)


def step(**options):
    optimizer = curvax.Optimizer(
        hand_made_value_and_grad,
        l2_reg=0.0,
        learning_rate_schedule=lambda step: 0.1,
        momentum_schedule=lambda step: 0.0,
        damping_schedule=lambda step: 1e-2,
        estimation_mode="fisher_exact",
        inverse_update_period=1,
        num_burnin_steps=0,
        donate_buffers=False,
        **options,
    )
    state = optimizer.init(PARAMS, key(2), X)
    params, _, _ = optimizer.step(PARAMS, state, key(3), batch=X)
    return params, {row.block for row in optimizer.estimator.report().rows}


class WalkerDense(curvax.DenseTwoKroneckerFactored):
    """A block of one's own for repeated dense layers: each use counts as an example."""

    def fixed_scale(self):
        ((batch, *repeats, _),) = self.inputs_shapes
        del batch
        return float(np.prod(repeats))

    def update_curvature_matrix_estimate(
        self, state, estimation_data, ema_old, ema_new, batch_size, pmap_axis_name
    ):
        (x,), (dy,) = estimation_data["inputs"], estimation_data["outputs_tangents"]
        assert x.shape[0] == batch_size
        data = {
            **estimation_data,
            "inputs": (x.reshape(-1, x.shape[-1]),),
            "outputs_tangents": (dy.reshape(-1, dy.shape[-1]),),
        }
        return super().update_curvature_matrix_estimate(
            state, data, ema_old, ema_new, x.size // x.shape[-1], pmap_axis_name
        )


def test_a_rule_of_ones_own_with_a_pattern_and_a_block_of_ones_own():
    with as_users_run():
        plain, _ = step()
        given = {"graph_patterns": patterns(dense, "walker_dense")}
        blocks = {"walker_dense": WalkerDense}
        own, names = step(auto_register_kwargs=given, layer_tag_to_block_ctor=blocks)
    assert names == {"WalkerDense", "DenseTwoKroneckerFactored"}
    for name, before in PARAMS.items():
        assert jnp.max(jnp.abs(plain[name] - before)) > 1e-4
        np.testing.assert_allclose(own[name], plain[name], rtol=1e-9, atol=1e-12)


def test_a_block_for_a_tag_that_the_model_does_not_have_is_accepted():
    estimator = curvax.BlockDiagonalCurvature(
        lambda w, x: REGISTER(x @ w), layer_tag_to_block_ctor={"walker_dense": WalkerDense}
    )
    estimator.finalize((PARAMS["w"], X[:, 0]))
    assert estimator.num_blocks == 1
    misspelt = curvax.BlockDiagonalCurvature(
        lambda w, x: REGISTER(x @ w), layer_tag_to_block_ctor={"dens": WalkerDense}
    )
    with pytest.raises(ValueError, match="no block is known for the tag 'dens_tag'"):
        misspelt.finalize((PARAMS["w"], X[:, 0]))
