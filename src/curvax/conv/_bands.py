"""Outer products of patches, summed, with one spatial axis not made into patches.

That axis is the *shared* one. Patches along the other axes, for all rows of the shared one, are
*bands*:

    bands[y]: a matrix with a row for each image and each position along the other axes

The patch at position p is the rows of `bands[p*s + a*d]` side by side, for the places a in the
kernel, with the stride s and the dilation d of the shared axis. So the block of the second moment
for the places a and b is a product of bands, and half of the blocks are the others transposed:

    block(a, b) = sum over p of bands[p*s + a*d].T @ bands[p*s + b*d]

With s = 1 and no weights the terms of a block depend on p + a*d and on b - a only. Blocks of the
same b - a are then sums of the same terms over ranges that are shifted by d. What is common to all
these ranges is computed once, and then the few terms at either end. No term is ever subtracted, so
rounding does no more harm than in the plain product.

Of the arithmetic of the product of all patches 1/k is left, for a kernel of k places along the
shared axis, or about half where blocks share no terms; and of the copies of inputs also 1/k.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from curvax._types import Array
from curvax.conv._geometry import ConvGeometry
from curvax.conv._patches import padded_images, patches_along

__all__ = ["Bands", "accumulation_dtype"]

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
            rows = jnp.sum(bands, axis=1, keepdims=True, dtype=accumulation_dtype(bands.dtype))
            seen = [self._seen_from(rows, place) for place in places]
            return jnp.concatenate(apart), _sums_of_rows(seen) if with_first else None

        right = [self._seen_from(bands, place) for place in places]
        left = right
        if weights is not None:
            right = [x.astype(accumulation_dtype(x.dtype)) for x in right]
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


def accumulation_dtype(dtype: Any) -> Any:
    """The dtype in which numbers of that dtype are summed: at least float32."""
    return jnp.dtype(jnp.float32) if jnp.finfo(dtype).bits < 32 else dtype


def _product(left: Array, right: Array, precision: lax.PrecisionLike) -> Array:
    """`left.T @ right`, of matrices whose rows are along two axes."""
    # With one axis of rows the compiler does not transpose the left matrix first.
    left, right = (x.reshape(-1, x.shape[-1]) for x in (left, right))
    rows = (((0,), (0,)), ((), ()))
    return lax.dot_general(left, right, rows, precision, accumulation_dtype(left.dtype))


def _sums_of_rows(matrices: Sequence[Array]) -> Array:
    """The sum of the rows of each matrix, whose rows are along two axes."""
    dtype = accumulation_dtype(matrices[0].dtype)
    return jnp.stack([jnp.sum(x, axis=(0, 1), dtype=dtype) for x in matrices])
