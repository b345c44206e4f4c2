"""Patches of images by slicing, and sums of their outer products.

At one kernel offset, all positions together read one strided slice of the padded inputs. The
patches are these slices, one for each offset, concatenated: copies of the inputs, without
arithmetic. The second moment of patches is the input factor of K-FAC for convolutions (Grosse &
Martens 2016, "A Kronecker-factored approximate Fisher matrix for convolution layers").
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from curvax._types import Array, PyTree, at_least_single
from curvax.curvature.patches.geometry import ConvGeometry
from curvax.maps.accumulators import AccumulationType
from curvax.maps.microbatch import microbatch


def extract_patches(inputs: Array, geometry: ConvGeometry) -> Array:
    """Return all patches of the inputs of a convolution.

    They are the matrix that the kernel is multiplied by. Without groups, and with the kernel as a
    matrix `w` of shape `(patch size, output channels)`, elements ordered as in `ConvGeometry`,

        outputs = extract_patches(inputs, geometry) @ w

    with the output positions of an image in the order of the outputs; with groups, this holds for
    each group and its kernel. The kernel's gradient is a sum over output positions of outer
    products of patches and cotangents.

    Arguments:
        inputs: Inputs of the convolution, in the layout of the geometry.
        geometry: Kernel shape, strides, padding, dilations, layout and groups of the convolution.

    Returns:
        An array of shape `(images, output positions, patch size)`. If `feature_group_count` or
        `batch_group_count` exceeds 1, there is a leading axis of groups.
    """

    def patches_of(images: Array) -> Array:
        axes = range(geometry.num_spatial)
        patches = patches_along(padded_images(images, geometry), axes, geometry, inputs.shape)
        order = (0, *(1 + i for i in geometry.spatial_order_of_outputs), patches.ndim - 1)
        return patches.transpose(order).reshape(len(images), -1, patches.shape[-1])

    groups = images_of_groups(split_batch(inputs, geometry), geometry)
    return jax.vmap(patches_of)(groups) if geometry.num_groups > 1 else patches_of(groups[0])


def split_batch(inputs: Array, geometry: ConvGeometry) -> Array:
    """Split the batch axis of the inputs into `(batch groups, images)`."""
    axis, shape = geometry.dimension_numbers.lhs_spec[0], inputs.shape
    images = geometry.num_images(shape)
    groups = geometry.batch_group_count
    return inputs.reshape(*shape[:axis], groups, images, *shape[axis + 1 :])


def images_of_groups(inputs: Array, geometry: ConvGeometry) -> Array:
    """Transpose the result of `split_batch` to `(groups, images, *spatial, channels)`."""
    batch, channel, *spatial = geometry.dimension_numbers.lhs_spec
    shifted = lambda axis: axis + 1 if axis > batch else axis
    images = inputs.transpose(batch, batch + 1, *map(shifted, spatial), shifted(channel))
    count = geometry.feature_group_count
    if count == 1:
        return images
    groups = images.reshape(*images.shape[:-1], count, images.shape[-1] // count)
    return jnp.moveaxis(groups, -2, 1).reshape(-1, *images.shape[1:-1], groups.shape[-1])


def patches_along(
    padded: Array, axes: Iterable[int], geometry: ConvGeometry, inputs_shape: Sequence[int]
) -> Array:
    """Return the patches of padded images along some of the spatial axes.

    `padded` is `(images, *spatial, channels)`. In the result, the chosen spatial axes are those of
    positions, the others are unchanged, and the last axis is that of elements.
    """
    chosen = tuple(axes)
    positions = geometry.position_shape(inputs_shape)

    def read_at(offset: tuple[int, ...]) -> Array:
        starts, stops, strides = [0] * padded.ndim, list(padded.shape), [1] * padded.ndim
        for axis, a in zip(chosen, offset, strict=True):
            stride = geometry.window_strides[axis]
            starts[1 + axis] = a * geometry.rhs_dilation[axis]
            stops[1 + axis] = starts[1 + axis] + (positions[axis] - 1) * stride + 1
            strides[1 + axis] = stride
        return lax.slice(padded, starts, stops, strides)

    offsets = itertools.product(*(range(geometry.kernel_spatial_shape[axis]) for axis in chosen))
    return jnp.concatenate([read_at(offset) for offset in offsets], axis=-1)


def padded_images(images: Array, geometry: ConvGeometry) -> Array:
    """Dilate and pad `(images, *spatial, channels)` with zeros."""
    pads = zip(geometry.padding, geometry.lhs_dilation, strict=True)
    spatial = [(low, high, dilation - 1) for (low, high), dilation in pads]
    return lax.pad(images, jnp.zeros((), images.dtype), [(0, 0, 0), *spatial, (0, 0, 0)])


# Sums of outer products of patches, without forming patches along one spatial axis.
#
# That axis is the *band axis*. Patches along the other axes, for all rows of the band axis, are
# *bands*:
#
#     bands[y]: a matrix with a row for each image and each position along the other axes
#
# The patch at position p is the concatenation of the rows of `bands[p*s + a*d]` over the kernel
# offsets a, with the stride s and the dilation d of the band axis. So the block of the second
# moment for the offsets a and b is a product of bands, and half of the blocks are transposes of the
# other half:
#
#     block(a, b) = sum over p of bands[p*s + a*d].T @ bands[p*s + b*d]
#
# With s = 1 and no weights, the terms of a block depend on p + a*d and on b - a only. Blocks of
# the same b - a are then sums of the same terms over ranges shifted by d. The sum over the
# intersection of these ranges is computed once, then the few terms at either end. No term is ever
# subtracted, so rounding errors are no larger than those of the plain product.
#
# For a kernel of length k along the band axis, this takes 1/k of the arithmetic of the product of
# all patches, or about half where blocks have no common terms; and 1/k of the copies of inputs.

# Longer kernels would give programs of hundreds of small products; for them patches are faster.
LONGEST_BAND_AXIS = 11


@dataclass(frozen=True)
class Bands:
    """The choice of the band axis, and sums of outer products of the patches of one group.

    Arrays that methods accept and return have no axis of groups.

    Attributes:
        geometry: Kernel shape, strides, padding, dilations, layout and groups of the convolution.
        inputs_shape: Shape of the inputs of the convolution.
        axis: Index of the band axis; None for none, with a single band of complete patches.
        common_terms: Whether blocks with the same distance of offsets have common terms.
    """

    geometry: ConvGeometry
    inputs_shape: tuple[int, ...]
    axis: int | None
    common_terms: bool

    @classmethod
    def of(cls, geometry: ConvGeometry, inputs_shape: Sequence[int], *, weighted: bool) -> "Bands":
        """Choose the longest kernel axis, of those of at most `LONGEST_BAND_AXIS` offsets.

        Axes along which blocks have common terms take precedence.
        """
        choices = [
            (geometry.window_strides[axis] == 1 and not weighted, size, -axis)
            for axis, size in enumerate(geometry.kernel_spatial_shape)
            if 1 < size <= LONGEST_BAND_AXIS
        ]
        if not choices:
            return cls(geometry, tuple(inputs_shape), None, False)
        common_terms, _, axis = max(choices)
        return cls(geometry, tuple(inputs_shape), -axis, common_terms)

    def bytes_per_image(self, itemsize: int) -> int:
        """Return the size in bytes of the bands of one image in all groups."""
        rows = self.geometry.num_positions(self.inputs_shape)
        if self.axis is not None:
            padded = self.geometry.padded_spatial_shape(self.inputs_shape)[self.axis]
            rows = rows // self._num_positions * padded
        return itemsize * self.geometry.num_groups * rows * self._width

    def sums(
        self,
        images: Array,
        weights: Array | None,
        *,
        with_first: bool,
        precision: lax.PrecisionLike,
    ) -> tuple[Array, Array | None]:
        """Return sums over the patches of images, which can be added, for `second` and `first`.

        `images` is `(images, *spatial, channels)` and `weights`, if any, `(images, *positions)`.
        The second moment is represented by its blocks on and above the diagonal.
        """
        bands = self._bands_of(images)
        offsets = range(self._num_offsets)
        if self.common_terms:
            blocks = [self._blocks_at_distance(bands, k, precision) for k in offsets]
            rows = jnp.sum(bands, axis=1, keepdims=True, dtype=at_least_single(bands.dtype))
            read = [self._read_at(rows, offset) for offset in offsets]
            return jnp.concatenate(blocks), _sums_of_rows(read) if with_first else None

        right = [self._read_at(bands, offset) for offset in offsets]
        left = right
        if weights is not None:
            right = [x.astype(at_least_single(x.dtype)) for x in right]
            scale = self._band_axis_first(weights, 1)
            left = [scale.astype(x.dtype) * x for x in right]
        blocks = [_product(left[a], right[b], precision) for a, b in self._pairs]
        return jnp.stack(blocks), _sums_of_rows(left) if with_first else None

    def second(self, blocks: Array) -> Array:
        """Return the matrix of the second moment, exactly symmetric, from its blocks."""
        count, width = self._num_offsets, self._width
        block_index = np.zeros((count, count), np.int32)
        for index, (a, b) in enumerate(self._pairs):
            block_index[a, b] = block_index[b, a] = index
        above = blocks[block_index]
        below = jnp.swapaxes(above, -1, -2)
        side = (np.arange(count)[:, None] - np.arange(count)[None, :])[:, :, None, None]
        full = jnp.where(side < 0, above, jnp.where(side > 0, below, (above + below) / 2))
        matrix = jnp.swapaxes(full, 1, 2).reshape(count * width, count * width)
        order = self._order
        return matrix if order is None else matrix[order[:, None], order[None, :]]

    def first(self, sums: Array) -> Array:
        """Return the first moment, from its parts for each offset along the band axis."""
        vector = sums.reshape(-1)
        return vector if self._order is None else vector[self._order]

    def _blocks_at_distance(
        self, bands: Array, distance: int, precision: lax.PrecisionLike
    ) -> Array:
        """Return the blocks `(a, a + distance)` for all a, which have common terms."""
        count, step = self._num_offsets - distance, self._dilation
        positions, reach, shift = self._num_positions, (count - 1) * step, distance * step

        def terms(start: int, stop: int) -> Array:
            return _product(bands[start:stop], bands[start + shift : stop + shift], precision)

        # Block a is the sum of the terms from a * step on, as many as there are positions.
        starts = [offset * step for offset in range(count)]
        if positions <= reach:
            return jnp.stack([terms(start, start + positions) for start in starts])
        blocks = [terms(reach, positions)] * count
        below = accumulate(terms(start - step, start) for start in starts[:0:-1])
        for offset, ends in zip(reversed(range(count - 1)), below, strict=True):
            blocks[offset] += ends
        above = accumulate(terms(positions + x, positions + x + step) for x in starts[:-1])
        for offset, ends in zip(range(1, count), above, strict=True):
            blocks[offset] += ends
        return jnp.stack(blocks)

    def _bands_of(self, images: Array) -> Array:
        """Return the bands, `(rows, images and positions along the other axes, width)`."""
        others = [axis for axis in range(self.geometry.num_spatial) if axis != self.axis]
        padded = padded_images(images, self.geometry)
        patches = patches_along(padded, others, self.geometry, self.inputs_shape)
        return self._band_axis_first(patches, patches.shape[-1])

    def _band_axis_first(self, x: Array, width: int) -> Array:
        """Reshape `(images, *spatial, width)` to `(rows of the band axis, all others, width)`."""
        if self.axis is None:
            return x.reshape(1, -1, width)
        rows = x.shape[1 + self.axis]
        return jnp.moveaxis(x, 1 + self.axis, 0).reshape(rows, -1, width)

    def _read_at(self, bands: Array, offset: int) -> Array:
        """Return the rows that the positions read at a kernel offset."""
        start = offset * self._dilation
        stop = start + (self._num_positions - 1) * self._stride + 1
        return lax.slice_in_dim(bands, start, stop, self._stride)

    @property
    def _pairs(self) -> list[tuple[int, int]]:
        """The kernel offsets of each block, in the order of the blocks of `sums`."""
        count = self._num_offsets
        return [(a, a + distance) for distance in range(count) for a in range(count - distance)]

    @property
    def _order(self) -> np.ndarray | None:
        """The index of each element of a patch in the concatenated bands; None if in order."""
        if not self.axis:
            return None
        kernel = list(self.geometry.kernel_spatial_shape)
        kernel.insert(0, kernel.pop(self.axis))
        channels = self.geometry.num_channels(self.inputs_shape)
        indices = np.arange(math.prod(kernel) * channels).reshape(*kernel, channels)
        return np.moveaxis(indices, 0, self.axis).reshape(-1)

    @property
    def _num_offsets(self) -> int:
        """The number of kernel offsets along the band axis."""
        return 1 if self.axis is None else self.geometry.kernel_spatial_shape[self.axis]

    @property
    def _width(self) -> int:
        return self.geometry.patch_size(self.inputs_shape) // self._num_offsets

    @property
    def _num_positions(self) -> int:
        """The number of positions along the band axis."""
        if self.axis is None:
            return 1
        return self.geometry.position_shape(self.inputs_shape)[self.axis]

    @property
    def _stride(self) -> int:
        return 1 if self.axis is None else self.geometry.window_strides[self.axis]

    @property
    def _dilation(self) -> int:
        return 1 if self.axis is None else self.geometry.rhs_dilation[self.axis]


def _product(left: Array, right: Array, precision: lax.PrecisionLike) -> Array:
    """Return `left.T @ right` for matrices whose rows are along two axes."""
    # With a single axis of rows, XLA does not transpose the left matrix first.
    left, right = (x.reshape(-1, x.shape[-1]) for x in (left, right))
    rows = (((0,), (0,)), ((), ()))
    return lax.dot_general(left, right, rows, precision, at_least_single(left.dtype))


def _sums_of_rows(matrices: Sequence[Array]) -> Array:
    """Return the sum of the rows of each matrix, whose rows are along two axes."""
    dtype = at_least_single(matrices[0].dtype)
    return jnp.stack([jnp.sum(x, axis=(0, 1), dtype=dtype) for x in matrices])


# Sums of patches and of their outer products, one chunk of images at a time.

# A chunk is as large as the sums, so that the cost of accumulation is small, or at least this
# large.
CHUNK_BYTES = 1 << 20


def patch_moment_sums(
    inputs: Array,
    geometry: ConvGeometry,
    *,
    weights: Array | None = None,
    with_first: bool = True,
    precision: lax.PrecisionLike = None,
    chunk_size: int | None = None,
    unroll_loop: bool = False,
) -> tuple[Array, Array | None]:
    """Return the sums over all patches of their outer products and of the patches.

    Equal to

        patches = extract_patches(inputs, geometry)
        second = einsum("...npi,...np,...npj->...ij", patches, weights, patches)
        first = einsum("...npi,...np->...i", patches, weights)

    except that patches are formed for one chunk of images at a time, and mostly only in part.

    Arguments:
        inputs: Inputs of the convolution, in the layout of the geometry.
        geometry: Kernel shape, strides, padding, dilations, layout and groups of the convolution.
        weights: Weight of each patch, `(images, *spatial)` with the spatial shape of the outputs
            and all images of `inputs`. None means 1.
        with_first: Whether to also compute the sum of patches.
        precision: Precision of the matrix products, as `lax.dot_general` accepts it.
        chunk_size: Number of images of each group in a chunk. None for a size that is fast.
        unroll_loop: Whether to unroll the loop over chunks. XLA may then compute several chunks
            concurrently, which takes more memory.

    Returns:
        The sum of outer products `(patch size, patch size)`, exactly symmetric, and the sum of
        patches `(patch size,)` or None; at least in float32. With several groups, of channels or
        of images, both have a leading axis for them.
    """
    bands = Bands.of(geometry, inputs.shape, weighted=weights is not None)
    size = _images_at_once(inputs, bands) if chunk_size is None else chunk_size

    def sums_of(images: Array, weights: Array | None = None) -> tuple[Array, Array | None]:
        groups = images_of_groups(images, geometry)
        sums = functools.partial(bands.sums, with_first=with_first, precision=precision)
        if geometry.num_groups == 1:
            return sums(groups[0], None if weights is None else weights[0])
        if weights is None or geometry.batch_group_count == 1:
            return jax.vmap(sums, (0, None))(groups, None if weights is None else weights[0])
        return jax.vmap(sums)(groups, weights)

    batch = [split_batch(inputs, geometry)]
    axes = [geometry.dimension_numbers.lhs_spec[0] + 1]
    if weights is not None:
        batch.append(_weights_of_positions(weights, geometry))
        axes.append(1)
    run = _sum_unrolled if unroll_loop else _sum_in_loop
    blocks, parts = run(sums_of, batch, axes, size)

    per_group = jax.vmap if geometry.num_groups > 1 else lambda fun: fun
    second = per_group(bands.second)(blocks)
    return second, None if parts is None else per_group(bands.first)(parts)


def _images_at_once(inputs: Array, bands: Bands) -> int:
    """Return a number of images per group and chunk that is fast."""
    geometry, itemsize = bands.geometry, inputs.dtype.itemsize
    if geometry.kernel_size == 1:  # The patches are the inputs themselves.
        return max(1, geometry.num_images(inputs.shape))
    result = itemsize * geometry.num_groups * geometry.patch_size(inputs.shape) ** 2
    return max(1, max(CHUNK_BYTES, result) // max(1, bands.bytes_per_image(itemsize)))


def _weights_of_positions(weights: Array, geometry: ConvGeometry) -> Array:
    """Reshape weights `(images, *spatial)` to `(batch groups, images, *positions)`."""
    order = geometry.spatial_order_of_outputs
    by_axis = weights.transpose(0, *(1 + order.index(i) for i in range(len(order))))
    count = geometry.batch_group_count
    return by_axis.reshape(count, len(weights) // count, *by_axis.shape[1:])


def _sum_in_loop(
    fun: Callable[..., PyTree], batch: Sequence[Array], axes: Sequence[int], size: int
) -> PyTree:
    """Return the sum of `fun` over chunks of images, one in memory at a time."""
    argnums = tuple(range(len(batch)))
    return microbatch(fun, argnums, size, AccumulationType.SUM, in_axes=tuple(axes))(*batch)


def _sum_unrolled(
    fun: Callable[..., PyTree], batch: Sequence[Array], axes: Sequence[int], size: int
) -> PyTree:
    """Equal to `_sum_in_loop`, except that the loop is unrolled."""
    length = batch[0].shape[axes[0]]
    total = None
    for start in range(0, max(1, length), size):
        stop = min(start + size, length)
        pairs = zip(batch, axes, strict=True)
        value = fun(*(lax.slice_in_dim(x, start, stop, axis=axis) for x, axis in pairs))
        total = value if total is None else jax.tree.map(jnp.add, total, value)
    return total
