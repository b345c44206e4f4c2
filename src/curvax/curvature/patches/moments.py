"""`patches_moments`: the mean patch of a convolution's inputs, and the mean outer product.

The second moment is the input factor of K-FAC for convolutions (Grosse & Martens 2016, "A
Kronecker-factored approximate Fisher matrix for convolution layers").
"""

import jax
import jax.numpy as jnp
from jax import lax

from curvax._errors import check_size
from curvax._types import Array, at_least_single
from curvax.curvature.patches.geometry import (
    ConvGeometry,
    DimNumbers,
    Padding,
    Sizes,
    read_geometry,
    read_inputs,
    read_weights,
)
from curvax.curvature.patches.patches import patch_moment_sums


def patches_moments(
    inputs: Array,
    kernel_spatial_shape: Sizes,
    strides: Sizes = 1,
    padding: Padding = "VALID",
    data_format: str | None = "NHWC",
    dim_numbers: DimNumbers | None = None,
    inputs_dilation: Sizes | None = None,
    kernel_dilation: Sizes | None = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    unroll_loop: bool = False,
    precision: lax.PrecisionLike = None,
    weighting_array: Array | None = None,
    *,
    chunk_size: int | None = None,
) -> tuple[Array, Array]:
    """Average the patches that a convolution reads, and their outer products.

    Equal to

        patches = all patches of all images, each of shape kernel_spatial_shape + (channels,)
        second = mean of tensordot(patch, patch, axes=0) * weight over patches
        first = mean of patch * weight over patches

    except that patches are formed for a few images at a time, and mostly only in part. Zeros of the
    padding and of the dilation of inputs are elements of patches. Means are over the number of
    patches, images times output positions, whatever the weights.

    The input factor of K-FAC for a convolution is such a second moment (Grosse & Martens 2016).

    Arguments:
        inputs: Images, of a real floating dtype, with one to three spatial axes.
        kernel_spatial_shape: Spatial shape of the kernel. Here and below, a single integer stands
            for all spatial axes.
        strides: Strides of the convolution.
        padding: "VALID", "SAME", "SAME_LOWER", or a pair `(low, high)` for each spatial axis, where
            a negative number crops the inputs.
        data_format: Layout of the inputs: "NHWC", "NCHW", "NWC", "NCW", "NDHWC" or "NCDHW". None
            for batch, channels, then spatial axes.
        dim_numbers: Layouts of inputs, kernel and outputs, in place of `data_format`, as
            `lax.conv_dimension_numbers` accepts or returns them. The spatial axes of the results,
            and of all arguments but `weighting_array`, are in the order of the kernel.
        inputs_dilation: Dilation of the inputs: one more than the number of zeros between elements.
        kernel_dilation: Dilation of the kernel.
        feature_group_count: Number of groups of channels, each with separate moments.
        batch_group_count: Number of groups of images, each with separate moments.
        unroll_loop: Whether to unroll the loop over chunks of images. The program may then be
            faster, but takes longer to compile and more memory.
        precision: Precision of the matrix products, as `lax.dot_general` accepts it.
        weighting_array: Weight of each patch, of any shape that broadcasts to
            `(images, *spatial shape of the outputs)`.
        chunk_size: Number of images of each group in a chunk. None for a size that is fast, about a
            megabyte.

    Returns:
        The second moment, of shape
        `kernel_spatial_shape + (channels,) + kernel_spatial_shape + (channels,)`, and the first,
        of shape `kernel_spatial_shape + (channels,)`. With several groups, both have a leading axis
        for them, and `channels` is the number of channels of one group. Results are at least in
        float32.

    Raises:
        ValueError: If the arguments describe no convolution of the inputs, or one without any
            output, or weights do not broadcast.
        TypeError: If the inputs are not real floating numbers, or a size is not an integer.

    Examples:
        >>> import curvax
        >>> import jax.numpy as jnp
        >>> images = jnp.arange(32.0).reshape(2, 4, 4, 1)
        >>> second, first = curvax.patches_moments(images, (2, 2))
        >>> second.shape
        (2, 2, 1, 2, 2, 1)
        >>> first[..., 0]
        Array([[13., 14.],
               [17., 18.]], dtype=float32)
    """
    inputs = read_inputs(inputs)
    geometry = read_geometry(
        inputs.shape,
        kernel_spatial_shape,
        strides,
        padding,
        data_format,
        dim_numbers,
        inputs_dilation,
        kernel_dilation,
        feature_group_count,
        batch_group_count,
    )
    second, first = patch_moment_sums(
        inputs,
        geometry,
        weights=read_weights(weighting_array, geometry, inputs.shape),
        precision=precision,
        chunk_size=check_size("chunk_size", chunk_size),
        unroll_loop=unroll_loop,
    )
    assert first is not None
    return _as_averages(second, first, geometry, inputs.shape)


def patches_moments_explicit(
    inputs: Array,
    kernel_spatial_shape: Sizes,
    strides: Sizes = 1,
    padding: Padding = "VALID",
    data_format: str | None = "NHWC",
    dim_numbers: DimNumbers | None = None,
    inputs_dilation: Sizes | None = None,
    kernel_dilation: Sizes | None = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    unroll_loop: bool = False,
    precision: lax.PrecisionLike = None,
    weighting_array: Array | None = None,
) -> tuple[Array, Array]:
    """Average the patches that a convolution reads, and their outer products, from all patches.

    Equal to `patches_moments`, except that all patches of all images are formed at once, by
    `lax.conv_general_dilated_patches`. This is the plain program that `patches_moments` is tested
    against. It needs memory for all patches, and usually more time.

    Arguments:
        inputs: Images, of a real floating dtype, with one to three spatial axes.
        kernel_spatial_shape: Spatial shape of the kernel. Here and below, a single integer stands
            for all spatial axes.
        strides: Strides of the convolution.
        padding: "VALID", "SAME", "SAME_LOWER", or a pair `(low, high)` for each spatial axis, where
            a negative number crops the inputs.
        data_format: Layout of the inputs: "NHWC", "NCHW", "NWC", "NCW", "NDHWC" or "NCDHW". None
            for batch, channels, then spatial axes.
        dim_numbers: Layouts of inputs, kernel and outputs, in place of `data_format`, as
            `lax.conv_dimension_numbers` accepts or returns them. The spatial axes of the results,
            and of all arguments but `weighting_array`, are in the order of the kernel.
        inputs_dilation: Dilation of the inputs: one more than the number of zeros between elements.
        kernel_dilation: Dilation of the kernel.
        feature_group_count: Number of groups of channels, each with separate moments.
        batch_group_count: Number of groups of images, each with separate moments.
        unroll_loop: Has no effect, because there is no loop.
        precision: Precision of the matrix products, as `lax.dot_general` accepts it.
        weighting_array: Weight of each patch, of any shape that broadcasts to
            `(images, *spatial shape of the outputs)`.

    Returns:
        The second moment, of shape
        `kernel_spatial_shape + (channels,) + kernel_spatial_shape + (channels,)`, and the first,
        of shape `kernel_spatial_shape + (channels,)`. With several groups, both have a leading axis
        for them, and `channels` is the number of channels of one group. Results are at least in
        float32.

    Raises:
        ValueError: If the arguments describe no convolution of the inputs, or one without any
            output, or weights do not broadcast.
        TypeError: If the inputs are not real floating numbers, or a size is not an integer.

    Examples:
        >>> import curvax
        >>> import jax.numpy as jnp
        >>> signal = jnp.arange(5.0).reshape(1, 5, 1)
        >>> second, first = curvax.patches_moments_explicit(signal, 2, data_format="NWC")
        >>> first[:, 0]
        Array([1.5, 2.5], dtype=float32)
    """
    del unroll_loop
    inputs = read_inputs(inputs)
    geometry = read_geometry(
        inputs.shape,
        kernel_spatial_shape,
        strides,
        padding,
        data_format,
        dim_numbers,
        inputs_dilation,
        kernel_dilation,
        feature_group_count,
        batch_group_count,
    )
    weights = read_weights(weighting_array, geometry, inputs.shape)
    dtype = at_least_single(inputs.dtype)
    patches = _all_patches(inputs, geometry).astype(dtype)
    weighted = patches
    if weights is not None:
        by_group = weights.astype(dtype).reshape(geometry.batch_group_count, -1, 1)
        weighted = patches * jnp.broadcast_to(by_group, patches.shape)
    second = jax.vmap(lambda x, y: jnp.matmul(x.T, y, precision=precision))(weighted, patches)
    first = jnp.sum(weighted, axis=1)
    if geometry.num_groups == 1:
        second, first = second[0], first[0]
    return _as_averages(second, first, geometry, inputs.shape)


def _all_patches(inputs: Array, geometry: ConvGeometry) -> Array:
    """Return all patches, `(groups, images and positions, patch size)`."""
    lhs_spec, rhs_spec, out_spec = geometry.dimension_numbers
    patches = lax.conv_general_dilated_patches(
        inputs,
        geometry.kernel_spatial_shape,
        geometry.window_strides,
        geometry.padding,
        geometry.lhs_dilation,
        geometry.rhs_dilation,
        lax.ConvDimensionNumbers(lhs_spec, tuple(range(len(rhs_spec))), out_spec),
        lax.Precision.HIGHEST,
    )
    patches = jnp.moveaxis(patches, out_spec[:2], (0, -1))
    # `conv_general_dilated_patches` orders elements by channel first, and channels by group.
    patches = patches.reshape(
        geometry.batch_group_count,
        -1,
        geometry.feature_group_count,
        geometry.num_channels(inputs.shape),
        geometry.kernel_size,
    )
    by_group = patches.transpose(0, 2, 1, 4, 3)
    size = geometry.patch_size(inputs.shape)
    return by_group.reshape(geometry.num_groups, -1, size)


def _as_averages(
    second: Array, first: Array, geometry: ConvGeometry, inputs_shape: tuple[int, ...]
) -> tuple[Array, Array]:
    """Divide sums over patches by their number, and unflatten the axes of elements."""
    count = geometry.num_images(inputs_shape) * geometry.num_positions(inputs_shape)
    patch = (*geometry.kernel_spatial_shape, geometry.num_channels(inputs_shape))
    groups = first.shape[:-1]
    average = lambda x, *shape: (x / count).reshape(*groups, *shape)
    return average(second, *patch, *patch), average(first, *patch)
