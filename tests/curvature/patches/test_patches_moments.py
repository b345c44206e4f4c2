"""The moments of patches are averages over patches that loops in NumPy find."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

from curvature.patches.geometries import Conv, convolutions, moments_by_hand, plain
from curvax.curvature.patches.moments import patches_moments, patches_moments_explicit
from curvax.curvature.patches.patches import patch_moment_sums

BOTH = {"bounded": patches_moments, "explicit": patches_moments_explicit}
both = pytest.mark.parametrize("function", BOTH.values(), ids=BOTH)


def close(actual, expected, tolerance=1e-12):
    for got, want in zip(actual, expected, strict=True):
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


def weights_for(conv: Conv, kind: str):
    inputs = conv.inputs()
    shape = (conv.images, *conv.geometry().output_spatial_shape(inputs.shape))
    full = np.random.default_rng(1).normal(size=shape)
    return {
        "no": None,
        "all": jnp.asarray(full),
        "images'": jnp.asarray(full[(slice(None), *[slice(0, 1)] * (full.ndim - 1))]),
        "positions'": jnp.asarray(full[0]),
    }[kind]


WEIGHTS = ["no", "no", "no", "all", "images'", "positions'"]


@both
@given(data=st.data())
def test_any_convolution(function, data):
    conv = data.draw(convolutions())
    weights = weights_for(conv, data.draw(st.sampled_from(WEIGHTS)))
    moments = jax.jit(lambda x: function(x, **conv.arguments(), weighting_array=weights))
    close(moments(conv.inputs()), moments_by_hand(conv, conv.inputs(), weights))


SPECIAL = {
    "1-D": plain(kernel=(3,), strides=(2,), padding=((1, 1),)),
    "longer along the second axis": plain(kernel=(2, 4), padding=((0, 1), (1, 2))),
    "strided along the longer axis": plain(kernel=(2, 3), strides=(1, 2)),
    "too long to share": plain(kernel=(12,), spatial=(14,), padding=((0, 1),)),
    "of a single place": plain(kernel=(1, 1), strides=(2, 1), padding=((0, 0), (0, 0))),
    "fewer positions than places": plain(
        kernel=(4, 2), spatial=(5, 4), padding=((0, 0), (0, 0)), kernel_dilation=(1, 1)
    ),
    "dilated": plain(kernel=(3, 2), spatial=(9, 5), kernel_dilation=(2, 3)),
    "transposed": plain(kernel=(3, 3), inputs_dilation=(2, 2), padding=((2, 2), (2, 3))),
    "cut off": plain(padding=((-1, 1), (1, -2))),
    "depthwise": plain(channels=3, feature_group_count=3),
    "groups of channels": plain(channels=4, feature_group_count=2),
    "groups of images": plain(images=18, batch_group_count=3),
    "3-D": plain(kernel=(2, 1, 2), strides=(1, 2, 1)),
}
WEIGHTED = ["longer along the second axis", "dilated", "depthwise", "groups of images"]


@pytest.mark.parametrize(
    ("name", "weighted"), [(x, "no") for x in SPECIAL] + [(x, "all") for x in WEIGHTED]
)
def test_special_convolutions(name, weighted):
    conv = SPECIAL[name]
    weights = weights_for(conv, weighted)
    moments = jax.jit(
        lambda x: patches_moments(x, **conv.arguments(), weighting_array=weights, chunk_size=3)
    )
    second, first = moments(conv.inputs())
    close((second, first), moments_by_hand(conv, conv.inputs(), weights))
    size = first.size // conv.geometry().num_groups
    matrix = np.asarray(second).reshape(-1, size, size)
    assert np.array_equal(matrix, matrix.swapaxes(1, 2))


@pytest.mark.parametrize(
    ("chunk_size", "unroll_loop"), [(1, False), (3, False), (9, False), (3, True)]
)
def test_chunks_of_any_size(chunk_size, unroll_loop):
    conv = plain(images=7)
    moments = jax.jit(
        lambda x: patches_moments(
            x, **conv.arguments(), chunk_size=chunk_size, unroll_loop=unroll_loop
        )
    )
    close(moments(conv.inputs()), moments_by_hand(conv, conv.inputs()))
    loops = str(jax.make_jaxpr(moments)(conv.inputs()))
    assert ("scan" in loops or "while" in loops) == (chunk_size < 7 and not unroll_loop)


FORMATS = {
    "NWC": (3,),
    "NCW": (3,),
    "NHWC": (2, 3),
    "NCHW": (2, 3),
    "NDHWC": (2, 1, 2),
    "NCDHW": (2, 1, 2),
}


@pytest.mark.parametrize("data_format", [*FORMATS, None])
def test_data_formats(data_format):
    """Both functions read their arguments alike; the explicit one compiles sooner."""
    kernel = FORMATS.get(data_format, (2, 3))
    letters = "XYZ"[: len(kernel)]
    last = data_format is not None and data_format.endswith("C")
    layout = f"N{letters}C" if last else f"NC{letters}"
    conv = plain(kernel=kernel, layouts=(layout, f"{letters}IO", layout))
    moments = jax.jit(
        lambda x: patches_moments_explicit(x, kernel, padding=conv.padding, data_format=data_format)
    )
    close(moments(conv.inputs()), moments_by_hand(conv, conv.inputs()))


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("padding", ["VALID", "SAME", "SAME_LOWER"])
def test_named_paddings(padding, stride):
    """An integer stands for all axes, and names mean what they mean to a convolution."""
    conv = plain(strides=(stride, stride), kernel_dilation=(2, 2))
    pads = jax.lax.padtype_to_pads(conv.spatial, (3, 3), conv.strides, padding)
    expected = moments_by_hand(plain(**vars(conv) | {"padding": tuple(pads)}), conv.inputs())
    moments = jax.jit(lambda x: patches_moments_explicit(x, 2, stride, padding, kernel_dilation=2))
    close(moments(conv.inputs()), expected)


@both
def test_dim_numbers_as_jax_lax_returns_them(function):
    conv = plain(layouts=("CYNX", "XYIO", "YNXC"))
    numbers = conv.parameters()["dimension_numbers"]
    moments = jax.jit(lambda x: function(x, **conv.arguments() | {"dim_numbers": numbers}))
    close(moments(conv.inputs()), moments_by_hand(conv, conv.inputs()))


@both
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_summed_in_single(function, dtype, weighted):
    conv = plain()
    inputs = conv.inputs().astype(dtype)
    weights = weights_for(conv, "all").astype(dtype) if weighted else None
    moments = jax.jit(lambda x: function(x, **conv.arguments(), weighting_array=weights))
    double = None if weights is None else np.asarray(weights, np.float64)
    actual = moments(inputs)
    assert [x.dtype for x in actual] == [jnp.float32, jnp.float32]
    close(actual, moments_by_hand(conv, inputs.astype(jnp.float64), double), 2e-6)


def test_masks_are_weights():
    conv = plain()
    mask = weights_for(conv, "all") > 0
    moments = jax.jit(lambda x: patches_moments(x, **conv.arguments(), weighting_array=mask))
    close(moments(conv.inputs()), moments_by_hand(conv, conv.inputs(), np.float64(mask)))


def test_under_vmap_and_in_a_scan():
    conv = plain()
    batches = jnp.stack([conv.inputs(seed) for seed in range(2)])
    moments = lambda x: patches_moments(x, **conv.arguments(), chunk_size=2)
    hand = [moments_by_hand(conv, x) for x in batches]
    expected = [np.stack(x) for x in zip(*hand, strict=True)]
    close(jax.jit(jax.vmap(moments))(batches), expected)
    scanned = jax.jit(lambda x: jax.lax.scan(lambda _, x: (None, moments(x)), None, x)[1])
    close(scanned(batches), expected)


def test_a_row_that_is_left_out_does_not_matter():
    """No terms are added and then taken off: a huge or infinite row spoils its own patches only."""
    conv = plain(kernel=(3, 2), padding=((0, 0), (0, 0)))
    inputs = conv.inputs().at[:, 0].set(jnp.inf)
    second, first = jax.jit(lambda x: patches_moments(x, **conv.arguments()))(inputs)
    with np.errstate(invalid="ignore"):
        expected = moments_by_hand(conv, inputs)
    assert np.isfinite(second[1:, :, :, 1:]).all()
    np.testing.assert_allclose(second[1:, :, :, 1:], expected[0][1:, :, :, 1:], rtol=1e-12)
    np.testing.assert_allclose(first[1:], expected[1][1:], rtol=1e-12)


def test_sums_as_matrices():
    conv = plain(kernel=(2, 3), channels=4, feature_group_count=2)
    second, first = jax.jit(
        lambda x: patch_moment_sums(x, conv.geometry(), with_first=False, chunk_size=2)
    )(conv.inputs())
    geometry, shape = conv.geometry(), conv.inputs().shape
    count = conv.images * geometry.num_positions(shape)
    expected = moments_by_hand(conv, conv.inputs())
    size = geometry.patch_size(shape)
    close([second], [count * expected[0].reshape(2, size, size)])
    assert first is None


def test_the_gradient_is_that_of_the_explicit_moments():
    conv = plain(kernel=(3, 2))

    def gradient(function):
        return jax.jit(
            jax.grad(lambda x: sum(jnp.sum(m**3) for m in function(x, **conv.arguments())))
        )(conv.inputs())

    close([gradient(patches_moments)], [gradient(patches_moments_explicit)])
