"""Patches of images, by slices.

At one place of the kernel all positions together see one strided slice of the padded inputs. All
patches are such slices side by side, one for each place: copies of the inputs, without arithmetic.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from curvax._types import Array, PyTree, at_least_single
from curvax.curvature.patches.geometry import ConvGeometry
from curvax.maps.accumulators import AccumulationType
from curvax.maps.microbatch import microbatch


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


# Outer products of patches, summed, with one spatial axis not made into patches.
#
# That axis is the *shared* one. Patches along the other axes, for all rows of the shared one, are
# *bands*:
#
#     bands[y]: a matrix with a row for each image and each position along the other axes
#
# The patch at position p is the rows of `bands[p*s + a*d]` side by side, for the places a in the
# kernel, with the stride s and the dilation d of the shared axis. So the block of the second moment
# for the places a and b is a product of bands, and half of the blocks are the others transposed:
#
#     block(a, b) = sum over p of bands[p*s + a*d].T @ bands[p*s + b*d]
#
# With s = 1 and no weights the terms of a block depend on p + a*d and on b - a only. Blocks of
# the same b - a are then sums of the same terms over ranges that are shifted by d. What is common
# to all these ranges is computed once, and then the few terms at either end. No term is ever
# subtracted, so rounding does no more harm than in the plain product.
#
# Of the arithmetic of the product of all patches 1/k is left, for a kernel of k places along the
# shared axis, or about half where blocks share no terms; and of the copies of inputs also 1/k.

# Longer kernels would make programs of hundreds of small products. For them patches are better.
LONGEST_SHARED = 11


@dataclass(frozen=True)
class Bands:
    """How the patches of one group are summed: which axis is shared, and how.

    With `axis=None` no axis is, and the bands are a single one that is made of whole patches. With
    `common_terms` blocks share terms. What a method takes or returns has no axis of groups.
    """

    geometry: ConvGeometry
    inputs_shape: tuple[int, ...]
    axis: int | None
    common_terms: bool

    @classmethod
    def of(cls, geometry: ConvGeometry, inputs_shape: Sequence[int], *, weighted: bool) -> "Bands":
        """The bands that are best for a convolution: those of the longest kernel axis that will do.

        Axes along which blocks have common terms come first.
        """
        choices = [
            (geometry.window_strides[axis] == 1 and not weighted, size, -axis)
            for axis, size in enumerate(geometry.kernel_spatial_shape)
            if 1 < size <= LONGEST_SHARED
        ]
        if not choices:
            return cls(geometry, tuple(inputs_shape), None, False)
        common_terms, _, axis = max(choices)
        return cls(geometry, tuple(inputs_shape), -axis, common_terms)

    def bytes_per_image(self, itemsize: int) -> int:
        """The size of the bands of one image in all groups."""
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
        """The sums over the patches of images, to be added up and given to `second` and `first`.

        `images` is `(images, *spatial, channels)` and `weights`, if any, `(images, *positions)`.
        The second moment comes as its blocks on and above the diagonal.
        """
        bands = self._bands_of(images)
        places = range(self._num_places)
        if self.common_terms:
            apart = [self._blocks_apart(bands, distance, precision) for distance in places]
            rows = jnp.sum(bands, axis=1, keepdims=True, dtype=at_least_single(bands.dtype))
            seen = [self._seen_from(rows, place) for place in places]
            return jnp.concatenate(apart), _sums_of_rows(seen) if with_first else None

        right = [self._seen_from(bands, place) for place in places]
        left = right
        if weights is not None:
            right = [x.astype(at_least_single(x.dtype)) for x in right]
            scale = self._shared_first(weights, 1)
            left = [scale.astype(x.dtype) * x for x in right]
        blocks = [_product(left[a], right[b], precision) for a, b in self._pairs]
        return jnp.stack(blocks), _sums_of_rows(left) if with_first else None

    def second(self, blocks: Array) -> Array:
        """The matrix of a second moment, exactly symmetric, of its blocks."""
        count, width = self._num_places, self._width
        number = np.zeros((count, count), np.int32)
        for index, (a, b) in enumerate(self._pairs):
            number[a, b] = number[b, a] = index
        above = blocks[number]
        below = jnp.swapaxes(above, -1, -2)
        side = (np.arange(count)[:, None] - np.arange(count)[None, :])[:, :, None, None]
        whole = jnp.where(side < 0, above, jnp.where(side > 0, below, (above + below) / 2))
        matrix = jnp.swapaxes(whole, 1, 2).reshape(count * width, count * width)
        order = self._order
        return matrix if order is None else matrix[order[:, None], order[None, :]]

    def first(self, sums: Array) -> Array:
        """The vector of a first moment, of its parts for each place along the shared axis."""
        vector = sums.reshape(-1)
        return vector if self._order is None else vector[self._order]

    def _blocks_apart(self, bands: Array, distance: int, precision: lax.PrecisionLike) -> Array:
        """The blocks `(a, a + distance)` for all a, where these have common terms."""
        count, step = self._num_places - distance, self._dilation
        positions, reach, shift = self._num_positions, (count - 1) * step, distance * step

        def terms(start: int, stop: int) -> Array:
            return _product(bands[start:stop], bands[start + shift : stop + shift], precision)

        starts = [place * step for place in range(count)]
        if positions <= reach:
            return jnp.stack([terms(start, start + positions) for start in starts])
        # Block a has the terms from a * step on, as many as there are positions.
        blocks = [terms(reach, positions)] * count
        below = accumulate(terms(start - step, start) for start in starts[:0:-1])
        for place, ends in zip(reversed(range(count - 1)), below, strict=True):
            blocks[place] += ends
        above = accumulate(terms(positions + x, positions + x + step) for x in starts[:-1])
        for place, ends in zip(range(1, count), above, strict=True):
            blocks[place] += ends
        return jnp.stack(blocks)

    def _bands_of(self, images: Array) -> Array:
        """The bands, `(rows, images and positions along the other axes, width)`."""
        others = [axis for axis in range(self.geometry.num_spatial) if axis != self.axis]
        padded = padded_images(images, self.geometry)
        patches = patches_along(padded, others, self.geometry, self.inputs_shape)
        return self._shared_first(patches, patches.shape[-1])

    def _shared_first(self, x: Array, width: int) -> Array:
        """`(images, *spatial, width)` as `(rows of the shared axis, all others, width)`."""
        if self.axis is None:
            return x.reshape(1, -1, width)
        rows = x.shape[1 + self.axis]
        return jnp.moveaxis(x, 1 + self.axis, 0).reshape(rows, -1, width)

    def _seen_from(self, bands: Array, place: int) -> Array:
        """The rows that the positions see at a place in the kernel."""
        start = place * self._dilation
        stop = start + (self._num_positions - 1) * self._stride + 1
        return lax.slice_in_dim(bands, start, stop, self._stride)

    @property
    def _pairs(self) -> list[tuple[int, int]]:
        """The places that blocks are for, in the order in which `sums` returns the blocks."""
        count = self._num_places
        return [(a, a + distance) for distance in range(count) for a in range(count - distance)]

    @property
    def _order(self) -> Any:
        """Where the elements of a patch are among those of bands side by side; None: in order."""
        if not self.axis:
            return None
        kernel = list(self.geometry.kernel_spatial_shape)
        kernel.insert(0, kernel.pop(self.axis))
        channels = self.geometry.num_channels(self.inputs_shape)
        places = np.arange(math.prod(kernel) * channels).reshape(*kernel, channels)
        return np.moveaxis(places, 0, self.axis).reshape(-1)

    @property
    def _num_places(self) -> int:
        return 1 if self.axis is None else self.geometry.kernel_spatial_shape[self.axis]

    @property
    def _width(self) -> int:
        return self.geometry.patch_size(self.inputs_shape) // self._num_places

    @property
    def _num_positions(self) -> int:
        """The number of positions along the shared axis."""
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
    """`left.T @ right`, of matrices whose rows are along two axes."""
    # With one axis of rows the compiler does not transpose the left matrix first.
    left, right = (x.reshape(-1, x.shape[-1]) for x in (left, right))
    rows = (((0,), (0,)), ((), ()))
    return lax.dot_general(left, right, rows, precision, at_least_single(left.dtype))


def _sums_of_rows(matrices: Sequence[Array]) -> Array:
    """The sum of the rows of each matrix, whose rows are along two axes."""
    dtype = at_least_single(matrices[0].dtype)
    return jnp.stack([jnp.sum(x, axis=(0, 1), dtype=dtype) for x in matrices])


# Sums of patches and of their outer products, a chunk of images at a time.

# A chunk is as large as the sums, so that adding to these costs little, or at least this large.
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
    """The sums, over all patches, of their outer products with themselves and of the patches.

    Equal to

        patches = extract_patches(inputs, geometry)
        second = einsum("...npi,...np,...npj->...ij", patches, weights, patches)
        first = einsum("...npi,...np->...i", patches, weights)

    except that patches never exist for more than a chunk of images, and mostly only in part.

    Arguments:
        inputs: the inputs of the convolution, in the layout that the geometry says.
        geometry: the convolution, without its kernel.
        weights: what each patch's contribution is multiplied by, `(images, *spatial)` with the
            spatial shape of the outputs and for all images of `inputs`. None is 1 for each.
        with_first: whether to compute the second of the results, too.
        precision: that of the matrix products, as in `lax.dot_general`.
        chunk_size: how many images of each group to take at once. None takes what is fast.
        unroll_loop: write the chunks into the program one after the other, without a loop. The
            compiler may then compute several at once and hold what they need.

    Returns:
        The sums of outer products `(patch size, patch size)`, exactly symmetric, and of patches
        `(patch size,)` or None, in float32 if the inputs are of less. With several groups, of
        channels or of images, both have a leading axis for these.
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
    run = _in_python if unroll_loop else _in_a_loop
    blocks, parts = run(sums_of, batch, axes, size)

    per_group = jax.vmap if geometry.num_groups > 1 else lambda fun: fun
    second = per_group(bands.second)(blocks)
    return second, None if parts is None else per_group(bands.first)(parts)


def _images_at_once(inputs: Array, bands: Bands) -> int:
    """How many images of each group to take at once so that it is fast."""
    geometry, itemsize = bands.geometry, inputs.dtype.itemsize
    if geometry.kernel_size == 1:  # The patches are the inputs themselves.
        return max(1, geometry.num_images(inputs.shape))
    result = itemsize * geometry.num_groups * geometry.patch_size(inputs.shape) ** 2
    return max(1, max(CHUNK_BYTES, result) // max(1, bands.bytes_per_image(itemsize)))


def _weights_of_positions(weights: Array, geometry: ConvGeometry) -> Array:
    """Weights `(images, *spatial)` as `(batch groups, images, *positions)`."""
    order = geometry.spatial_order_of_outputs
    by_axis = weights.transpose(0, *(1 + order.index(i) for i in range(len(order))))
    count = geometry.batch_group_count
    return by_axis.reshape(count, len(weights) // count, *by_axis.shape[1:])


def _in_a_loop(
    fun: Callable[..., PyTree], batch: Sequence[Array], axes: Sequence[int], size: int
) -> Any:
    """The sum of `fun` over chunks of images, of which one is held at a time."""
    argnums = tuple(range(len(batch)))
    return microbatch(fun, argnums, size, AccumulationType.SUM, in_axes=tuple(axes))(*batch)


def _in_python(
    fun: Callable[..., PyTree], batch: Sequence[Array], axes: Sequence[int], size: int
) -> Any:
    """The same without a loop in the program."""
    length = batch[0].shape[axes[0]]
    total = None
    for start in range(0, max(1, length), size):
        stop = min(start + size, length)
        pairs = zip(batch, axes, strict=True)
        value = fun(*(lax.slice_in_dim(x, start, stop, axis=axis) for x, axis in pairs))
        total = value if total is None else jax.tree.map(jnp.add, total, value)
    return total
