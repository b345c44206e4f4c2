"""Patches exist for a few images at a time: asserted from the compiled programs."""

import functools

import jax
import jax.numpy as jnp
import pytest

from curvax.curvature.patches.moments import patches_moments, patches_moments_explicit
from helpers import num_bytes, temporaries

pytestmark = pytest.mark.optimised

moments = functools.partial(patches_moments, kernel_spatial_shape=3, padding="SAME")
explicit = functools.partial(patches_moments_explicit, kernel_spatial_shape=3, padding="SAME")


PLACES = 9


def images(count):
    return jax.ShapeDtypeStruct((count, 16, 16, 16), jnp.float32)


@pytest.mark.parametrize("chunk_size", [None, 4])
def test_more_images_take_no_more_memory(chunk_size):
    fun = functools.partial(moments, chunk_size=chunk_size)
    few, many = (temporaries(fun, images(count)) for count in (128, 512))
    # Chunks are of the same size but for rounding, because they are evened out.
    assert many <= 1.25 * few
    assert many < num_bytes(images(512))
    assert 8 * many < PLACES * num_bytes(images(512))


def test_the_explicit_moments_hold_all_patches():
    assert temporaries(explicit, images(64)) >= PLACES * num_bytes(images(64))


def test_smaller_chunks_take_less_memory():
    small, large = (
        temporaries(functools.partial(moments, chunk_size=size), images(64)) for size in (4, 32)
    )
    assert 3 * small < large


def test_a_chunk_takes_less_memory_than_its_patches():
    assert temporaries(functools.partial(moments, chunk_size=64), images(64)) < temporaries(
        explicit, images(64)
    )
