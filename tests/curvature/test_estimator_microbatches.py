"""Estimates from microbatches are those of the whole batch."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import pytest

import curvax
from curvature.cases import (
    FULL,
    KEY,
    N,
    case,
    estimated,
    estimated_matrix,
    fit,
    normal,
)
from helpers import assert_same

THREEFRY = jax.random.key(7)
"""Samples for examples with keys of other kinds depend on how many are sampled at once."""

EKFAC = {"dense": curvax.DenseEKFAC, "conv2d": curvax.Conv2DEKFAC, "conv": curvax.Conv2DEKFAC}


def close(actual, expected) -> None:
    assert_same(actual, expected, 1e-9, 1e-10)


@pytest.mark.parametrize(
    ("model", "loss", "mode", "ctors", "size"),
    [
        ("mlp", "several", "fisher_gradients", None, 3),
        pytest.param(
            "exponential", "variance", "fisher_curvature_prop", FULL, 2, marks=pytest.mark.slow
        ),
        ("grouped", "both", "fisher_exact", None, 1),
        ("exponential", "several", "fisher_empirical", FULL, 3),
        ("heads", "own", "ggn_curvature_prop", EKFAC, 2),
        ("stack", "squared", "ggn_exact", None, 3),
        pytest.param("2-D", "own", "ggn_exact", EKFAC, 3, marks=pytest.mark.slow),
        *(
            pytest.param(model, loss, mode, None, 3, marks=pytest.mark.slow)
            for model in ("recurrent", "parts", "tied table", "mapped", "exponential")
            for loss in ("several", "both")
            if fit(model, loss)
            for mode in ("fisher_gradients", "fisher_curvature_prop", "ggn_exact")
        ),
    ],
)
def test_any_mode_and_block(model, loss, mode, ctors, size):
    given = case(model, loss)
    options = {"layer_tag_to_block_ctor": ctors}

    def compute(*args):
        whole = curvax.BlockDiagonalCurvature(given.func, **options)
        split = curvax.BlockDiagonalCurvature(given.func, **options, microbatch_size=size)
        return [estimated(each, args, mode, key=THREEFRY) for each in (split, whole)]

    split, whole = jax.jit(compute)(*given.args)
    close(split, whole)


@pytest.mark.parametrize("size", [3, pytest.param(9, marks=pytest.mark.slow)])
def test_any_size_of_explicit_curvature(size):
    given = case("mlp", "several")

    def compute(*args):
        split = curvax.ExplicitExactCurvature(given.func, microbatch_size=size)
        return estimated_matrix(split, args, "fisher_gradients", key=THREEFRY)

    with curvax.set_max_parallel_elements(1):
        one_by_one = jax.jit(
            lambda *args: estimated_matrix(
                curvax.ExplicitExactCurvature(given.func),
                args,
                "fisher_gradients",
                key=THREEFRY,
            )
        )(*given.args)
    close(jax.jit(compute)(*given.args), one_by_one)


def test_gradients_of_examples_some_at_a_time():
    """The number of elements that are held does not matter for the result."""
    given = case("2-D", "squared")
    ctor = lambda *args: curvax.Conv2DFull(*args, max_elements_for_vmap=60)  # Three examples.

    def compute(*args):
        parts = curvax.BlockDiagonalCurvature(
            given.func, layer_tag_to_block_ctor={"conv2d": ctor, "dense": curvax.DenseFull}
        )
        with curvax.set_max_parallel_elements(1):
            split = estimated_matrix(parts, args, "fisher_empirical")
        whole = curvax.BlockDiagonalCurvature(given.func, layer_tag_to_block_ctor=FULL)
        return split, estimated_matrix(whole, args, "fisher_empirical")

    close(*jax.jit(compute)(*given.args))


class TestInteraction:
    """With batch normalisation in training, a batch is not the sum of its parts."""

    params: ClassVar = {"w": normal(0, 3, 2), "s": normal(1, 2), "t": normal(2, 2)}

    def func(self, p, batch):
        h = batch["x"] @ p["w"]
        h = (h - h.mean(0, keepdims=True)) / (1 + h.var(0, keepdims=True))
        h = h * jnp.broadcast_to(p["s"], h.shape) + jnp.broadcast_to(p["t"], h.shape)
        curvax.register_squared_error_loss(h)

    def test_it_is_an_error(self):
        args = self.params, {"x": normal(3, N, 3)}
        estimator = curvax.BlockDiagonalCurvature(self.func, microbatch_size=2)
        with pytest.raises(ValueError, match=r"examples of a batch interact.*examples_interact"):
            jax.eval_shape(lambda *args: estimated(estimator, args, "ggn_exact"), *args)

    def test_each_microbatch_can_be_taken_for_a_batch(self):
        args = self.params, {"x": normal(3, N, 3)}
        estimator = curvax.BlockDiagonalCurvature(
            self.func, microbatch_size=2, examples_interact=True
        )

        def compute(params, batch):
            whole = curvax.BlockDiagonalCurvature(self.func)
            halves = [{"x": batch["x"][k::2]} for k in (0, 1)]
            # What comes back to `w` depends on random signs, as examples interact on the way.
            scales = lambda state: [x.value for x in state.blocks_states[0].diagonal_factors]
            each = [scales(estimated(whole, (params, half), "ggn_exact")) for half in halves]
            mean = jax.tree.map(lambda *x: sum(x[1:], start=x[0]) / 2, *each)
            state = estimated(estimator, (params, batch), "ggn_exact")
            return scales(state), mean, estimator.to_dense_matrix(state)

        ours, halves, matrix = jax.jit(compute)(*args)
        close(ours, halves)
        assert jnp.isfinite(matrix).all()


def test_user_supplied_blocks_are_not_microbatched():
    class Own(curvax.DenseTwoKroneckerFactored):
        def update_curvature_matrix_estimate(self, *args):
            return super().update_curvature_matrix_estimate(*args)

    given = case("mlp", "squared")
    estimator = curvax.BlockDiagonalCurvature(
        given.func, layer_tag_to_block_ctor={"dense": Own}, microbatch_size=2
    )
    with pytest.raises(ValueError, match="must not override"):
        jax.eval_shape(lambda *args: estimated(estimator, args, "ggn_exact"), *given.args)


def test_a_loss_with_other_rows():
    func = lambda p, batch: curvax.register_squared_error_loss((batch["x"] @ p)[1:])
    estimator = curvax.BlockDiagonalCurvature(func, microbatch_size=2)
    args = normal(0, 3, 2), {"x": normal(1, N, 3)}
    with pytest.raises(ValueError, match=r"there are 3 rows for 4 examples|interact"):
        jax.eval_shape(lambda *args: estimated(estimator, args, "ggn_exact"), *args)


def test_losses_with_several_rows_for_each_example():
    """A loss along a sequence may be registered for all positions, one after the other."""
    x, w, v = normal(0, N, 3, 2), normal(1, 2, 2), normal(2, 2, 2)

    def func(p, batch):
        y = jnp.tanh(batch["x"] @ p["w"]) @ p["v"]
        curvax.register_softmax_cross_entropy_loss(y.reshape(-1, 2))

    def compute(*args):
        whole = curvax.BlockDiagonalCurvature(func)
        estimates = [estimated(whole, args, mode, key=KEY) for mode in ("ggn_exact",)]
        split = curvax.BlockDiagonalCurvature(func, microbatch_size=3)
        return estimates, [estimated(split, args, mode, key=KEY) for mode in ("ggn_exact",)]

    close(*jax.jit(compute)({"w": w, "v": v}, {"x": x}))
