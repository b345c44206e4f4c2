"""Sums of patches and of their outer products, a chunk of images at a time."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from curvax._types import Array, PyTree
from curvax.batching import AccumulationType, microbatch
from curvax.conv._bands import Bands
from curvax.conv._geometry import ConvGeometry
from curvax.conv._patches import images_of_groups, split_batch

__all__ = ["patch_moment_sums"]

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
