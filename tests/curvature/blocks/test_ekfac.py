"""Eigenvalue-corrected blocks are closer to the truth than those that are not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given as for_all, strategies as st

import curvax
from curvature.blocks.states import EKFAC
from curvature.cases import KEY, N, case, dense_curvature, estimated_matrix
from helpers import assert_same


def corrected(case, *args):
    """The matrix after the same batch was seen once for the basis, and once in it."""
    estimator = curvax.BlockDiagonalCurvature(case.func, layer_tag_to_block_ctor=EKFAC)
    update = lambda state: estimator.update_curvature_matrix_estimate(
        state, 0.0, 1.0, N, KEY, args, None, "ggn_exact"
    )
    state = update(estimator.init(KEY, args, None, None, True))
    state = estimator.update_cache(state, 0.1, None, -1, True, None)
    before = estimator.to_dense_matrix(state)
    state = update(state)
    # To ask for eigenvalues alone changes nothing.
    state = estimator.update_cache(state, 0.1, None, None, True, None)
    return before, estimator.to_dense_matrix(state)


@functools.cache
def matrices(model: str, loss: str):
    """Compute both approximations, and the truth."""
    known = case(model, loss)

    def compute(*args):
        plain = curvax.BlockDiagonalCurvature(known.func)
        kfac = estimated_matrix(plain, args, "ggn_exact")
        return kfac, *corrected(known, *args), dense_curvature(known, *args)

    return known, jax.jit(compute)


@pytest.mark.parametrize(
    ("model", "loss"),
    [("2-D", "softmax"), pytest.param("mlp", "several", marks=pytest.mark.slow)],
)
class TestCorrected:
    def found(self, model, loss, seed):
        """K-FAC, the corrected one, and the truth, of the first layer; and the other before."""
        known, compute = matrices(model, loss)
        params, batch = known.args
        shape = batch["x"].shape
        x = jnp.asarray(np.random.default_rng(seed).standard_normal(shape))
        kfac, before, corrected, truth = compute(params, {**batch, "x": x})
        own = np.flatnonzero(known.numbers() == 0)
        return [np.asarray(matrix)[np.ix_(own, own)] for matrix in (kfac, before, corrected, truth)]

    @for_all(seed=st.integers(0, 1000))
    def test_it_is_no_further_from_the_truth(self, model, loss, seed):
        kfac, _, corrected, truth = self.found(model, loss, seed)
        far, near = np.linalg.norm(kfac - truth), np.linalg.norm(corrected - truth)
        assert near <= far * (1 + 1e-9)

    def test_it_is_the_best_diagonal_in_its_basis(self, model, loss):
        kfac, _, corrected, truth = self.found(model, loss, 0)
        _, basis = np.linalg.eigh(kfac)
        best = (basis * np.diag(basis.T @ truth @ basis)) @ basis.T
        assert_same(jnp.asarray(corrected), jnp.asarray(best), 1e-8, 1e-9)

    def test_it_is_not_corrected_in_a_new_basis(self, model, loss):
        kfac, before, corrected, _ = self.found(model, loss, 0)
        assert_same(jnp.asarray(before), jnp.asarray(kfac), 1e-9, 1e-10)
        assert np.linalg.norm(corrected - before) > 1e-3
