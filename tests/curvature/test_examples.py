"""Blocks that claim to be exact are, or they refuse: however a model takes its examples.

The oracle is the Gauss-Newton matrix from the Jacobian of the model of the whole batch, in float64.
An exact mode does not depend on the seed. (`example_models` has the models.)
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

import curvax
from curvature import example_models as models
from curvature.example_models import (
    DIAGONAL,
    FULL,
    FUNCTIONS,
    MAPS,
    PARAMS,
    batch,
    estimated,
    loss_of,
    of_examples,
    verdict,
)

ONE, PLAIN, TWICE, RECURRENT, BACKWARDS = (
    models.one_position,
    models.plain,
    models.twice,
    models.recurrent,
    models.backwards,
)

EXACT = [
    (ONE, "map", 1, 4, DIAGONAL),
    (RECURRENT, "map", 1, 2, FULL),
    (PLAIN, "map in chunks", 4, 6, FULL),
    (TWICE, "chunked_vmap", 2, 5, DIAGONAL),
    (ONE, "reversed scan in chunks", 2, 5, FULL),
    (TWICE, "chunked_vmap", 4, 6, DIAGONAL),
    (TWICE, "map", 1, 3, FULL),
    (TWICE, "map in chunks", 2, 5, FULL),
    (BACKWARDS, "reversed scan", 1, 3, DIAGONAL),
    (TWICE, "nested", 2, 4, DIAGONAL),
]
"""Functions of one example, ways to run them, chunk and batch sizes that must not be refused."""


@pytest.mark.parametrize(
    ("function", "mapped", "chunk", "size", "ctors"),
    [pytest.param(*case, marks=[] if k < 6 else pytest.mark.slow) for k, case in enumerate(EXACT)],
    ids=[f"{f.__name__}, {mapped}, {c} of {n}" for f, mapped, c, n, _ in EXACT],
)
def test_examples_in_loops_are_distinguished(function, mapped, chunk, size, ctors):
    assert verdict(of_examples(function, mapped, chunk), batch(size), ctors) == "exact"


MOST = settings.default.max_examples if settings.default is not None else 6
FEW = settings(max_examples=2 if MOST <= 6 else MOST)
"""Each case is a program to compile."""


@FEW
@given(
    st.sampled_from(FUNCTIONS),
    st.sampled_from(list(MAPS)),
    st.integers(1, 4),
    st.integers(1, 6),
    st.sampled_from([FULL, DIAGONAL]),
)
@example(TWICE, "strided", 2, 4, FULL)
@example(RECURRENT, "shuffled", 1, 3, DIAGONAL)
def test_however_examples_run_blocks_are_exact_or_rejected(function, mapped, chunk, size, ctors):
    if mapped in ("chunked_vmap", "chunked_vmap, checkpointed") or size >= chunk:
        verdict(of_examples(function, mapped, min(chunk, size)), batch(size), ctors)


WHOLE = {
    "attention": (models.attention, 3, 3, "exact"),
    "only features and positions are moved": (models.shuffled_features, 3, 2, "exact"),
    "interaction of data alone": (models.normalised_data, 3, 2, "exact"),
    "a scan over time": (models.time_first, 2, 2, "exact"),
    "two loops": (models.in_two_loops, 3, 2, "exact"),
    "merged, one example": (models.merged, 1, 3, "exact"),
    "merged": (models.merged, 5, 2, "exact"),
    "merged, as many positions": (models.merged, 3, 3, "exact"),
    "time-major": (models.time_major, 5, 2, "exact"),
    "time-major, as many positions": (models.time_major, 3, 3, "exact"),
    "merged and split again": (models.split_again, 4, 3, "exact"),
    "time-major data, as many positions": (models.time_major_data, 3, 3, "exact"),
    "a row of the loss for each position alone": (models.rows_of_positions, 3, 2, "exact"),
    "concatenated, of different lengths": (models.ragged, 4, 2, "cannot be followed through"),
    "merged and split otherwise": (models.split_differently, 5, 2, "examples unknown"),
    "scrambled": (models.scrambled, 5, 2, "cannot be followed through `reshape`"),
    "scrambled, as many positions": (models.scrambled, 3, 3, "exact"),
    "a loop over all": (models.mapped_tokens, 3, 2, "cannot be followed through `scan`"),
    "a row of the loss for each position": (
        models.merged_rows,
        5,
        2,
        "have several rows of a loss",
    ),
    "batch size written out": (models.with_size_written_out(5), 5, 2, "exact"),
    "batch size written out, as many positions": (models.with_size_written_out(3), 3, 3, "exact"),
    "centred": (models.centred, 4, 2, "examples interact, by `reduce_sum`"),
    "batch normalisation": (models.normalised, 4, 2, "examples interact, by `reduce_sum`"),
    "centred by a constant": (models.centred_by_a_constant, 4, 2, "exact"),
    "rolled": (models.rolled, 4, 2, "examples interact, by `concatenate`"),
    "summed up": (models.summed_up, 4, 2, "examples interact, by `cumsum`"),
    "in pairs": (models.in_pairs, 4, 2, "examples interact, by `dot_general`"),
    "handed on": (models.handed_on, 4, 2, "examples interact, by `scan`"),
    "reversed between two uses": (models.reversed_between, 4, 2, "examples interact, by `rev`"),
}
"""Models of a batch, how many examples and positions, and what is said of the blocks."""

REFUSED = [name for name, case in WHOLE.items() if case[3] != "exact"]


SLOW = ["only features and positions are moved", "a scan over time", "merged, one example"]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SLOW else [])
        for name in WHOLE
        if name not in REFUSED
    ],
)
def test_models_whose_examples_stay_apart(name):
    model, size, positions, _ = WHOLE[name]
    ctors = FULL if size == positions else DIAGONAL
    assert verdict(model, batch(size, positions), ctors) == "exact"


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_blocks_reject(name):
    ctors = FULL if REFUSED.index(name) % 2 else DIAGONAL
    model, size, positions, why = WHOLE[name]
    args = PARAMS, batch(size, positions)
    estimator = curvax.BlockDiagonalCurvature(loss_of(model), layer_tag_to_block_ctor=ctors)
    with pytest.raises(ValueError, match=re.escape(why)):
        estimator.init(jax.random.key(0), args, None, None)


@FEW
@given(st.sampled_from(sorted(WHOLE)), st.integers(1, 4), st.integers(1, 4), st.booleans())
@example("merged", 2, 1, True)
@example("merged and split otherwise", 2, 2, True)
def test_whatever_a_model_does_blocks_are_exact_or_rejected(name, size, positions, full):
    model = models.with_size_written_out(size) if "written out" in name else WHOLE[name][0]
    verdict(model, batch(size, positions), FULL if full else DIAGONAL)


class TestWhatIsSaid:
    """The registration report, strict=True, and what errors recommend."""

    @pytest.mark.parametrize("name", REFUSED)
    def test_the_registration_report_says_it(self, name):
        model, size, positions, why = WHOLE[name]
        args = PARAMS, batch(size, positions)
        report = curvax.explain_registration(loss_of(model), args)
        assert any(why in row.reason for row in report.rows)
        unknown = [row for row in report.rows if row.reason.startswith("examples unknown: ")]
        assert all(row.reason.startswith("examples ") for row in report.rows if row.reason)
        if unknown:
            assert "examples unknown" in str(report)
            with pytest.raises(curvax.RegistrationError, match="examples unknown"):
                curvax.explain_registration(loss_of(model), args, strict=True)
        else:
            curvax.explain_registration(loss_of(model), args, strict=True)

    @pytest.mark.parametrize("mode", ["fisher_gradients", "fisher_empirical", "ggn_curvature_prop"])
    def test_blocks_reject_in_all_modes(self, mode):
        with pytest.raises(ValueError, match="cannot be followed through `scan`"):
            estimated(models.mapped_tokens, batch(4), FULL, mode)

    @pytest.mark.parametrize(
        "model", [models.mapped_tokens, models.centred], ids=["unknown", "interact"]
    )
    def test_what_an_error_recommends_works(self, model):
        with pytest.raises(ValueError, match="examples") as error:
            estimated(model, batch(3), {"dense": curvax.DenseFull})
        names = re.findall(r"curvax\.(\w+)", str(error.value))
        assert set(names) == {"DenseFull", "DenseTwoKroneckerFactored"}
        assert "allow_approximation=True" in str(error.value)
        made_do = functools.partial(curvax.DenseFull, allow_approximation=True)
        for ctor in (curvax.DenseTwoKroneckerFactored, made_do):
            estimator, matrix = estimated(model, batch(3), {"dense": ctor})
            assert jnp.all(jnp.isfinite(matrix(0)[0]))
        (row,) = [row for row in estimator.report().rows if "['w']" in row.params]
        assert row.block == "DenseFull"
        assert row.remarks[0].startswith("examples ")

    def test_naive_blocks_are_recommended_for_scales(self):
        ctors = {"scale_and_shift": DIAGONAL["scale_and_shift"]}
        with pytest.raises(ValueError, match=r"Use curvax\.NaiveDiagonal"):
            estimated(models.mapped_tokens, batch(3), ctors)
        estimated(models.mapped_tokens, batch(3), {"scale_and_shift": curvax.NaiveDiagonal})


class TestByDefault:
    """A model can be trained as it is, and the report says what was done."""

    def remarks(self, model, x):
        estimator, matrix = estimated(model, x, None)
        remarks = {", ".join(row.params): row.remarks for row in estimator.report().rows}
        return matrix, remarks

    def test_scales_of_unknown_positions_count_each(self):
        x = batch(4)
        matrix, remarks = self.remarks(models.mapped_tokens, x)
        (said,) = remarks["['s']"]
        assert said == (
            "examples unknown: they cannot be followed through `scan`: each position counts as a "
            "separate example"
        )
        assert remarks["['w'], ['b']"] == ()
        # Each position as if it were an example: the others are as they are, and do not change.
        scales = jnp.broadcast_to(PARAMS["s"], (*x.shape[:2], 3))
        jacobian = jax.jacrev(lambda s: positions_apart(x, s))(scales)
        # (examples, outputs, examples, positions, features)
        expected = jnp.sum(jacobian**2, (0, 1, 2, 3)) / len(x)
        start = sum(PARAMS[name].size for name in "b")
        assert jnp.allclose(jnp.diag(matrix(0)[0])[start : start + 3], expected, 1e-9)

    def test_kronecker_factors_of_interacting_examples(self):
        _, remarks = self.remarks(models.centred, batch(3))
        independent = "gradients of different ones are taken to be independent"
        assert remarks
        assert all(
            said == (f"examples interact, by `reduce_sum`: {independent}",)
            for said in remarks.values()
        )

    def test_nothing_is_said_where_all_is_known(self):
        _, remarks = self.remarks(models.attention, batch(3))
        assert remarks
        assert not any(remarks.values())

    def test_an_optimizer_trains_a_model_of_tokens(self):
        def loss(p, batch):
            x, y = batch
            z = curvax.register_squared_error_loss(models.mapped_tokens(p, x), y)
            return jnp.mean(jnp.sum((z - y) ** 2, 1))

        x = batch(6)
        data = x, jnp.sin(jnp.sum(x, 1))[:, :1]
        optimizer = curvax.Optimizer(
            jax.value_and_grad(loss), l2_reg=0.0, num_burnin_steps=0, donate_buffers=False
        )
        params = PARAMS
        state = optimizer.init(params, jax.random.key(0), data)
        first = loss(params, data)
        for k in range(4):
            params, state, _ = optimizer.step(
                params,
                state,
                jax.random.key(k),
                batch=data,
                learning_rate=0.2,
                momentum=0.0,
                damping=0.1,
            )
        assert loss(params, data) < 0.8 * first
        said = [row.remarks for row in optimizer.estimator.report().rows if row.remarks]
        assert len(said) == 1
        assert said[0][0].startswith("examples unknown")


def positions_apart(x, scales):
    """`models.mapped_tokens` with scales of their own for each position of each example."""
    h = x * scales @ PARAMS["w"]
    return models.head(PARAMS, jnp.tanh(h + jnp.broadcast_to(PARAMS["b"], h.shape)))


class TestByHand:
    """Layers that are tagged by hand have their examples along the first axis; or so it is said."""

    def model(self, how):
        def tagged(p, h):
            return curvax.register_dense(h @ p["w"], h, p["w"])

        def f(p, x):
            h = x
            if how == "merged":
                h = tagged(p, x.reshape(-1, 3)).reshape(x.shape)
            elif how == "mapped":
                h = jax.lax.map(lambda a: tagged(p, a), x)
            elif how == "first":
                h = tagged(p, x[:, 0])[:, None]
            elif how == "positions first":
                h = jnp.swapaxes(tagged(p, jnp.swapaxes(x, 0, 1)), 0, 1)
            h = h * jnp.broadcast_to(p["s"], h.shape) + jnp.broadcast_to(p["b"], h.shape)
            return models.head(p, h)

        return f

    @pytest.mark.parametrize("how", ["first", "merged", "mapped"])
    def test_they_are(self, how):
        assert verdict(self.model(how), batch(3), FULL) == "exact"

    def test_they_are_not(self):
        with pytest.raises(ValueError, match="they are not along axis 0 of its output"):
            estimated(self.model("positions first"), batch(3), {"dense": curvax.DenseFull})


class TestNotSilentlyWrong:
    """Models that were estimated wrongly, and nobody said so."""

    full = {"dense": curvax.DenseFull}  # noqa: RUF012

    @pytest.mark.parametrize("auto", [True, False], ids=["auto", "by hand"])
    @pytest.mark.parametrize(
        "changed", [jnp.transpose, lambda w: 2.0 * w, lambda w: w[::-1]], ids=["T", "scaled", "rev"]
    )
    def test_a_tagged_function_of_other_parameters(self, changed, auto):
        inner = lambda p, x: jnp.tanh(x @ p["w"])
        tagged = curvax.auto_register_tags(
            loss_of(inner), ({"w": PARAMS["w"]}, batch(3)[:, 0]), compute_only_loss_tags=False
        )
        outer = lambda p, x: tagged({"w": changed(p["w"])}, x)
        with pytest.raises(
            ValueError, match=r"Tag the function that is called|something else than"
        ):
            curvax.BlockDiagonalCurvature(outer, auto_register_tags=auto).init(
                jax.random.key(0), ({"w": PARAMS["w"]}, batch(3)[:, 0]), None, None
            )

    @pytest.mark.parametrize(
        "model",
        [
            lambda p, x: models.centred(p, x),
            lambda p, x: jax.nn.softmax((x[:, 0] @ p["w"]) @ x[:, 0].T) @ x[:, 0],
        ],
        ids=["centred, as many positions", "other examples' data"],
    )
    def test_microbatches_of_examples_that_interact(self, model):
        args = PARAMS, batch(4, 4)
        estimator = curvax.BlockDiagonalCurvature(
            loss_of(model), microbatch_size=2, allow_unused_params=True
        )
        state = estimator.init(jax.random.key(0), args, None, None)
        with pytest.raises(ValueError, match="the examples of a batch interact, by"):
            estimator.update_curvature_matrix_estimate(
                state, 0.0, 1.0, 4, jax.random.key(0), args, None
            )

    @pytest.mark.parametrize("auto", [True, False], ids=["auto", "by hand"])
    @pytest.mark.parametrize("mixed", ["fft", "centred", "merged"])
    def test_tags_of_the_user_are_followed(self, mixed, auto):
        def model(p, x):
            h = x.reshape(-1, 3) if mixed == "merged" else x[:, 0]
            h = jnp.tanh(curvax.register_dense(h @ p["w"], h, p["w"]))
            if mixed == "fft":
                return jnp.fft.fft(h, axis=0).real
            if mixed == "centred":
                return h - jnp.broadcast_to(jnp.mean(h, 0), h.shape)
            return jnp.sum(h.reshape(x.shape), 1)

        args = {"w": PARAMS["w"]}, batch(3)
        estimator = curvax.BlockDiagonalCurvature(
            loss_of(model), layer_tag_to_block_ctor=self.full, auto_register_tags=auto
        )
        if mixed != "merged":
            with pytest.raises(ValueError, match=r"examples (interact|unknown)"):
                estimator.init(jax.random.key(0), args, None, None)
            return
        state = estimator.init(jax.random.key(0), args, None, None)
        state = estimator.update_curvature_matrix_estimate(
            state, 0.0, 1.0, 3, jax.random.key(0), args, None, "ggn_exact"
        )
        expected = models.exact(model, args[0], args[1])
        assert np.allclose(estimator.to_dense_matrix(state), expected, 1e-9)

    def test_uses_that_are_not_covered(self):
        def loss(p, x):
            shared = jnp.ones(3) @ p["w"]
            z = jnp.tanh(x[:, 0] @ p["w"]) @ shared[:, None]
            curvax.register_squared_error_loss(z)

        args = {"w": PARAMS["w"]}, batch(3)
        with pytest.raises(ValueError, match="1 more use of its parameters is not covered"):
            curvax.BlockDiagonalCurvature(loss, layer_tag_to_block_ctor=self.full).init(
                jax.random.key(0), args, None, None
            )
        estimator = curvax.BlockDiagonalCurvature(loss)
        estimator.init(jax.random.key(0), args, None, None)
        ((remark,),) = [row.remarks for row in estimator.report().rows]
        assert remark == "1 more use of its parameters is not covered by the layer"

    def test_a_derivative_of_some_of_the_examples(self):
        """Chunks of examples, of which each repeats a tangent."""

        def loss(p, x):
            u = lambda a: jnp.sum(jnp.tanh(jnp.tanh(a @ p["w"]) @ p["v"]))
            slope = lambda a: jax.jvp(u, (a,), (jnp.ones(3),))[1]
            z = jax.lax.map(slope, x[:, 0], batch_size=4)[:, None]
            curvax.register_squared_error_loss(z)

        args = {"w": PARAMS["w"], "v": PARAMS["v"]}, batch(6)
        estimator = curvax.BlockDiagonalCurvature(loss)
        estimator.init(jax.random.key(0), args, None, None)
        assert any("not covered" in text for row in estimator.report().rows for text in row.remarks)

    def test_a_convolution_that_is_tagged_inside_vmap(self):
        def one(k, a):
            layout = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
            y = jax.lax.conv_general_dilated(a, k, (1, 1), "SAME", **layout)
            return curvax.register_conv2d(y, a, k, **layout)

        def loss(k, x):
            z = jax.vmap(lambda a: one(k, a))(x)
            curvax.register_squared_error_loss(z.reshape(len(x), -1))

        images, kernel = models.normal(0, 3, 1, 4, 4, 2), models.normal(1, 2, 2, 2, 1)
        with pytest.raises(ValueError, match=r"Inside jax\.vmap.* leave the tag out"):
            curvax.explain_registration(loss, (kernel, images))
