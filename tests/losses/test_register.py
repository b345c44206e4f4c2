"""Registering a loss returns the predictions and leaves one tag, from which the loss is made."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax
from curvax.losses.tag import LossTag
from helpers import assert_same
from losses.cases import log_cosh, normal, soft

LOGITS = jnp.asarray(normal(1, 3, 4))
CLASSES = jnp.array([3, 0, 1])
BITS = jnp.asarray(normal(2, 3, 4) > 0)
REAL = jnp.asarray(normal(3, 3, 4))
SOFT = jnp.asarray(soft(4, 3, 4))
MASK = jnp.array([True, False, True])

NORMAL = curvax.NormalMeanNegativeLogProbLoss
BERNOULLI = curvax.MultiBernoulliNegativeLogProbLoss
CATEGORICAL = curvax.CategoricalLogitsNegativeLogProbLoss
ONE_HOT = curvax.OneHotCategoricalLogitsNegativeLogProbLoss

REGISTERED = [
    (curvax.register_squared_error_loss, {"targets": REAL}, NORMAL),
    (curvax.register_squared_error_loss, {"targets": REAL, "weight": jnp.array(0.5)}, NORMAL),
    (curvax.register_normal_predictive_distribution, {"targets": REAL, "variance": 2.0}, NORMAL),
    (
        curvax.register_normal_predictive_distribution,
        {"variance": jnp.ones(3), "weight": 3},
        NORMAL,
    ),
    (curvax.register_sigmoid_cross_entropy_loss, {"targets": BITS}, BERNOULLI),
    (
        curvax.register_multi_bernoulli_predictive_distribution,
        {"weight": jnp.array(2.0)},
        BERNOULLI,
    ),
    (curvax.register_sigmoid_cross_entropy_loss, {"targets": BITS, "mask": MASK}, BERNOULLI),
    (
        curvax.register_multi_bernoulli_predictive_distribution,
        {"targets": BITS, "mask": BITS, "weight": jnp.array(2.0)},
        BERNOULLI,
    ),
    (curvax.register_softmax_cross_entropy_loss, {"targets": CLASSES}, CATEGORICAL),
    (curvax.register_softmax_cross_entropy_loss, {"targets": SOFT, "mask": MASK}, ONE_HOT),
    (
        curvax.register_categorical_predictive_distribution,
        {"mask": MASK, "weight": 2.0},
        CATEGORICAL,
    ),
    (curvax.register_categorical_predictive_distribution, {"targets": SOFT}, ONE_HOT),
]


def registered_losses(function, *args):
    """The losses in a traced function, made of the operands that its tags have when it runs."""
    program = jax.make_jaxpr(function)(*args)
    values = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    values |= dict(zip(program.jaxpr.invars, jax.tree.leaves(args), strict=True))
    read = lambda x: x.val if hasattr(x, "val") else values[x]
    losses = []
    for equation in program.jaxpr.eqns:
        operands = [read(x) for x in equation.invars]
        if isinstance(equation.primitive, LossTag):
            names = equation.params["args_names"]
            losses.append(equation.primitive.loss(*operands, args_names=names))
            results = operands[: len(equation.outvars)]
        else:
            results = equation.primitive.bind(*operands, **equation.params)
            results = results if equation.primitive.multiple_results else [results]
        values |= dict(zip(equation.outvars, results, strict=True))
    return losses


@pytest.mark.parametrize(("register", "arrays", "cls"), REGISTERED)
class TestTags:
    def test_the_predictions_come_back_as_they_are(self, register, arrays, cls):
        assert_same(register(LOGITS, **arrays), LOGITS, 0, 0)
        assert_same(jax.jit(lambda x: register(x, **arrays))(LOGITS), LOGITS, 0, 0)

    def test_one_tag_makes_an_equal_loss(self, register, arrays, cls):
        (loss,) = registered_losses(lambda x: register(2 * x, **arrays), LOGITS)
        assert type(loss) is cls
        name = "mean" if cls is NORMAL else "logits"
        expected = cls(**{name: 2 * LOGITS}, **arrays)
        as_arrays = lambda xs: [np.asarray(x, np.float64) for x in xs]
        assert_same(loss.parameter_dependants, expected.parameter_dependants)
        mine, theirs = (as_arrays(x.parameter_independants) for x in (loss, expected))
        assert_same(mine, theirs)
        if "targets" in arrays:
            assert_same(loss.evaluate(), expected.evaluate())

    def test_derivatives_go_through(self, register, arrays, cls):
        f = lambda x: jnp.sum(register(jnp.sin(x), **arrays) ** 2)
        assert_same(jax.grad(f)(LOGITS), 2 * jnp.sin(LOGITS) * jnp.cos(LOGITS))
        assert len(registered_losses(lambda x: register(x, **arrays), LOGITS)) == 1


def test_arrays_may_be_traced():
    def f(x, targets, weight):
        return curvax.register_softmax_cross_entropy_loss(x, targets, weight=weight)

    assert_same(jax.jit(f)(LOGITS, CLASSES, 2.0), LOGITS, 0, 0)
    (loss,) = registered_losses(f, LOGITS, CLASSES, jnp.array(2.0))
    assert_same(loss.evaluate(), CATEGORICAL(LOGITS, CLASSES, weight=2.0).evaluate())


def test_one_example_at_a_time_under_vmap():
    register = lambda x, y: curvax.register_softmax_cross_entropy_loss(x, y)
    assert_same(jax.vmap(register)(LOGITS, CLASSES), LOGITS, 0, 0)
    (loss,) = registered_losses(jax.vmap(register), LOGITS, CLASSES)
    assert_same(loss.evaluate(), CATEGORICAL(LOGITS, CLASSES).evaluate())
    assert_same(jax.vmap(curvax.register_squared_error_loss)(LOGITS[:, 0]), LOGITS[:, 0], 0, 0)


@pytest.mark.parametrize("mask", [MASK[:2], MASK[0], jnp.ones((3, 3))])
def test_masks_of_labels_have_the_leading_axes_of_the_logits(mask):
    words = r"from one entry per example, \(3,\), to one per label, \(3, 4\), got the shape"
    with pytest.raises(ValueError, match=rf"{words} {re.escape(str(mask.shape))}"):
        curvax.register_sigmoid_cross_entropy_loss(LOGITS, mask=mask)


def test_numpy_arrays_and_lists_of_targets():
    logits = curvax.register_softmax_cross_entropy_loss(np.asarray(LOGITS), np.array([1, 2, 3]))
    assert_same(logits, LOGITS, 0, 0)


def test_squared_error_is_the_square():
    (loss,) = registered_losses(curvax.register_squared_error_loss, LOGITS, REAL)
    constant = NORMAL(LOGITS, LOGITS).evaluate()
    assert_same(loss.evaluate() - constant, jnp.sum((LOGITS - REAL) ** 2, axis=1))


S, B, N = (
    curvax.register_softmax_cross_entropy_loss,
    curvax.register_sigmoid_cross_entropy_loss,
    curvax.register_normal_predictive_distribution,
)


@pytest.mark.parametrize(
    ("register", "given", "error", "words"),
    [
        (S, (LOGITS, REAL[:, 0]), TypeError, r"must be integers, got float64.*astype\(int\)"),
        (S, (LOGITS, BITS.astype(int)), TypeError, r"must be floating-point, got int64.*astype"),
        (S, (LOGITS, CLASSES[:2]), ValueError, r"shape \(3,\) or .* \(3, 4\), got .* \(2,\)"),
        (S, (LOGITS, CLASSES[:, None]), ValueError, r"got the shape \(3, 1\)"),
        (S, (LOGITS, None, MASK[:2]), ValueError, r"its shape is \(3,\), got \(2,\)"),
        (S, (jnp.array(1.0),), ValueError, r"at least 1 axis, got the shape \(\)"),
        (S, (CLASSES,), TypeError, r"logits must be real floating-point numbers, got int64"),
        (S, (LOGITS, None, None, REAL), ValueError, r"weight must be a scalar, .*got the shape"),
        (S, (LOGITS, None, None, -1.0), ValueError, r"weight must not be negative, got -1\.0"),
        (S, (LOGITS, None, None, 1j), TypeError, r"weight must be real, got complex"),
        (B, (LOGITS, REAL[:2]), ValueError, r"shape of logits, \(3, 4\), got \(2, 4\)"),
        (B, (1j * LOGITS.astype(complex),), TypeError, r"real .*, got complex128"),
        (N, (LOGITS, REAL[:, :1]), ValueError, r"shape of mean, \(3, 4\), got \(3, 1\)"),
        (N, (LOGITS, REAL.astype(complex)), TypeError, r"targets must be real .*complex128"),
        (N, (LOGITS, None, 0.0), ValueError, r"variance must be positive, got 0\.0"),
        (N, (LOGITS, None, REAL), ValueError, r"variance must be a scalar, .*\(3,\)"),
    ],
)
def test_shapes_that_do_not_fit_are_rejected(register, given, error, words):
    where = re.escape(f"curvax.{register.__name__}: ")
    with pytest.raises(error, match=rf"^{where}.*{words}"):
        register(*given)
    with pytest.raises(error, match=rf"{where}.*{words}"):
        jax.jit(lambda logits: register(logits, *given[1:]))(given[0])


def test_a_pair_of_names_registers_the_same():
    pairs = [
        (
            curvax.register_sigmoid_cross_entropy_loss,
            curvax.register_multi_bernoulli_predictive_distribution,
        ),
        (
            curvax.register_softmax_cross_entropy_loss,
            curvax.register_categorical_predictive_distribution,
        ),
        (curvax.register_squared_error_loss, curvax.register_normal_predictive_distribution),
    ]
    for pair in pairs:
        first, second = (registered_losses(register, LOGITS)[0] for register in pair)
        assert type(first) is type(second)
        assert_same(
            [np.asarray(x) for x in first.parameter_independants],
            [np.asarray(x) for x in second.parameter_independants],
        )


class Cosh(curvax.LossFunction):
    """A minimal user-supplied class."""

    def __init__(self, x, weight=1.0):
        super().__init__(weight)
        self._x = x

    targets = None
    parameter_dependants = property(lambda self: (self._x,))
    parameter_independants = property(lambda self: (self.weight,))
    ggn_factor_inner_shape = property(lambda self: self._x.shape)

    def copy_with_different_inputs(self, parameter_dependants):
        return Cosh(*self.checked_inputs(parameter_dependants), self.weight)

    def evaluate_unweighted(self, targets):
        return jnp.cosh(self._x)

    def multiply_ggn_factor_unweighted(self, vector):
        return (jnp.sqrt(jnp.cosh(self._x)) * vector,)


def test_a_user_supplied_class():
    tag = LossTag(Cosh, ["x"], ["weight"])
    x, v = LOGITS[:, 0], REAL[:, 0]
    (loss,) = registered_losses(lambda x: tag.bind(x, 3.0, args_names=("x", "weight")), x)
    assert_same(loss.evaluate(), 3 * jnp.cosh(x))
    assert_same(loss.grad_of_evaluate(None, "regular"), (3 * jnp.sinh(x),))
    assert_same(loss.multiply_ggn((v,)), (3 * jnp.cosh(x) * v,))
    assert_same(loss.multiply_ggn_factor_transpose((v,)), jnp.sqrt(3 * jnp.cosh(x)) * v)
    assert_same(loss.multiply_ggn_factor_replicated_one_hot(()), (jnp.sqrt(3 * jnp.cosh(x)),))
    with pytest.raises(AttributeError, match="Cosh has no 'multiply_fisher'"):
        loss.multiply_fisher((v,))


@pytest.mark.parametrize(
    "cls", [curvax.LossFunction, curvax.NegativeLogProbLoss, curvax.DistributionNegativeLogProbLoss]
)
def test_bases_are_abstract(cls):
    with pytest.raises(TypeError, match="abstract"):
        cls(1.0)


def test_functions_are_registered_too():
    (loss,) = registered_losses(
        lambda x: curvax.register_loss(log_cosh, x, REAL, weight=0.5), LOGITS
    )
    assert_same(loss.evaluate(), 0.5 * jax.vmap(log_cosh)(LOGITS, REAL))
