"""kfac_jax's `patches_second_moment`: sums over the patches that a convolution reads.

Equal to `curvax.patches_moments`, except that patches are summed and not averaged, and that a
convolution with as many groups as channels has these along the last axis.
"""

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import jax.numpy as jnp
from jax import lax

from curvax._types import Array
from curvax.curvature.patches import moments
from curvax.curvature.patches.geometry import read_geometry

T = TypeVar("T")
Shape: TypeAlias = tuple[int, ...]
DimNumbers: TypeAlias = tuple[Shape, Shape, Shape]
PaddingVariants: TypeAlias = str | int | Sequence[int] | Sequence[tuple[int, int]]

_settings = {"use_4d_convolution_in_psm_loop": True}


def get_use_4d_convolution_in_psm_loop() -> bool:
    """Return what `set_use_4d_convolution_in_psm_loop` was last called with."""
    return _settings["use_4d_convolution_in_psm_loop"]


def set_use_4d_convolution_in_psm_loop(value: bool) -> None:
    """Set a choice between two implementations of kfac_jax; it has no effect on curvax's."""
    _settings["use_4d_convolution_in_psm_loop"] = value


def num_conv_locations(
    inputs_spatial_shape: Shape,
    kernel_spatial_shape: int | Shape,
    spatial_strides: int | Shape,
    spatial_padding: PaddingVariants,
) -> int:
    """Return the number of positions at which a convolution applies its kernel.

    Arguments:
        inputs_spatial_shape: Spatial shape of the inputs.
        kernel_spatial_shape: Spatial shape of the kernel; an integer stands for all axes.
        spatial_strides: Strides; an integer stands for all axes.
        spatial_padding: "SAME", "VALID", the padding on both sides of each axis as an integer or
            several, or a pair for each axis.

    Examples:
        >>> num_conv_locations((8, 9), (3, 2), (2, 3), ((1, 1), (0, 2)))
        16
    """
    count = len(inputs_spatial_shape)
    kernel, strides = (
        (x,) * count if isinstance(x, int) else tuple(x)
        for x in (kernel_spatial_shape, spatial_strides)
    )
    padding = _pairs(spatial_padding, count)
    if isinstance(padding, str):
        padding = lax.padtype_to_pads(inputs_spatial_shape, kernel, strides, padding)
    sizes = zip(inputs_spatial_shape, kernel, strides, padding, strict=True)
    return math.prod((n + low + high - k) // stride + 1 for n, k, stride, (low, high) in sizes)


def patches_moments(
    inputs: Array,
    kernel_spatial_shape: int | Shape,
    strides: int | Shape = 1,
    padding: PaddingVariants = "VALID",
    data_format: str | None = "NHWC",
    dim_numbers: DimNumbers | lax.ConvDimensionNumbers | None = None,
    inputs_dilation: int | Sequence[int] | None = None,
    kernel_dilation: int | Sequence[int] | None = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    unroll_loop: bool = False,
    precision: lax.Precision | None = None,
    weighting_array: Array | None = None,
) -> tuple[Array, Array]:
    """Sum the outer products of the patches that a convolution reads, and the patches.

    Arguments:
        inputs: A batch of images.
        kernel_spatial_shape: Spatial shape of the kernel; an integer stands for all axes.
        strides: Strides of the convolution.
        padding: "VALID", "SAME", the padding on both sides of each spatial axis as an integer or
            several, or a pair for each axis.
        data_format: Layout of the inputs, "NHWC" or "NCHW"; None for batch, channels, then spatial
            axes.
        dim_numbers: Layouts of inputs, kernel and outputs, in place of `data_format`.
        inputs_dilation: Dilation of the inputs.
        kernel_dilation: Dilation of the kernel.
        feature_group_count: Number of groups of channels: 1, or the number of channels.
        batch_group_count: Number of groups of images: 1.
        unroll_loop: Whether to unroll the loop over chunks of images.
        precision: Precision of the matrix products.
        weighting_array: Weight of each image, of shape `(images,)`, or of each patch.

    Returns:
        The sum of outer products, of shape `kernel_spatial_shape + (channels,) +
        kernel_spatial_shape + (channels,)`, and the sum of patches, of shape
        `kernel_spatial_shape + (channels,)`. With as many groups as channels, the former is of
        shape `kernel_spatial_shape + kernel_spatial_shape + (channels,)`.

    Raises:
        ValueError: If there are other numbers of groups.

    Examples:
        >>> images = jnp.arange(32.0).reshape(2, 4, 4, 1)
        >>> second, first = patches_moments(images, (2, 2))
        >>> first[..., 0]
        Array([[234., 252.],
               [306., 324.]], dtype=float32)
    """
    return _sums(
        moments.patches_moments,
        inputs,
        kernel_spatial_shape,
        strides,
        padding,
        data_format,
        dim_numbers,
        inputs_dilation,
        kernel_dilation,
        feature_group_count,
        batch_group_count,
        unroll_loop,
        precision,
        weighting_array,
    )


def patches_moments_explicit(
    inputs: Array,
    kernel_spatial_shape: int | Shape,
    strides: int | Shape = 1,
    padding: PaddingVariants = "VALID",
    data_format: str | None = "NHWC",
    dim_numbers: DimNumbers | lax.ConvDimensionNumbers | None = None,
    inputs_dilation: int | Sequence[int] | None = None,
    kernel_dilation: int | Sequence[int] | None = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    unroll_loop: bool = False,
    precision: lax.Precision | None = None,
    weighting_array: Array | None = None,
) -> tuple[Array, Array]:
    """Compute `patches_moments` from all patches at once.

    Arguments:
        inputs: A batch of images.
        kernel_spatial_shape: Spatial shape of the kernel; an integer stands for all axes.
        strides: Strides of the convolution.
        padding: "VALID", "SAME", the padding on both sides of each spatial axis as an integer or
            several, or a pair for each axis.
        data_format: Layout of the inputs, "NHWC" or "NCHW"; None for batch, channels, then spatial
            axes.
        dim_numbers: Layouts of inputs, kernel and outputs, in place of `data_format`.
        inputs_dilation: Dilation of the inputs.
        kernel_dilation: Dilation of the kernel.
        feature_group_count: Number of groups of channels: 1, or the number of channels.
        batch_group_count: Number of groups of images: 1.
        unroll_loop: Has no effect, because there is no loop.
        precision: Precision of the matrix products.
        weighting_array: Weight of each image, of shape `(images,)`, or of each patch.

    Returns:
        The sums of outer products and of patches, as `patches_moments` returns them.

    Raises:
        ValueError: If there are other numbers of groups.
    """
    return _sums(
        moments.patches_moments_explicit,
        inputs,
        kernel_spatial_shape,
        strides,
        padding,
        data_format,
        dim_numbers,
        inputs_dilation,
        kernel_dilation,
        feature_group_count,
        batch_group_count,
        unroll_loop,
        precision,
        weighting_array,
    )


def _sums(
    average: Callable[..., tuple[Array, Array]],
    inputs: Array,
    kernel_spatial_shape: int | Shape,
    strides: int | Shape,
    padding: PaddingVariants,
    data_format: str | None,
    dim_numbers: DimNumbers | lax.ConvDimensionNumbers | None,
    inputs_dilation: int | Sequence[int] | None,
    kernel_dilation: int | Sequence[int] | None,
    feature_group_count: int,
    batch_group_count: int,
    unroll_loop: bool,
    precision: lax.Precision | None,
    weighting_array: Array | None,
) -> tuple[Array, Array]:
    """Return the sums of which one of curvax's functions returns the means."""
    inputs = jnp.asarray(inputs)
    convolution = (
        kernel_spatial_shape,
        strides,
        _pairs(padding, inputs.ndim - 2),
        data_format,
        None if dim_numbers is None else lax.ConvDimensionNumbers(*dim_numbers),
        inputs_dilation,
        kernel_dilation,
        feature_group_count,
        batch_group_count,
    )
    geometry = read_geometry(inputs.shape, *convolution)
    in_each_group = geometry.num_channels(inputs.shape)
    is_grouped = feature_group_count > 1
    if batch_group_count > 1 or (is_grouped and in_each_group > 1):
        raise ValueError(
            f"curvax.kfac_jax.{average.__name__}: sums are known for feature_group_count 1 or the "
            f"number of channels, {in_each_group * feature_group_count}, and for "
            f"batch_group_count=1, got {feature_group_count} and {batch_group_count}. "
            f"curvax.{average.__name__} averages over any groups."
        )
    weights = weighting_array
    if weights is not None:
        weights = jnp.asarray(weights)
        weights = weights.reshape(weights.shape + (1,) * (inputs.ndim - 1 - weights.ndim))
    second, first = average(inputs, *convolution, unroll_loop, precision, weights)
    count = geometry.num_images(inputs.shape) * geometry.num_positions(inputs.shape)
    if is_grouped:  # From (groups, *kernel, 1, *kernel, 1) and (groups, *kernel, 1).
        spatial = inputs.ndim - 2
        second = jnp.moveaxis(jnp.squeeze(second, (spatial + 1, 2 * spatial + 2)), 0, -1)
        first = jnp.moveaxis(jnp.squeeze(first, spatial + 1), 0, -1)
    return second * count, first * count


def _pairs(padding: PaddingVariants, count: int) -> str | tuple[tuple[int, int], ...]:
    """Return the padding of each spatial axis as a pair, if it is not a word."""
    if isinstance(padding, str):
        return padding
    each = (padding,) * count if isinstance(padding, int) else tuple(padding)
    return tuple((p, p) if isinstance(p, int) else (p[0], p[1]) for p in each)
