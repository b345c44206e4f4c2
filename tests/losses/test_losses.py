"""Each loss agrees with autodiff of its value and with sums over all that its targets can be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import curvax
from helpers import assert_same, key
from losses.cases import (
    BY_NAME,
    CASES,
    FUNCTIONS,
    LOG_PROBS,
    SOME,
    has_fisher,
    measured,
    name_of,
    normal,
)

every_loss = pytest.mark.parametrize("case", CASES, ids=name_of)
some_losses = pytest.mark.parametrize("case", SOME, ids=name_of)
some_log_probs = pytest.mark.parametrize("case", [c for c in SOME if c.outcomes], ids=name_of)
every_log_prob = pytest.mark.parametrize("case", LOG_PROBS, ids=name_of)
MASKED = [c for c in LOG_PROBS if "mask" in c.arrays and c.name != "masked bits"]
MODES = ["regular", "sqrt", "off"]


def close(actual, expected, tolerance=1e-11):
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


class TestMatrices:
    @every_loss
    def test_the_gradient_is_that_of_the_summed_value(self, case):
        found = measured(case.name)
        close(found["gradient"], found["gradient by autodiff"])

    @every_log_prob
    def test_the_fisher_matrix_is_the_mean_over_outcomes(self, case):
        found = measured(case.name)
        close(found["Fisher"], found["Fisher by outcomes"])

    @every_loss
    def test_the_ggn_is_the_hessian_unless_that_depends_on_targets(self, case):
        found = measured(case.name)
        if isinstance(case.loss(), curvax.NormalMeanVarianceNegativeLogProbLoss):
            close(found["ggn"], found["Fisher"])
            assert np.min(np.linalg.eigvalsh(found["Hessian by autodiff"])) < 0
        else:
            close(found["ggn"], found["Hessian by autodiff"])

    @every_loss
    @pytest.mark.parametrize("kind", ["ggn", "Fisher"])
    def test_factors(self, case, kind):
        if kind == "Fisher" and not has_fisher(case.loss()):
            return
        found = measured(case.name)
        factor = found[f"{kind} factor"]
        close(factor @ factor.T, found[kind])
        close(found[f"{kind} factor transposed"], factor.T)
        close(found[f"{kind} factor by one-hots"], factor)


@some_losses
class TestWeights:
    def test_values_and_gradients_in_the_three_modes(self, case):
        loss = case.loss()

        @jax.jit
        def ask(dependants):
            other = loss.copy_with_different_inputs(dependants)
            return {m: (other.evaluate(None, m), *other.grad_of_evaluate(None, m)) for m in MODES}

        found = ask(loss.parameter_dependants)
        weight = np.asarray(loss.weight, np.float64)
        for mode, factor in [("regular", weight), ("sqrt", np.sqrt(weight))]:
            for scaled, plain in zip(found[mode], found["off"], strict=True):
                close(scaled.T, (factor * np.asarray(plain).T))

    def test_products_are_weighted_and_factors_by_the_root(self, case):
        loss = case.loss()
        arrays = {**case.arrays, "weight": 4 * np.asarray(loss.weight, np.float64)}
        wave = lambda x: jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)
        vector = tuple(wave(x) for x in loss.parameter_dependants)
        inner = wave(jnp.zeros(loss.ggn_factor_inner_shape))
        index = (0,) * (inner.ndim - 1)
        kinds = ["ggn", "fisher"] if has_fisher(loss) else ["ggn"]
        products = [("", vector, 4), ("_factor", inner, 2), ("_factor_transpose", vector, 2)]
        products += [("_factor_replicated_one_hot", index, 2)]

        @jax.jit
        def ask():
            methods = [(f"multiply_{kind}{what}", x) for kind in kinds for what, x, _ in products]
            four_times = case._replace(arrays=arrays).loss()
            once = [getattr(loss, method)(x) for method, x in methods]
            return once, [getattr(four_times, method)(x) for method, x in methods]

        factors = [factor for _ in kinds for *_, factor in products]
        for some, more, factor in zip(*ask(), factors, strict=True):
            assert_same(more, jax.tree.map(lambda x, factor=factor: factor * x, some))
            assert any(np.any(x) for x in jax.tree.leaves(some))


class TestMasks:
    @pytest.mark.parametrize("case", MASKED, ids=name_of)
    def test_masked_examples_have_no_influence(self, case):
        loss = case.loss()
        mask = np.asarray(loss.mask, bool)
        wild_logits, wild_targets = np.array(loss.params[0]), np.array(loss.targets)
        wild_logits[~mask] = np.nan
        wild_targets[~mask] = 99 if wild_targets.ndim == mask.ndim else np.nan

        @jax.jit
        def ask(logits, targets):
            other = type(loss)(logits, targets, mask=loss.mask, weight=loss.weight)
            gradient = other.grad_of_evaluate(None, "regular")
            vector = (jnp.asarray(np.cos(loss.params[0])),)
            inner = other.multiply_fisher_factor_transpose(vector)
            return other.evaluate(), gradient, other.multiply_fisher(vector), inner

        found = ask(jnp.asarray(wild_logits), jnp.asarray(wild_targets))
        assert_same(found, ask(loss.params[0], loss.targets))
        for array in jax.tree.leaves(found):
            assert not np.any(np.asarray(array)[~mask])
            assert np.all(np.asarray(array)[mask])

    def test_masked_labels_of_an_example_are_left_out(self):
        loss = BY_NAME["masked bits"].loss()
        (logits,) = loss.params
        for row, mask in enumerate(np.asarray(loss.mask)):
            left = curvax.MultiBernoulliNegativeLogProbLoss(
                logits[row : row + 1, mask], loss.targets[row : row + 1, mask]
            )
            assert_same(loss.evaluate()[row], left.evaluate()[0])
            (gradient,), (expected,) = (
                each.grad_of_evaluate(None, "regular") for each in (loss, left)
            )
            assert_same(gradient[row, mask], expected[0])
            assert not np.any(gradient[row, ~mask])

    def test_other_examples_are_as_without_a_mask(self):
        loss = BY_NAME["masked class"].loss()
        rows = np.flatnonzero(loss.mask)
        (logits,) = loss.params

        @jax.jit
        def ask(loss_rows):
            rows = jnp.asarray(loss_rows)
            rest = type(loss)(logits[rows], loss.targets[rows], weight=loss.weight)
            return [
                (x.evaluate(), x.grad_of_evaluate(None, "sqrt")[0], x.multiply_fisher((v,))[0])
                for x, v in [(loss, jnp.sin(logits)), (rest, jnp.sin(logits[rows]))]
            ]

        whole, rest = ask(rows)
        assert_same([x[rows] for x in whole], list(rest))


@some_log_probs
def test_samples(case):
    """Gradients have mean zero and the Fisher matrix as covariance, values the entropy as mean."""
    loss, number = case.loss(), 20_000

    @jax.jit
    @jax.vmap
    def sample(rng):
        gradient = ravel_pytree(loss.grad_of_evaluate_on_sample(rng, "sqrt"))[0]
        return gradient, -loss.dist.log_prob(loss.dist.sample(seed=rng))

    gradients, values = map(np.asarray, sample(jax.random.split(key(5), number)))
    # In units of the standard error of each mean. There are some 3000 numbers in all cases.
    error = gradients.std(0) / np.sqrt(number)
    assert np.all(np.abs(gradients.mean(0)) <= 5 * error)
    square = (gradients**2).T @ gradients**2 / number
    covariance = gradients.T @ gradients / number
    error = np.sqrt(np.maximum(square - covariance**2, 0) / number)
    assert np.all(np.abs(covariance - measured(case.name)["Fisher"]) <= 5.5 * error + 1e-12)
    error = values.std(0) / np.sqrt(number)
    assert np.all(np.abs(values.mean(0) - loss.dist.entropy()) <= 5 * error + 1e-12)


@some_losses
class TestTransformations:
    def test_vmap_over_predictions_is_a_loop(self, case):
        loss = case.loss()
        several = tuple(jnp.stack([x, 0.5 * x]) for x in loss.parameter_dependants)
        vector = tuple(jnp.asarray(np.cos(x)) for x in loss.parameter_dependants)

        def ask(*dependants):
            other = loss.copy_with_different_inputs(dependants)
            inner = other.multiply_ggn_factor_transpose(vector)
            sampled = has_fisher(loss) and other.grad_of_evaluate_on_sample(key(1), "off")
            return other.evaluate(), other.multiply_ggn_factor(inner), sampled or ()

        @jax.jit
        def both(several):
            alone = [ask(*(x[i] for x in several)) for i in range(2)]
            return jax.vmap(ask)(*several), jax.tree.map(lambda *x: jnp.stack(x), *alone)

        assert_same(*both(several))

    def test_the_gradient_is_differentiable(self, case):
        loss = case.loss()
        flat, unflatten = ravel_pytree(loss.parameter_dependants)

        def gradient(flat):
            other = loss.copy_with_different_inputs(unflatten(flat))
            return ravel_pytree(other.grad_of_evaluate(None, "regular"))[0]

        product = jax.jit(lambda x: jax.jvp(gradient, (x,), (jnp.cos(x),))[1])(flat)
        close(product, measured(case.name)["Hessian by autodiff"] @ np.cos(flat))

    def test_lower_precision_keeps_its_dtype(self, case):
        def ask(dtype):
            loss = case.loss(dtype)
            wave = lambda shape: jnp.asarray(np.sin(1 + np.arange(np.prod(shape))).reshape(shape))
            vector = tuple(wave(x.shape).astype(x.dtype) for x in loss.parameter_dependants)
            results = [loss.evaluate(), loss.grad_of_evaluate(None, "sqrt")]
            results += [loss.multiply_ggn(vector)]
            if has_fisher(loss):  # The factor of a function is only unique up to signs.
                inner = wave(loss.fisher_factor_inner_shape).astype(vector[0].dtype)
                results += [loss.multiply_fisher_factor_transpose(vector)]
                results += [loss.multiply_fisher_factor(inner)]
            return jax.tree.leaves(results)

        dtypes = {jnp.float64: 1e-14, jnp.float32: 1e-5, jnp.bfloat16: 0.05}
        expected, *_ = found = jax.jit(lambda: [ask(dtype) for dtype in dtypes])()
        for (dtype, tolerance), results in zip(dtypes.items(), found, strict=True):
            for got, want in zip(results, expected, strict=True):
                assert got.dtype == dtype
                error = np.abs(np.asarray(got, np.float64) - want)
                assert np.max(error) <= tolerance * np.max(np.abs(want))
            if has_fisher(case.loss()):
                sample = lambda: case.loss(dtype).grad_of_evaluate_on_sample(key(), "off")  # noqa: B023
                assert {x.dtype for x in jax.eval_shape(sample)} == {jnp.dtype(dtype)}


@every_loss
class TestValues:
    def test_counts_and_copies(self, case):
        loss = case.loss()
        given = case.arrays.keys() - {"mean", "logits", "predictions"}
        given = given - {"variance"} if loss.num_parameter_dependants == 2 else given
        defaults = {"variance"} if "variance" in dir(loss) else set()
        assert loss.num_parameter_independants == len(given | {"weight"} | defaults)
        other = tuple(2 * x for x in loss.parameter_dependants)
        copy = loss.copy_with_different_inputs(other)
        assert type(copy) is type(loss)
        assert copy.parameter_dependants == other
        assert [*map(id, copy.parameter_independants)] == [*map(id, loss.parameter_independants)]
        if loss.targets is not None:
            assert_same(copy.targets, loss.targets)

    def test_a_copy_needs_as_many_arrays(self, case):
        loss = case.loss()
        number = loss.num_parameter_dependants
        with pytest.raises(ValueError, match=rf"needs {number} arrays? .* got 3\.$"):
            loss.copy_with_different_inputs([jnp.zeros(1)] * 3)
        with pytest.raises(ValueError, match=rf"needs {number} arrays? .* got 0\.$"):
            loss.copy_with_different_inputs([])

    def test_a_loss_cannot_be_changed(self, case):
        loss = case.loss()
        with pytest.raises(AttributeError):
            loss.weight = 3.0
        with pytest.raises(AttributeError, match="a loss cannot be changed"):
            loss._weight = 3.0

    def test_other_modes_are_rejected(self, case):
        loss = case.loss()
        for refused in [loss.evaluate, loss.grad_of_evaluate]:
            with pytest.raises(ValueError, match=r"'regular', 'sqrt' or 'off', got 'half'\.$"):
                refused(None, "half")

    def test_an_index_of_the_wrong_length_is_rejected(self, case):
        with pytest.raises(ValueError, match=r"one integer for each axis but the first"):
            case.loss().multiply_ggn_factor_replicated_one_hot((0, 0, 0, 0))


class TestTargets:
    @every_log_prob
    def test_missing_targets_are_an_error(self, case):
        arrays = {name: x for name, x in case.arrays.items() if name != "targets"}
        loss = case._replace(arrays=arrays).loss()
        assert loss.targets is None
        with pytest.raises(ValueError, match=r"made without targets\. Pass targets"):
            loss.evaluate()
        with pytest.raises(ValueError, match=r"made without targets\. Pass targets"):
            loss.grad_of_evaluate(None, "regular")
        with pytest.raises(ValueError, match=r"cannot be evaluated without targets\. Pass them"):
            loss.evaluate_unweighted(None)

    @some_log_probs
    def test_given_targets_override_the_registered_ones(self, case):
        loss = case.loss()
        arrays = {name: x for name, x in case.arrays.items() if name != "targets"}
        bare = case._replace(arrays=arrays).loss()

        @jax.jit
        def ask():
            sampled = loss.sample(key(3))
            return [
                (bare.evaluate(loss.targets), loss.evaluate()),
                (bare.evaluate(sampled), loss.evaluate(sampled)),
                (
                    loss.grad_of_evaluate_on_sample(key(3), "off"),
                    loss.grad_of_evaluate(sampled, "off"),
                ),
                (sampled.shape, loss.targets.shape),
            ]

        for found, expected in ask():
            assert_same(jax.tree.map(jnp.asarray, found), jax.tree.map(jnp.asarray, expected))


@pytest.mark.parametrize("case", FUNCTIONS, ids=name_of)
@pytest.mark.parametrize(
    "name",
    [
        "multiply_fisher",
        "multiply_fisher_factor",
        "multiply_fisher_factor_replicated_one_hot_unweighted",
        "fisher_factor_inner_shape",
        "grad_of_evaluate_on_sample",
        "dist",
    ],
)
def test_without_a_distribution_there_is_no_fisher_matrix(case, name):
    with pytest.raises(AttributeError, match=r"without a predictive distribution") as e:
        getattr(case.loss(), name)
    assert "'ggn_exact', 'ggn_curvature_prop' and, with targets, 'fisher_empirical'" in str(e.value)
    with pytest.raises(AttributeError, match="has no attribute 'shape'"):
        case.loss().shape  # noqa: B018


def test_mean_and_variance_of_different_shapes_are_rejected():
    with pytest.raises(ValueError, match=r"one shape, got \(3, 2\) and \(3,\)\. For a variance"):
        curvax.NormalMeanVarianceNegativeLogProbLoss(normal_array(3, 2), normal_array(3))


def normal_array(*shape):
    return jnp.asarray(normal(0, *shape))


def test_mean_and_variance_may_be_of_two_dtypes():
    mean, variance = normal_array(3, 2).astype(jnp.bfloat16), jnp.ones((3, 2), jnp.float32)
    loss = curvax.NormalMeanVarianceNegativeLogProbLoss(mean, variance, mean)

    def ask():
        inner = loss.multiply_fisher_factor_transpose((mean, variance))
        pairs = [
            loss.grad_of_evaluate(None, "regular"),
            loss.multiply_fisher((mean, variance)),
            loss.multiply_fisher_factor(inner),
            loss.multiply_fisher_factor_replicated_one_hot((3,)),
        ]
        return inner, pairs

    inner, pairs = jax.eval_shape(ask)
    assert inner.dtype == jnp.float32
    assert [[x.dtype for x in pair] for pair in pairs] == [[jnp.bfloat16, jnp.float32]] * 4


class TestExtremes:
    def test_certain_classes_have_a_fisher_matrix_of_zero(self):
        logits = jnp.array([[1000.0, -1000.0, 0.0], [0.0, -jnp.inf, 1.0]])
        targets = jnp.array([0, 2])
        for loss in [
            curvax.CategoricalLogitsNegativeLogProbLoss(logits, targets),
            curvax.OneHotCategoricalLogitsNegativeLogProbLoss(logits, jax.nn.one_hot(targets, 3)),
        ]:
            ask = lambda loss=loss: (
                loss.evaluate(),
                loss.dist.entropy(),
                loss.grad_of_evaluate(None, "regular"),
                loss.multiply_fisher((jnp.ones_like(logits),))[0],
            )
            *rest, product = jax.jit(ask)()
            assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(rest))
            np.testing.assert_allclose(product, 0, atol=1e-15)

    def test_certain_answers_lose_nothing_to_rounding(self):
        loss = curvax.MultiBernoulliNegativeLogProbLoss(jnp.array([40.0]), jnp.array([1.0]))
        np.testing.assert_allclose(loss.evaluate(), np.exp(-40.0), rtol=1e-12)
        np.testing.assert_allclose(
            loss.multiply_fisher((jnp.ones(1),))[0], np.exp(-40.0), rtol=1e-12
        )

    @pytest.mark.parametrize("target", [-1, 3])
    def test_an_invalid_class_gives_nan_in_value_and_gradient(self, target):
        logits, targets = normal_array(2, 3), jnp.array([target, 1])
        loss = curvax.CategoricalLogitsNegativeLogProbLoss(logits, targets)
        assert np.isnan(loss.evaluate()).tolist() == [True, False]
        gradient = np.isnan(loss.grad_of_evaluate(None, "off")[0])
        assert gradient.all(1).tolist() == [True, False]
        assert not gradient[1].any()
