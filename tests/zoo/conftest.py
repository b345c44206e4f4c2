"""Frameworks rely on promotion of dtypes and ranks, so their models run with JAX's defaults."""

import jax
import pytest


@pytest.fixture(autouse=True)
def _as_frameworks_are_run():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
