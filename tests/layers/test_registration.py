"""Registration besides finding layers: tags by hand, patterns, options, and errors."""

import jax
import jax.numpy as jnp
import pytest
from jax.flatten_util import ravel_pytree

import curvax
from curvax import (
    DEFAULT_GRAPH_PATTERNS,
    GraphMatcherComparator,
    GraphPattern,
    LayerTag,
    RegistrationError,
    auto_register_tags,
    explain_registration,
)
from helpers import assert_same
from layers.models import B, W, X, biased, normal

PARAMS = {"b": B, "w": W}


def register(y):
    return curvax.register_squared_error_loss(y)


def dense(p, x):
    return jnp.sum(register(biased(x @ p["w"], p["b"])) ** 2)


def tags(f, params=PARAMS, x=X, **options):
    return {row.path[2:-2]: row.tag for row in explain_registration(f, (params, x), **options).rows}


class TestByHand:
    def test_a_tag_covers_its_use(self):
        def f(p, x):
            y = biased(x @ p["w"].T, p["b"])
            return jnp.sum(register(curvax.register_dense(y, x, p["w"].T, p["b"])) ** 2)

        report = explain_registration(f, ({"w": W.T, "b": B}, X))
        assert [(row.tag, row.sites, row.reason) for row in report.rows] == [
            ("dense_tag", 1, "")
        ] * 2

    def test_a_use_that_it_does_not_cover_is_reported(self):
        def f(p, x):
            y = curvax.register_dense(x @ p["w"], x, p["w"])
            return jnp.sum(register(y * jnp.sum(x @ p["w"])) ** 2)

        (row,) = explain_registration(f, ({"w": W}, X)).rows
        assert row.reason.startswith("1 more use is not covered by the layer")

    def test_a_generic_tag(self):
        f = lambda p, x: jnp.sum(register(x @ curvax.register_generic(p["w"])) ** 2)
        assert tags(f, {"w": W}) == {"w": "generic_tag"}

    def test_registering_an_array_that_is_no_parameter_is_rejected(self):
        def f(p, x):
            w = jnp.sin(p["w"])
            return jnp.sum(register(curvax.register_dense(x @ w, x, w)) ** 2)

        with pytest.raises(ValueError, match="dense_tag was called with something else"):
            tags(f, {"w": W})

    @pytest.mark.parametrize("is_whole", [False, True])
    def test_a_parameter_twice_is_rejected(self, is_whole):
        def tagged(p, x):
            if is_whole:
                y = biased(x * jnp.broadcast_to(p["w"], x.shape), p["w"])
                return register(curvax.register_scale_and_shift(y, x, p["w"], p["w"]))
            y = biased(x @ p["w"][:3], p["w"][3])
            return register(curvax.register_dense(y, x, p["w"][:3], p["w"][3]))

        params = {"w": normal(1, 3) if is_whole else normal(1, 4, 2)}
        for call in (auto_register_tags, explain_registration):
            with pytest.raises(ValueError, match=r"more than once: its parameters 0 and 1 are"):
                call(tagged, (params, X))
        estimator = curvax.BlockDiagonalCurvature(tagged, auto_register_tags=False)
        with pytest.raises(ValueError, match="Leave the tag out"):
            estimator.init(jax.random.key(0), (params, X), None, None)

    def test_what_is_recommended_instead_works(self):
        untagged = lambda p, x: register(biased(x @ p["w"][:3], p["w"][3]))
        assert tags(untagged, {"w": normal(1, 4, 2)}, strict=True) == {"w": "dense_tag"}
        report = explain_registration(untagged, ({"w": normal(1, 4, 2)}, X))
        assert [(row.sites, row.reason) for row in report.rows] == [(2, "")]

        def arrays(p, x):
            y = biased(x @ p["w"], p["b"])
            return register(curvax.register_dense(y, x, p["w"], p["b"]))

        assert tags(arrays, strict=True) == {"b": "dense_tag", "w": "dense_tag"}

        def once(p, x):
            tag = LayerTag("own_tag", num_inputs=1, num_outputs=1)
            return register(tag.bind(biased(x @ p["w"][:3], p["w"][3]), x, p["w"]))

        assert tags(once, {"w": normal(1, 4, 2)}, strict=True) == {"w": "own_tag"}

    def test_no_block_has_a_parameter_twice(self, monkeypatch):
        """Should it ever get there in spite of all."""
        from curvax.layers.detection import layers

        def f(p, x):
            y = biased(x @ p["w"][:3], p["w"][3])
            return register(curvax.register_dense(y, x, p["w"][:3], p["w"][3]))

        monkeypatch.setattr(layers, "_check_once", lambda *_: None)
        estimator = curvax.BlockDiagonalCurvature(f)
        with pytest.raises(ValueError, match=r"\['w'\] are in none, .* \(\(0, 0\),\)"):
            estimator.init(jax.random.key(0), ({"w": normal(1, 4, 2)}, X), None, None)

    def test_two_layers_of_one_parameter(self):
        def f(p, x):
            y = curvax.register_dense(x @ p["w"], x, p["w"])
            z = curvax.register_conv(x @ p["w"], x, p["w"])
            return jnp.sum(register(y * z) ** 2)

        with pytest.raises(RegistrationError, match=r"\['w'\] is registered in 2 layers"):
            auto_register_tags(f, ({"w": W}, X))
        auto_register_tags(f, ({"w": W}, X), allow_multiple_registrations=True)


SQUARED = LayerTag("squared_tag", 1, 1)


def squared_pattern(**options):
    return GraphPattern(
        name="squared",
        tag_primitive=SQUARED,
        compute_func=lambda x, params: (x @ params[0] + params[1]) ** 2,
        parameters_extractor_func=lambda equations: {"last": equations[0].primitive.name},
        example_args=[jnp.zeros((2, 3)), [jnp.zeros((3, 4)), jnp.zeros((1, 4))]],
        **options,
    )


def squared(p, x):
    return jnp.sum(register((jnp.sin(x) @ p["w"] + p["b"]) ** 2))


ROW = {"w": W, "b": B[None]}


class TestPatterns:
    def test_user_supplied_patterns_come_first(self):
        patterns = (squared_pattern(), *DEFAULT_GRAPH_PATTERNS)
        found = tags(squared, ROW, graph_patterns=patterns)
        assert found == {"w": "squared_tag", "b": "squared_tag"}

    def test_the_tag_gets_what_was_found(self):
        tagged = auto_register_tags(
            squared, (ROW, X), compute_only_loss_tags=False, graph_patterns=(squared_pattern(),)
        )
        jaxpr = jax.make_jaxpr(tagged)(ROW, X).jaxpr
        (eqn,) = [eqn for eqn in jaxpr.eqns if eqn.primitive is SQUARED]
        assert eqn.params["last"] == "integer_pow"
        assert [v.aval.shape for v in eqn.invars] == [(5, 4), (5, 3), (3, 4), (1, 4)]
        assert_same(tagged(ROW, X), squared(ROW, X))

    def test_blocks_of_single_gradients_know_what_a_linear_pattern_computes(self):
        """Twice in a model, and again with the output of the first."""
        symmetric = GraphPattern(
            name="symmetric",
            tag_primitive=LayerTag("symmetric_tag", num_inputs=1, num_outputs=1),
            compute_func=lambda x, params: x @ (params[0] + params[0].T),
            parameters_extractor_func=lambda _: {},
            example_args=[jnp.zeros((2, 3)), [jnp.zeros((3, 3))]],
        )
        model = lambda p, x: jnp.sin(x @ (p["w"] + p["w"].T)) @ (p["w"] + p["w"].T)
        estimator = curvax.BlockDiagonalCurvature(
            lambda p, x: register(model(p, x)),
            layer_tag_to_block_ctor={"symmetric": curvax.Full},
            graph_patterns=(symmetric,),
        )
        args = {"w": normal(3, 3, 3)}, X
        state = estimator.init(jax.random.key(0), args, None, None)
        state = estimator.update_curvature_matrix_estimate(
            state, 0.0, 1.0, len(X), jax.random.key(1), args, None, "fisher_exact"
        )
        flat, unflatten = ravel_pytree(args[0])
        rows = jax.jacrev(lambda flat: model(unflatten(flat), X).reshape(-1))(flat)
        # A squared error is the negative logarithm of a normal density of variance one half.
        expected = 2 * rows.T @ rows / len(X)
        assert_same(estimator.to_dense_matrix(state), expected, 1e-10, 1e-10)

    def test_they_reject_patterns_that_are_not_linear(self):
        estimator = curvax.BlockDiagonalCurvature(
            squared,
            layer_tag_to_block_ctor={"squared": curvax.Full},
            graph_patterns=(squared_pattern(),),
        )
        state = estimator.init(jax.random.key(0), (ROW, X), None, None)
        with pytest.raises(NotImplementedError, match="nothing is known of what a layer tagged"):
            estimator.update_curvature_matrix_estimate(
                state, 0.0, 1.0, len(X), jax.random.key(1), (ROW, X), None, "fisher_exact"
            )

    def test_operands_that_commute_may_be_in_any_order(self):
        f = lambda p, x: jnp.sum(register((p["b"] + x @ p["w"]) ** 2))
        assert set(tags(f, ROW, graph_patterns=(squared_pattern(),)).values()) == {"squared_tag"}

    def test_two_parts_of_one_parameter_do_not_match(self):
        f = lambda p, x: jnp.sum(register((x @ p["w"][:3] + p["w"][3:]) ** 2))
        found = tags(f, {"w": normal(1, 4, 2)}, graph_patterns=(squared_pattern(),))
        assert found == {"w": "generic_tag"}  # The default patterns are left out.
        patterns = (squared_pattern(), *DEFAULT_GRAPH_PATTERNS)
        found = tags(f, {"w": normal(1, 4, 2)}, graph_patterns=patterns)
        assert found == {"w": "dense_tag"}

    def test_values_can_be_prepared(self):
        halved = lambda values: [values[0] / 2, *values[1:]]
        pattern = squared_pattern(in_values_preprocessor=halved)
        tagged = auto_register_tags(squared, (ROW, X), graph_patterns=(pattern,))
        names = [eqn.primitive.name for eqn in jax.make_jaxpr(tagged)(ROW, X).jaxpr.eqns]
        assert names.index("div") < names.index("squared_tag")

    def test_another_computation_does_not_match(self):
        f = lambda p, x: jnp.sum(register((x @ p["w"] + p["b"]) ** 3))
        found = tags(f, ROW, graph_patterns=(squared_pattern(),))
        assert found == {"w": "generic_tag", "b": "generic_tag"}

    def test_unless_the_comparator_says_so(self):
        class AnyPower(GraphMatcherComparator):
            ignored = GraphMatcherComparator.ignored | {"y"}

        f = lambda p, x: jnp.sum(register((x @ p["w"] + p["b"]) ** 3))
        options = {"graph_patterns": (squared_pattern(),), "graph_matcher_rules": AnyPower()}
        assert tags(f, ROW, **options) == {"w": "squared_tag", "b": "squared_tag"}

    def test_it_can_be_skipped(self):
        patterns = (squared_pattern(), *DEFAULT_GRAPH_PATTERNS)
        found = tags(squared, ROW, graph_patterns=patterns, patterns_to_skip=["squared"])
        assert found == {"w": "dense_tag", "b": "dense_tag"}

    @pytest.mark.parametrize("pattern", DEFAULT_GRAPH_PATTERNS, ids=lambda p: p.name)
    def test_default_patterns_are_found_by_meaning_and_can_be_skipped(self, pattern):
        x, params = pattern.example_args
        f = lambda p, x: jnp.sum(register(pattern.compute_func(x, p)) ** 2)
        as_64 = lambda tree: jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), tree)
        rows = lambda **options: explain_registration(f, (as_64(params), as_64(x)), **options).rows
        with jax.numpy_rank_promotion("allow"):
            found, skipped = rows(), rows(patterns_to_skip=[pattern.name])
        assert {row.tag for row in found} == {pattern.tag_primitive.name}
        assert len({row.layer for row in found}) == 1
        # Without the pattern, a single parameter is generic, and two are layers of their own.
        apart = [pattern.tag_primitive.name, "scale_and_shift_tag"]
        assert [row.tag for row in skipped] == (["generic_tag"] if len(params) == 1 else apart)
        assert len({row.layer for row in skipped}) == len(params)

    def test_a_skipped_bias_is_a_shift(self):
        found = tags(dense, patterns_to_skip=["dense_with_bias"])
        assert found == {"w": "dense_tag", "b": "scale_and_shift_tag"}

    def test_only_generic(self):
        assert set(tags(dense, register_only_generic=True).values()) == {"generic_tag"}

    @pytest.mark.usefixtures("unchecked")
    @pytest.mark.parametrize("names", [["densewithbias"], "dense_with_bias"], ids=str)
    def test_unknown_names(self, names):
        with pytest.raises(ValueError, match="the patterns are conv2d_no_bias, "):
            tags(dense, patterns_to_skip=names)


class TestOtherShapes:
    def test_a_tagged_function_takes_other_batches(self):
        tagged = auto_register_tags(dense, (PARAMS, X))
        ((prediction,),) = tagged(PARAMS, X[:2])
        assert prediction.shape == (2, 4)

    def test_shapes_are_enough_to_register(self):
        shapes = jax.eval_shape(lambda: (PARAMS, X))
        assert explain_registration(dense, shapes).coverage == 1

    def test_parameters_may_be_any_argument(self):
        f = lambda x, p: dense(p, x)
        assert explain_registration(f, (X, PARAMS), params_index=1).coverage == 1
        assert explain_registration(f, (X, PARAMS), params_index=-1).coverage == 1


def test_a_weight_decay_is_no_use():
    f = lambda p, x: dense(p, x) + jnp.sum(p["w"] ** 2)
    assert tags(f) == {"w": "dense_tag", "b": "dense_tag"}


def test_a_loss_inside_a_loop():
    def f(p, x):
        def step(carry, x):
            y = register(x[None] @ p["w"])
            return carry + jnp.sum(y**2), None

        return jax.lax.scan(step, 0.0, x)[0]

    tagged = auto_register_tags(f, ({"w": W}, X))
    ((prediction,),) = tagged({"w": W}, X)
    assert_same(prediction, (X @ W)[:, None])


def test_through_custom_derivatives():
    @jax.custom_jvp
    def product(w, x):
        return x @ w

    product.defjvp(lambda primals, tangents: (product(*primals), primals[1] @ tangents[0]))
    f = lambda p, x: jnp.sum(register(product(p["w"], x)) ** 2)
    assert tags(f, {"w": W}) == {"w": "generic_tag"}
    assert tags(f, {"w": W}, through_custom_derivatives=True) == {"w": "dense_tag"}


class TestReport:
    def test_it_prints_as_a_table(self):
        f = lambda p, x: jnp.sum(register((x @ p["w"]) * jnp.exp(p["s"])) ** 2)
        params = {"w": W, "s": jnp.ones((5, 4))}
        text = str(explain_registration(f, (params, X)))
        lines = text.splitlines()
        assert lines[0].split() == ["parameter", "shape", "layer", "tag", "sites", "remark"]
        assert lines[2].startswith("['s']")
        assert "it is used by `exp`" in lines[2]
        assert "losses: NormalMeanNegativeLogProbLoss" in text
        assert lines[-1] == "37.5 % of the elements are in layers of a known kind"

    def test_layers_have_the_names_of_their_parameters(self):
        params = {"net": [{"w": W, "b": B}]}
        f = lambda p, x: dense(p["net"][0], x)
        report = explain_registration(f, (params, X))
        assert {row.layer for row in report.rows} == {"['net'][0]"}


class TestErrors:
    def test_no_loss(self):
        with pytest.raises(RegistrationError, match="registers no loss"):
            auto_register_tags(lambda p, x: jnp.sum(x @ p["w"]), ({"w": W}, X))

    def test_a_loss_inside_cond(self):
        def f(p, x):
            y = x @ p["w"]
            return jax.lax.cond(x[0, 0] > 0, lambda: jnp.sum(register(y)), lambda: jnp.sum(y))

        with pytest.raises(RegistrationError, match=r"registered at .*test_registration.py:\d+"):
            auto_register_tags(f, ({"w": W}, X))

    def test_a_loss_that_a_gradient_drops(self):
        def f(p, x):
            def product(w):
                y = x @ w
                register(y)
                return jnp.sum(y**2)

            return jax.checkpoint(product)(p["w"])

        gradient = jax.grad(f)
        with pytest.raises(RegistrationError, match="is not in the traced program"):
            auto_register_tags(gradient, ({"w": W}, X))

    def test_a_parameter_that_no_loss_depends_on(self):
        params = {**PARAMS, "other": W, "third": B}
        with pytest.raises(RegistrationError, match=r"no registered .* \['other'\], \['third'\]"):
            auto_register_tags(dense, (params, X))
        auto_register_tags(dense, (params, X), allow_unused_params=True)
        report = explain_registration(dense, (params, X))
        assert [row.reason for row in report.rows] == [
            "",
            "no loss depends on it",
            "no loss depends on it",
            "",
        ]

    @pytest.mark.parametrize("index", [2, -3])
    def test_no_such_argument(self, index):
        with pytest.raises(ValueError, match=f"params_index={index} is out of range"):
            auto_register_tags(dense, (PARAMS, X), index)


WRAPPED = {
    "bare": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "twice": lambda f: jax.checkpoint(jax.checkpoint(f)),
}


class TestWhatNoLossDependsOn:
    """It is not looked at, also inside what the losses depend on."""

    @staticmethod
    def loss(w, x):
        y = jnp.tanh(x @ w)
        unused = jnp.cos(x) @ w
        curvax.register_squared_error_loss(y)
        return jnp.sum(y**2) + jnp.sum(w**2), unused

    @pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
    def test_wrapped(self, wrap):
        report = curvax.explain_registration(wrap(self.loss), (W, X))
        assert [(row.tag, row.sites) for row in report.rows] == [("dense_tag", 1)]

    def test_in_a_loop(self):
        """A carry that only another output needs; one that is needed by way of another."""

        def f(p, x):
            def step(carry, _):
                a, b, c, key = carry
                key, own = jax.random.split(key)
                noise = jax.random.normal(own, a.shape)
                a, b, c = jnp.tanh(b @ p["w"]), a + noise, c + jnp.sum(p["w"] ** 2)
                return (a, b, c, key), jnp.sin(p["v"])

            carry = x, x, jnp.zeros(()), jax.random.key(0)
            (a, _, c, _), ys = jax.lax.scan(step, carry, None, length=3)
            curvax.register_squared_error_loss(a @ p["v"])
            return c + jnp.sum(ys)

        p = {"w": normal(0, 3, 3), "v": normal(1, 3, 2)}
        report = curvax.explain_registration(f, (p, X))
        assert [(row.tag, row.sites) for row in report.rows] == [("dense_tag", 1)] * 2
        tagged = curvax.auto_register_tags(f, (p, X))
        ((y,),) = tagged(p, X)
        assert y.shape == (5, 2)
        whole = curvax.auto_register_tags(f, (p, X), compute_only_loss_tags=False)
        assert_same(whole(p, X), f(p, X), 1e-12, 1e-12)


class TestTagsThatCannotBeUsed:
    """A tag that is lost is an error, whatever was traced before."""

    def test_one_of_several_losses_at_one_line(self):
        def f(w, x):
            y = x @ w
            return register(y).sum() + jax.lax.cond(
                x[0, 0] > 0, lambda: register(y).sum(), lambda: 0.0
            )

        f = jax.jit(f)
        for _ in range(2):
            with pytest.raises(RegistrationError, match=r"Loss_tag .* is inside `cond`"):
                curvax.loss_tags_vjp(f)((W, X))

    def test_a_layer(self):
        def f(w, x):
            tagged = lambda: curvax.register_dense(x @ w, x, w)
            return register(jax.lax.cond(x[0, 0] > 0, tagged, lambda: x @ w))

        with pytest.raises(RegistrationError, match="dense_tag is inside `cond`"):
            explain_registration(f, (W, X))

    @pytest.mark.parametrize("what", ["layer", "loss"])
    def test_inside_custom_derivatives(self, what):
        @jax.custom_vjp
        def own(x, w):
            return curvax.register_dense(x @ w, x, w) if what == "layer" else register(x @ w)

        own.defvjp(lambda x, w: (own(x, w), (x, w)), lambda r, g: (g @ r[1].T, 7 * r[0].T @ g))
        f = lambda w, x: own(x, w) if what == "loss" else register(own(x, w))
        for process in (curvax.loss_tags_vjp, curvax.layer_tags_vjp):
            with pytest.raises(RegistrationError, match="`own`, which has derivatives of its own"):
                process(f)((W, X))
        curvax.layer_tags_vjp(f, through_custom_derivatives=True)((W, X))


class TestWhatATagDoesNotCover:
    def test_a_value_that_goes_around_it(self):
        def f(p, x):
            y = x @ p["w"]
            return register(jnp.tanh(curvax.register_dense(y, x, p["w"])) + 100 * y)

        report = explain_registration(f, ({"w": W}, X))
        assert "1 more use is not covered" in report.rows[0].reason
        with pytest.raises(RegistrationError, match="not covered by the layer"):
            explain_registration(f, ({"w": W}, X), strict=True)

    def test_a_value_inside_a_pattern(self):
        pattern = squared_dense()

        def f(p, x):
            h = x @ p["w"]
            return register(h**2 + 100 * h)

        report = explain_registration(f, ({"w": W}, X), graph_patterns=[pattern])
        assert report.rows[0].tag == "squared_tag"
        assert "1 more use is not covered" in report.rows[0].reason
        plain = lambda p, x: register((x @ p["w"]) ** 2)
        (row,) = explain_registration(plain, ({"w": W}, X), graph_patterns=[pattern]).rows
        assert (row.tag, row.reason) == ("squared_tag", "")


def squared_dense():
    tag = LayerTag("squared_tag", num_inputs=1, num_outputs=1)
    compute = lambda x, params: (x @ params[0]) ** 2
    return GraphPattern("squared", tag, compute, lambda _: {}, [X, [W]])


def test_a_pattern_without_the_bias_that_follows():
    tag = LayerTag("product_tag", num_inputs=1, num_outputs=1)
    pattern = GraphPattern("product", tag, lambda x, p: x @ p[0], lambda _: {}, [X, [W]])
    patterns = (pattern, *DEFAULT_GRAPH_PATTERNS)
    report = explain_registration(dense, (PARAMS, X), graph_patterns=patterns)
    assert [row.tag for row in report.rows] == ["scale_and_shift_tag", "product_tag"]


def test_a_pattern_of_a_scaled_weight():
    f = lambda p, x: register((x @ (2 * p["w"])) ** 2)
    patterns = (squared_dense(), *DEFAULT_GRAPH_PATTERNS)
    (row,) = explain_registration(f, ({"w": W}, X), graph_patterns=patterns).rows
    assert row.tag == "dense_tag"


def test_a_generic_tag_by_hand():
    f = lambda p, x: register(x @ curvax.register_generic(p["w"]))
    losses, vjp = curvax.layer_tags_vjp(f)(({"w": W}, X))
    (layer,) = vjp([losses[0].parameter_dependants])
    assert_same(layer["params_tangents"], layer["outputs_tangents"])
    assert_same(layer["params_tangents"][0], X.T @ (X @ W), 1e-12, 1e-12)


def test_functions_of_constants_are_no_tracers():
    f = lambda p, x: register(x @ (p["w"] / jnp.sqrt(jnp.asarray(3.0))))
    tagged = auto_register_tags(f, ({"w": W}, X))
    first = jax.jit(tagged)({"w": W}, X[:3])
    assert_same(tagged({"w": W}, X[:3]), first, 1e-12, 1e-12)


def test_unused_parameters_can_be_allowed_in_a_report():
    f = lambda p, x: register(x @ p["w"])
    report = explain_registration(f, (PARAMS, X), allow_unused_params=True)
    assert [row.tag for row in report.rows] == ["generic_tag", "dense_tag"]


@pytest.mark.parametrize(
    "f",
    [
        lambda p, x: x @ p["w"][:, :0] @ jnp.zeros((0, 4)) + x @ p["w"],
        lambda p, x: jnp.concatenate([biased(x @ p["w"], p["b"])[:, :0], x], axis=1),
    ],
)
def test_sizes_of_zero(f):
    explain_registration(lambda p, x: register(f(p, x)), (PARAMS, X), allow_unused_params=True)
    empty = {"w": jnp.zeros((3, 0)), "b": jnp.zeros(0)}
    f = lambda p, x: register(jnp.concatenate([biased(x @ p["w"], p["b"]), x], axis=1))
    explain_registration(f, (empty, X))


@pytest.mark.parametrize(
    "wrong",
    [jnp.arange(3), jax.random.key(0), jnp.tanh, True],
    ids=["int", "key", "function", "bool"],
)
def test_parameters_that_are_no_numbers(wrong):
    with pytest.raises(TypeError, match=r"\['n'\] \(.*\) are not. Keep them out"):
        explain_registration(dense, (PARAMS | {"n": wrong}, X))
