"""While they are tested, the functions of curvax check their annotations (`conftest.py`)."""

import jax
import jax.numpy as jnp
import pytest
from beartype.door import is_bearable
from jaxtyping import Float

from curvax.memory.plan import largest_that_fits


def test_an_argument_of_a_wrong_type_is_an_error():
    with pytest.raises(UserWarning, match="violates type hint"):
        largest_that_fits(len, [1, 2], "4MB")


@pytest.mark.parametrize("shape", [(4,), (2, 3)], ids=["vector", "not square"])
def test_the_shape_of_a_matrix_is_checked(shape):
    assert is_bearable(jnp.ones((2, 2)), Float[jax.Array, "n n"])
    assert not is_bearable(jnp.ones(shape), Float[jax.Array, "n n"])
