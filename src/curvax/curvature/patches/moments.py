"""The average patch of a convolution's inputs, and the average of their outer products."""

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
    """Average the patches that a convolution sees, and their outer products.

    Equal to

        patches = all patches of all images, each of shape kernel_spatial_shape + (channels,)
        second = mean of tensordot(patch, patch, axes=0) * weight over patches
        first = mean of patch * weight over patches

    except that patches exist for a few images at a time only, and mostly in part. Zeros of the
    padding and of the dilation of inputs are elements of patches like others. Weights do not
    change what is divided by: the number of patches, which is that of images times that of output
    positions.

    The kernel's factor of a K-FAC approximation of a convolution is such a second moment.

    Arguments:
        inputs: the images, of a real floating dtype, with one to three spatial axes.
        kernel_spatial_shape: the spatial shape of the kernel. Here and below a single integer
            stands for the same along all spatial axes.
        strides: the strides of the convolution.
        padding: "VALID", "SAME", "SAME_LOWER", or a pair `(low, high)` for each spatial axis,
            where a negative number cuts inputs off.
        data_format: the layout of inputs: "NHWC", "NCHW", or "NWC", "NCW", "NDHWC", "NCDHW". None
            is batch, channels, then spatial axes.
        dim_numbers: in place of `data_format`, the layouts of inputs, kernel and outputs, as
            `lax.conv_dimension_numbers` takes or returns them. The spatial axes of the results,
            and of all arguments but `weighting_array`, are in the order that the kernel has.
        inputs_dilation: the dilation of inputs: one more than the zeros put between elements.
        kernel_dilation: the dilation of the kernel.
        feature_group_count: the number of groups of channels. Each has moments of its own.
        batch_group_count: the number of groups of images. Each has moments of its own.
        unroll_loop: write the loop over chunks of images out. The program may then be faster, and
            takes longer to compile and more memory.
        precision: that of the matrix products, as in `lax.dot_general`.
        weighting_array: what the contribution of each patch is multiplied by, in any shape that
            broadcasts to `(images, *spatial shape of the outputs)`.
        chunk_size: how many images, of each group of images, to take at once. None takes enough
            to be fast, which is about a megabyte.

    Returns:
        The second moment, of shape
        `kernel_spatial_shape + (channels,) + kernel_spatial_shape + (channels,)`, and the first,
        of shape `kernel_spatial_shape + (channels,)`. Where there are several groups both have a
        leading axis for these, and channels are those of one group. Inputs of less than float32
        give float32.

    Raises:
        ValueError: if the arguments describe no convolution of the inputs, or one without any
            output, or weights do not broadcast.
        TypeError: if the inputs are not real floating numbers, or a size is no integer.

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
    """Do what `patches_moments` does, by taking all patches of all images at once.

    The patches come from `lax.conv_general_dilated_patches`. This is the plain program that
    `patches_moments` is to be compared with. It needs memory for all patches, and mostly more time.

    Arguments:
        inputs: as in `patches_moments`, like all others.
        kernel_spatial_shape: the spatial shape of the kernel.
        strides: the strides of the convolution.
        padding: the padding of the convolution.
        data_format: the layout of inputs.
        dim_numbers: in place of `data_format`, the layouts of inputs, kernel and outputs.
        inputs_dilation: the dilation of inputs.
        kernel_dilation: the dilation of the kernel.
        feature_group_count: the number of groups of channels.
        batch_group_count: the number of groups of images.
        unroll_loop: has no effect, because there is no loop.
        precision: that of the matrix products.
        weighting_array: what the contribution of each patch is multiplied by.

    Returns:
        The second and the first moment, as from `patches_moments`.

    Raises:
        ValueError: as in `patches_moments`.
        TypeError: as in `patches_moments`.

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
    """`(groups, images and positions, patch size)`, by a convolution with a kernel of 0 and 1."""
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
    # Elements come with their channel first, and channels with their group.
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
    """Sums over patches as averages, with an axis for each of the kernel's."""
    count = geometry.num_images(inputs_shape) * geometry.num_positions(inputs_shape)
    patch = (*geometry.kernel_spatial_shape, geometry.num_channels(inputs_shape))
    groups = first.shape[:-1]
    average = lambda x, *shape: (x / count).reshape(*groups, *shape)
    return average(second, *patch, *patch), average(first, *patch)
