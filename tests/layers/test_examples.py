"""Examples are followed from the arguments to the losses, also next to what is no batch."""

import jax
import jax.numpy as jnp
import pytest

from curvax import explain_registration, layer_tags_vjp, register_squared_error_loss as register
from helpers import assert_same
from layers.models import normal

W0, Q, X = normal(0, 5, 4), normal(1, 5, 4), normal(2, 5, 5)
SQUARE, MASK = normal(3, 5, 5), (normal(4, 5, 5) > 0).astype(jnp.float64)
NO_EXAMPLES = "it meets nothing that differs from example to example"
NOT_APART = "examples have several rows of a loss each"


def rows(f, *args, **options):
    return [(row.tag, row.reason) for row in explain_registration(f, args, **options).rows]


class TestAnArgumentThatIsNoBatch:
    """It has an axis as long as the batch, and another meaning."""

    @pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 1, 0)], ids=str)
    def test_added_to_weights(self, order):
        def f(*args):
            q, w0, x = (args[order.index(k)] for k in range(3))
            return register(x @ (w0 + q))

        args = [(Q, W0, X)[k] for k in order]
        index = order.index(0)
        assert rows(f, *args, params_index=index) == [("dense_tag", "")]
        losses, vjp = layer_tags_vjp(f, index)(args)
        (layer,) = vjp([losses[0].parameter_dependants])
        y = X @ (W0 + Q)
        assert_same((layer["inputs"], layer["outputs"]), ((X,), (y,)), 1e-12, 1e-12)
        assert_same((layer["outputs_tangents"], layer["params_tangents"]), ((y,), (X.T @ y,)))

    def test_two_of_them(self):
        f = lambda q, w0, v, x: register(x @ (w0 + q) @ v)
        assert rows(f, SQUARE, X, SQUARE, X) == [("dense_tag", "")]

    def test_a_mask_of_weights(self):
        f = lambda w, mask, x: register(x @ (w * mask))
        assert rows(f, SQUARE, MASK, X) == [("generic_tag", NO_EXAMPLES)]

    def test_a_mask_of_features(self):
        f = lambda p, mask, x: register(((x @ mask) @ p["w"]) * jnp.broadcast_to(p["s"], (5, 5)))
        free = lambda p, mask, x: register((x @ mask) @ p["w"])
        assert rows(free, {"w": SQUARE}, MASK, X) == [("dense_tag", "")]
        assert rows(f, {"w": SQUARE, "s": X[0]}, MASK, X) == [
            ("scale_and_shift_tag", ""),
            ("dense_tag", ""),
        ]

    def test_a_mask_of_positions(self):
        """Batch, time and features of the same size."""

        def f(p, mask, x):
            h = x @ p["w"]
            scores = jnp.einsum("btd,bsd->bts", h, h) * jnp.broadcast_to(mask, (len(h), 5, 5))
            return register(jnp.einsum("bts,bsd->btd", scores, x).reshape(len(h), -1) @ p["v"])

        params = {"w": SQUARE, "v": normal(5, 25, 2)}
        assert rows(f, params, MASK, normal(6, 5, 5, 5)) == [("dense_tag", "")] * 2

    def test_a_mask_for_each_example_is_a_batch(self):
        f = lambda w, mask, x: register((x * mask) @ w)
        assert rows(f, SQUARE, MASK, X) == [("dense_tag", "")]

    def test_a_batch_next_to_it_in_the_same_argument(self):
        f = lambda w, data: register((data["x"] @ data["mask"]) @ w)
        assert rows(f, SQUARE, {"mask": MASK, "x": X}) == [("dense_tag", "")]

    def test_the_function_is_traced_once(self):
        calls = []
        f = lambda w, x: (calls.append(x), register(x @ w))
        assert rows(f, Q, X) == [("dense_tag", "")]
        assert len(calls) == 1


class TestABatchThatIsClosedOver:
    def test_layers_of_all_kinds(self):
        def f(p):
            h = jnp.tanh(X @ p["w"] + jnp.broadcast_to(p["b"], (5, 4)))
            return register(h * jnp.broadcast_to(p["s"], (5, 4)))

        params = {"w": Q, "b": Q[0], "s": Q[1]}
        assert rows(f, params) == [
            ("dense_tag", ""),
            ("scale_and_shift_tag", ""),
            ("dense_tag", ""),
        ]

    @pytest.mark.parametrize("is_argument", [True, False])
    def test_weights_next_to_a_batch_that_is_closed_over(self, is_argument):
        f = lambda q, w0=W0: register(X @ (w0 + q))
        args = (Q, W0) if is_argument else (Q,)
        assert rows(f, *args) == [("dense_tag", "")]

    def test_an_argument_of_the_same_length(self):
        """It is not what the losses are about."""
        f = lambda w, other: (register(X @ w), jnp.sum(other))
        assert rows(f, Q, normal(7, 5)) == [("dense_tag", "")]

    def test_one_example_at_a_time(self):
        def f(w):
            return register(jax.lax.scan(lambda _, x: (None, x @ w), None, X)[1])

        assert rows(f, Q) == [("dense_tag", "")]


class TestLossesWithRowsForPositions:
    def f(self, p, tokens):
        x = p["table"][tokens] + jnp.broadcast_to(p["place"], (*tokens.shape, 4))
        return register(self.mixed(x).reshape(-1, 4))

    params = {"table": normal(8, 9, 4), "place": normal(9, 3, 4)}  # noqa: RUF012

    def found(self, mixed):
        self.mixed = mixed
        return rows(self.f, self.params, jnp.arange(6).reshape(2, 3))

    def test_positions_that_are_apart_are_examples(self):
        """But for those that have a parameter of their own."""
        along = "examples unknown: they are along an axis that the parameters also have"
        assert self.found(jnp.tanh) == [("scale_and_shift_tag", along), ("embedding_tag", "")]

    def test_positions_that_are_mixed(self):
        tags = ["scale_and_shift_tag", "embedding_tag"]
        assert self.found(lambda x: jnp.cumsum(x, 1)) == [(tag, NOT_APART) for tag in tags]


def test_a_parameter_for_each_example():
    f = lambda p, x: register(x * p["s"] + p["t"])
    params = {"s": Q, "t": W0}
    unknown = "examples unknown: they are along an axis that the parameters also have"
    assert rows(f, params, normal(9, 5, 4)) == [("scale_and_shift_tag", unknown)] * 2
