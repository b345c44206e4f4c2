"""What is wrong with a convolution is said in the words of the caller."""

import jax.numpy as jnp
import pytest
from jax import lax

from curvax.curvature.patches.moments import patches_moments, patches_moments_explicit

IMAGES = jnp.ones((4, 5, 6, 3))
NUMBERS = lax.conv_dimension_numbers((4, 5, 3), (2, 3, 1), ("NWC", "WIO", "NWC"))

WRONG = {
    "integer inputs": (
        {"inputs": jnp.ones((4, 5, 6, 3), int)},
        TypeError,
        "floating dtype, got int64",
    ),
    "no spatial axes": (
        {"inputs": jnp.ones((4, 3))},
        ValueError,
        r"one to three spatial .* \(4, 3\)",
    ),
    "kernel of another rank": (
        {"kernel_spatial_shape": (2, 2, 2)},
        ValueError,
        "each of the 2 spatial",
    ),
    "kernel of no size": ({"kernel_spatial_shape": 0}, ValueError, "at least 1 everywhere, got 0"),
    "kernel of a fraction": ({"kernel_spatial_shape": 2.5}, TypeError, "Python integer or a seq"),
    "stride of zero": ({"strides": (1, 0)}, ValueError, r"strides must be at least 1 .* \(1, 0\)"),
    "strides of another rank": (
        {"strides": (1,)},
        ValueError,
        "strides must have an entry for each",
    ),
    "negative kernel dilation": ({"kernel_dilation": -1}, ValueError, "kernel_dilation must be at"),
    "inputs dilation of zero": ({"inputs_dilation": 0}, ValueError, "inputs_dilation must be at"),
    "unknown format": ({"data_format": "HWNC"}, ValueError, "one of .* got 'HWNC'. Describe any"),
    "format of another rank": (
        {"data_format": "NWC"},
        ValueError,
        r"give one of \['NHWC', 'NCHW'\]",
    ),
    "numbers of another rank": ({"dim_numbers": NUMBERS}, ValueError, "must hold the axes 0 to 3"),
    "letters of another rank": (
        {"dim_numbers": ("NWC", "WIO", "NWC")},
        ValueError,
        "three strings of",
    ),
    "unknown padding": ({"padding": "FULL"}, ValueError, "padding must be one of .* got 'FULL'"),
    "padding without pairs": ({"padding": (1, 1)}, ValueError, r"a pair \(low, high\) .* \(1, 1\)"),
    "too few pairs": ({"padding": ((1, 1),)}, ValueError, r"each of the 2 spatial axes"),
    "named padding of dilated inputs": (
        {"padding": "SAME", "inputs_dilation": 2},
        ValueError,
        "no agreed meaning for dilated inputs",
    ),
    "both kinds of groups": (
        {"feature_group_count": 3, "batch_group_count": 2},
        ValueError,
        "at least one of them must be 1",
    ),
    "channels in uneven groups": ({"feature_group_count": 2}, ValueError, "divide the 3 channels"),
    "images in uneven groups": ({"batch_group_count": 3}, ValueError, "divide the 4 images"),
    "no groups": (
        {"feature_group_count": 0},
        ValueError,
        "must be a positive Python integer, got 0",
    ),
    "kernel larger than inputs": (
        {"kernel_spatial_shape": (6, 2)},
        ValueError,
        "there are no patches",
    ),
    "all is cut off": (
        {"padding": ((-3, -3), (0, 0))},
        ValueError,
        r"spatial shape \(0, 6\) after",
    ),
    "no images": ({"inputs": jnp.ones((0, 5, 6, 3))}, ValueError, "nothing to average"),
    "weights of another shape": (
        {"weighting_array": jnp.ones(4)},
        ValueError,
        r"must broadcast to \(4, 4, 5\).*reshape\(\(4, 1, 1\)\)",
    ),
    "weights that are too many": (
        {"weighting_array": jnp.ones((2, 4, 4, 5))},
        ValueError,
        "broadcast",
    ),
    "complex weights": (
        {"weighting_array": jnp.ones((4, 1, 1), complex)},
        TypeError,
        "must be real",
    ),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("function", [patches_moments, patches_moments_explicit])
@pytest.mark.parametrize(("changes", "error", "message"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_explained(function, changes, error, message):
    arguments = {"inputs": IMAGES, "kernel_spatial_shape": 2} | changes
    with pytest.raises(error, match=rf"curvax\.{function.__name__}: .*{message}"):
        function(**arguments)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("size", "error"), [(0, ValueError), (1.5, TypeError)])
def test_a_wrong_chunk_size_is_explained(size, error):
    with pytest.raises(error, match=r"curvax\.patches_moments: chunk_size must be"):
        patches_moments(IMAGES, 2, chunk_size=size)
