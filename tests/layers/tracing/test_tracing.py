"""Derivatives at losses and layers equal those that JAX computes of the function itself.

`graph.models` has the models. What comes back to a layer is checked by what it must amount to: put
through the layer alone, it gives the gradient of the parameters.
"""

import jax
import jax.numpy as jnp
import pytest

import curvax
from curvax import (
    ProcessedJaxpr,
    RegistrationError,
    layer_tags_vjp,
    loss_tags_hvp,
    loss_tags_jvp,
    loss_tags_vjp,
)
from curvax.layers.tags import dense_tag
from helpers import assert_same
from layers.models import AFFINE, GENERIC, SPELLINGS, B, W, X, biased, normal
from layers.tracing.book import at_layers

name_of = lambda case: case.name
each_spelling = pytest.mark.parametrize("case", SPELLINGS + AFFINE, ids=name_of)
SOME = [case for case in SPELLINGS if case.name in ("plain", "scanned", "recurrent", "tied table")]


def predictions(case):
    """What a model predicts, a batch of vectors."""

    def f(params, x):
        y = case.f(params, x).astype(jnp.float64)
        return y.reshape(y.shape[0], -1)

    return f


def with_loss(case):
    f = predictions(case)

    def loss(params, x):
        y = f(params, x)
        targets = jnp.cos(jnp.arange(y.size, dtype=jnp.float64)).reshape(y.shape)
        curvax.register_squared_error_loss(y, targets, weight=0.5)
        return jnp.mean(y)

    return loss


def like(tree, seed):
    return jax.tree.map(lambda leaf: normal(seed, *jnp.shape(leaf)), tree)


@each_spelling
def test_layers_and_parameters(case):
    """Gradients of the function, of each layer alone, and statistics: by all ways the same."""
    f, loss = predictions(case), with_loss(case)
    ours, by_the_book = at_layers(loss, case.params, case.x)
    accuracy = 1e-5 if "cast" in case.name else 1e-9
    assert_same(ours, by_the_book, accuracy, accuracy)
    assert any(bool(jnp.any(leaf != 0)) for leaf in jax.tree.leaves(ours))

    @jax.jit
    def both(params, x):
        y, naive = jax.vjp(lambda params: f(params, x), params)
        losses, vjp = loss_tags_vjp(loss)((params, x))
        cotangent = jnp.cos(3 * y)
        return (losses[0].parameter_dependants[0], vjp([(cotangent,)])), (y, naive(cotangent)[0])

    ours, (y, gradient) = both(case.params, case.x)
    assert_same(ours, (y, gradient), 1e-10, 1e-10)


@pytest.mark.parametrize("case", SOME, ids=name_of)
class TestForward:
    def test_tangents_of_losses(self, case):
        tangents = like(case.params, 2)
        losses, ((moved,),) = loss_tags_jvp(with_loss(case))((case.params, case.x), tangents)
        f = lambda params: predictions(case)(params, case.x)
        y, naive = jax.jvp(f, (case.params,), (tangents,))
        assert_same((losses[0].parameter_dependants[0], moved), (y, naive), 1e-10, 1e-10)

    def test_products_with_the_hessian(self, case):
        vector = like(case.params, 3)
        product, losses = loss_tags_hvp(with_loss(case))((case.params, case.x), vector)

        def total(params):
            y = predictions(case)(params, case.x)
            targets = jnp.cos(jnp.arange(y.size, dtype=jnp.float64)).reshape(y.shape)
            return 0.5 * jnp.sum((y - targets) ** 2)

        naive = jax.jvp(jax.grad(total), (case.params,), (vector,))[1]
        assert_same(product, naive, 1e-9, 1e-9)
        assert isinstance(losses[0], curvax.NormalMeanNegativeLogProbLoss)


# JAX has no cotangents for a loop of unknown length.
@pytest.mark.parametrize("case", [c for c in GENERIC if c.name != "while"], ids=name_of)
def test_generic_parameters_get_their_gradients(case):
    f = with_loss(case)
    losses, vjp = layer_tags_vjp(f)((case.params, case.x))
    cotangents = like(losses[0].parameter_dependants, 4)
    gradient = jax.tree.leaves(loss_tags_vjp(f)((case.params, case.x))[1]([cotangents]))
    for data, expected in zip(vjp([cotangents]), gradient, strict=True):
        assert data["inputs"] == ()
        found = data["outputs_tangents"], data["params_tangents"]
        assert_same(found, ((expected,), (expected,)), 1e-9, 1e-9)


def test_a_perturbed_model():
    """The cotangent of an output is the derivative by what is added to it by hand."""
    p, x = {"w": W, "b": B, "v": normal(9, 4, 2)}, X

    def perturbed(p, x, change):
        return jnp.tanh(biased(x @ p["w"], p["b"]) + change) @ p["v"]

    def f(p, x):
        curvax.register_squared_error_loss(perturbed(p, x, jnp.zeros((5, 4))))

    losses, vjp = layer_tags_vjp(f)((p, x))
    cotangent = normal(8, 5, 2)
    layers = vjp([(cotangent,)])
    _, by_hand = jax.vjp(lambda change: perturbed(p, x, change), jnp.zeros((5, 4)))
    (layer,) = [layer for layer in layers if len(layer["params"]) == 2]
    assert_same(layer["outputs_tangents"], by_hand(cotangent), 1e-12, 1e-12)
    assert_same(layer["inputs"], (x,))
    assert_same(layer["outputs"], (biased(x @ p["w"], p["b"]),), 1e-12, 1e-12)
    del losses


class TestMergedLosses:
    """A loss in a loop, or in vmap, is one with the leading axes merged into the batch."""

    @staticmethod
    def losses(f, *args):
        losses, _ = loss_tags_vjp(f)(args)
        return losses

    def test_in_a_scan(self):
        def f(w, x):
            def step(h, x):
                y = h @ w + x
                curvax.register_squared_error_loss(y, x, weight=2.0)
                return y, None

            return jax.lax.scan(step, jnp.ones((3, 2)), x)[0]

        x = normal(1, 4, 3, 2)
        (loss,) = self.losses(f, normal(0, 2, 2), x)
        assert loss.parameter_dependants[0].shape == (12, 2)
        assert_same(loss.targets, x.reshape(12, 2))
        assert loss.evaluate().shape == (12,)

    def test_in_vmap(self):
        f = lambda w, x: jax.vmap(lambda x: curvax.register_squared_error_loss(x @ w, x))(x)
        x = normal(1, 4, 3, 2)
        (loss,) = self.losses(f, normal(0, 2, 2), x)
        assert loss.parameter_dependants[0].shape == (12, 2)
        assert_same(loss.targets, x.reshape(12, 2))

    def test_one_example_at_a_time(self):
        one = lambda w, x, y: curvax.register_softmax_cross_entropy_loss(x @ w, y)
        f = lambda w, x, y: jax.vmap(one, (None, 0, 0))(w, x, y)
        (loss,) = self.losses(f, normal(0, 2, 3), normal(1, 4, 2), jnp.array([0, 1, 2, 1]))
        assert loss.parameter_dependants[0].shape == (4, 3)
        assert loss.evaluate().shape == (4,)

    def test_values_shared_by_all_examples_are_repeated(self):
        target = normal(2, 3, 2)
        f = lambda w, x: jax.vmap(lambda x: curvax.register_squared_error_loss(x @ w, target))(x)
        (loss,) = self.losses(f, normal(0, 2, 2), normal(1, 4, 3, 2))
        assert_same(loss.targets, jnp.tile(target, (4, 1)))

    def test_a_weight_for_each_step(self):
        def f(w, x, weights):
            def step(_, part):
                x, weight = part
                curvax.register_squared_error_loss(x @ w, x, weight=weight)
                return None, None

            return jax.lax.scan(step, None, (x, weights))

        x, weights = normal(1, 4, 3, 2), jnp.arange(1.0, 5.0)
        (loss,) = self.losses(f, normal(0, 2, 2), x, weights)
        assert_same(loss.weight, jnp.repeat(weights, 3))


class TestProcessedJaxpr:
    def test_it_knows_its_arguments(self):
        case = SPELLINGS[0]
        f = lambda x, params: with_loss(case)(params, x)
        processed = ProcessedJaxpr.make_from_func(f, (case.x, case.params), params_index=1)
        assert processed.params_index == 1
        assert len(processed.in_vars_flat) == 3
        assert processed.params_vars_flat == processed.in_vars_flat[1:]
        assert jax.tree.structure(processed.in_vars) == processed.in_tree
        assert processed.params_tree == jax.tree.structure(case.params)
        assert processed.layer_indices == ((1, 0),)
        assert [eqn.primitive for eqn in processed.layer_tags] == [dense_tag]
        assert [eqn.primitive.name for eqn in processed.loss_tags] == [
            "NormalMeanNegativeLogProbLoss_tag"
        ]

    def test_parameters_in_no_layer(self):
        case = SPELLINGS[0]
        args = case.params, case.x
        make = ProcessedJaxpr.make_from_func
        with pytest.raises(RegistrationError, match=r"\['b'\], \['w'\] are in no layer"):
            make(with_loss(case), args, auto_register_tags=False)
        processed = make(
            with_loss(case), args, auto_register_tags=False, allow_left_out_params=True
        )
        assert processed.layer_tags == ()


class TestOtherArguments:
    def test_batches_of_other_sizes(self):
        case = SPELLINGS[0]
        vjp_at = layer_tags_vjp(with_loss(case))
        for x in (case.x, case.x[:2]):
            losses, vjp = vjp_at((case.params, x))
            (layer,) = vjp([losses[0].parameter_dependants])
            assert_same(layer["inputs"], (x,))

    def test_another_graph_is_an_error(self):
        def f(w, x):
            y = x @ w if len(x) < 4 else jnp.sin(x) @ w
            curvax.register_squared_error_loss(y)

        vjp_at = layer_tags_vjp(f)
        vjp_at((W, X))
        with pytest.raises(ValueError, match="raise_error_on_diff_jaxpr=False"):
            vjp_at((W, X[:2]))
        anything = layer_tags_vjp(f, raise_error_on_diff_jaxpr=False)
        anything((W, X))
        anything((W, X[:2]))

    def test_a_function_of_traced_values(self):
        def cotangents(scale):
            f = lambda w, x: curvax.register_squared_error_loss(scale * (x @ w))
            losses, vjp = loss_tags_vjp(f)((W, X))
            return vjp([losses[0].parameter_dependants])

        assert_same(jax.jit(cotangents)(2.0), 4 * X.T @ X @ W, 1e-12, 1e-12)

    def test_cotangents_of_other_shapes(self):
        losses, vjp = loss_tags_vjp(with_loss(SPELLINGS[0]))((SPELLINGS[0].params, X))
        with pytest.raises(
            ValueError, match=r"of the shapes \[\(\(5, 4\),\)\], got \[\(\(5,\),\)\]"
        ):
            vjp([(jnp.ones(5),)])
        del losses


class TestVectorsInVmap:
    """Inside vmap, a vector is the prediction for one example."""

    def test_values(self):
        f = lambda w, x: jax.vmap(lambda x: curvax.register_squared_error_loss(x @ w, 0 * x @ w))(x)
        (loss,), _ = loss_tags_vjp(f)((W, X))
        assert loss.parameter_dependants[0].shape == (5, 4)
        assert loss.evaluate().shape == (5,)

    def test_a_user_supplied_loss(self):
        root = lambda y, t: jnp.sqrt(1 + jnp.sum((y - t) ** 2))
        one = lambda w, x: curvax.register_loss(root, x @ w, jnp.ones(4))
        (loss,), _ = loss_tags_vjp(lambda w, x: jax.vmap(one, (None, 0))(w, x))((W, X))
        assert_same(loss.evaluate(), jax.vmap(root, (0, None))(X @ W, jnp.ones(4)), 1e-12, 1e-12)

    def test_a_target_that_is_the_same_for_all(self):
        target = jnp.asarray(2)
        one = lambda w, x: curvax.register_softmax_cross_entropy_loss(x @ w, target)
        (loss,), _ = loss_tags_vjp(lambda w, x: jax.vmap(one, (None, 0))(w, x))((W, X))
        assert_same(loss.evaluate(), -jax.nn.log_softmax(X @ W)[:, 2], 1e-12, 1e-12)


def test_a_batch_of_one_example_is_the_same_function():
    """What is only done to fit shapes does not count."""
    p = {"e": normal(0, 9, 3), "pos": normal(1, 6, 3), "w": normal(2, 3, 2, 2)}

    def f(p, i):
        x = p["e"][i] + jnp.broadcast_to(p["pos"][: i.shape[1]], (*i.shape, 3))
        y = jnp.einsum("btd,dhk->bthk", x, p["w"])
        curvax.register_squared_error_loss(y.reshape(-1, 4))

    vjp_at = layer_tags_vjp(f)
    for shape in ((3, 5), (1, 5), (4, 1), (2, 6)):
        losses, vjp = vjp_at((p, jnp.zeros(shape, int)))
        vjp([losses[0].parameter_dependants])


class TestArguments:
    def test_no_sequence(self, unchecked):
        with pytest.raises(TypeError, match=r"as one sequence, such as \(params, batch\)"):
            layer_tags_vjp(with_loss(SPELLINGS[0]))(W)

    @pytest.mark.parametrize("product", [loss_tags_jvp, loss_tags_hvp])
    def test_tangents_unlike_the_parameters(self, product):
        case = SPELLINGS[0]
        with pytest.raises(ValueError, match="tangents of the parameters are like the parameters"):
            product(with_loss(case))((case.params, case.x), (B, W))
