"""The batch size is the length of the first axis, where all arrays of a batch agree on it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from curvax.curvature.batch import default_batch_size_extractor

KEY = jax.random.key(0)


@pytest.mark.parametrize(
    "batch",
    [
        jnp.zeros((5, 2)),
        np.zeros(5, int),
        (jnp.zeros((5, 2)), jnp.zeros(5, int)),
        {"x": jnp.zeros((5, 1, 1)), "scale": jnp.ones(()), "number": 3.0, "nothing": None},
        {"x": jnp.zeros((5, 1)), "key": KEY, "keys": jax.random.split(KEY, 2)},
        [jax.ShapeDtypeStruct((5, 7), jnp.float32)],
    ],
    ids=["array", "NumPy", "pair", "numbers", "keys", "shapes"],
)
def test_the_first_axis_of_all_arrays(batch):
    assert default_batch_size_extractor(batch) == 5


def test_it_is_a_python_int_under_jit():
    sizes = []
    jax.jit(lambda batch: sizes.append(default_batch_size_extractor(batch)))(jnp.zeros((4, 2)))
    assert sizes == [4]
    assert type(sizes[0]) is int


def test_arrays_that_disagree_are_listed():
    batch = {"x": jnp.zeros((5, 2)), "classes": jnp.zeros(3)}
    with pytest.raises(ValueError, match="batch_size_extractor") as error:
        default_batch_size_extractor(batch)
    assert "batch['classes'] has 3, batch['x'] has 5" in str(error.value)


@pytest.mark.parametrize("batch", [(), None, 3.0, jnp.zeros(()), KEY, jax.random.split(KEY, 2)])
def test_a_batch_of_no_size(batch):
    with pytest.raises(ValueError, match=r"no array with an axis.* Pass batch_size_extractor"):
        default_batch_size_extractor(batch)
