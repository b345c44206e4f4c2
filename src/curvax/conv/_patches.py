"""Patches of images, by slices.

At one place of the kernel all positions together see one strided slice of the padded inputs. All
patches are such slices side by side, one for each place: copies of the inputs, without arithmetic.
"""

import itertools
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from curvax._types import Array
from curvax.conv._geometry import ConvGeometry

__all__ = ["extract_patches", "images_of_groups", "padded_images", "patches_along", "split_batch"]


def extract_patches(inputs: Array, geometry: ConvGeometry) -> Array:
    """All patches of the inputs of a convolution.

    Equal to what the kernel is multiplied with: with the kernel as a matrix `w` of shape
    `(patch size, output channels)`, elements ordered as in `ConvGeometry`,

        outputs = extract_patches(inputs, geometry) @ w

    with the positions of an image in the order of the outputs. The kernel's gradient is a sum over
    positions of outer products of patches and cotangents.

    Arguments:
        inputs: the inputs of the convolution, in the layout that the geometry says.
        geometry: the convolution, without its kernel.

    Returns:
        An array of shape `(images, positions, patch size)`. With several groups, of channels or of
        images, it has a leading axis for these.
    """

    def patches_of(images: Array) -> Array:
        axes = range(geometry.num_spatial)
        patches = patches_along(padded_images(images, geometry), axes, geometry, inputs.shape)
        order = (0, *(1 + i for i in geometry.spatial_order_of_outputs), patches.ndim - 1)
        return patches.transpose(order).reshape(len(images), -1, patches.shape[-1])

    groups = images_of_groups(split_batch(inputs, geometry), geometry)
    return jax.vmap(patches_of)(groups) if geometry.num_groups > 1 else patches_of(groups[0])


def split_batch(inputs: Array, geometry: ConvGeometry) -> Array:
    """The inputs with their batch axis made two of `(batch groups, images)`."""
    axis, shape = geometry.dimension_numbers.lhs_spec[0], inputs.shape
    images = geometry.num_images(shape)
    groups = geometry.batch_group_count
    return inputs.reshape(*shape[:axis], groups, images, *shape[axis + 1 :])


def images_of_groups(inputs: Array, geometry: ConvGeometry) -> Array:
    """What `split_batch` made, or some images of it, as `(groups, images, *spatial, channels)`."""
    batch, channel, *spatial = geometry.dimension_numbers.lhs_spec
    moved = lambda axis: axis + 1 if axis > batch else axis
    images = inputs.transpose(batch, batch + 1, *map(moved, spatial), moved(channel))
    count = geometry.feature_group_count
    if count == 1:
        return images
    groups = images.reshape(*images.shape[:-1], count, images.shape[-1] // count)
    return jnp.moveaxis(groups, -2, 1).reshape(-1, *images.shape[1:-1], groups.shape[-1])


def patches_along(
    padded: Array, axes: Iterable[int], geometry: ConvGeometry, inputs_shape: Sequence[int]
) -> Array:
    """The patches of padded images along some of the spatial axes; the others stay as they are.

    `padded` is `(images, *spatial, channels)`. In the result the spatial axes are positions where
    they were asked for, and the last axis is that of elements.
    """
    chosen = tuple(axes)
    positions = geometry.position_shape(inputs_shape)

    def seen_from(place: tuple[int, ...]) -> Array:
        starts, stops, strides = [0] * padded.ndim, list(padded.shape), [1] * padded.ndim
        for axis, a in zip(chosen, place, strict=True):
            stride = geometry.window_strides[axis]
            starts[1 + axis] = a * geometry.rhs_dilation[axis]
            stops[1 + axis] = starts[1 + axis] + (positions[axis] - 1) * stride + 1
            strides[1 + axis] = stride
        return lax.slice(padded, starts, stops, strides)

    places = itertools.product(*(range(geometry.kernel_spatial_shape[axis]) for axis in chosen))
    return jnp.concatenate([seen_from(place) for place in places], axis=-1)


def padded_images(images: Array, geometry: ConvGeometry) -> Array:
    """`(images, *spatial, channels)`, dilated and padded with zeros."""
    pads = zip(geometry.padding, geometry.lhs_dilation, strict=True)
    spatial = [(low, high, dilation - 1) for (low, high), dilation in pads]
    return lax.pad(images, jnp.zeros((), images.dtype), [(0, 0, 0), *spatial, (0, 0, 0)])
