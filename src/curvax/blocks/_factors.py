"""Both factors of a layer's curvature: moments of its inputs and of the cotangents of its outputs.

A layer with weights computes, at each position, `matrix.T @ row`: the matrix is made of its
weights, with the bias for a last row, and the row is the input there, with a one at its end. This
module says what these are for each kind of layer. Heads and groups of channels have a matrix each,
along an axis in front.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from curvax._types import Array
from curvax.blocks._layer import LayerSite
from curvax.conv import ConvGeometry, extract_patches, patch_moment_sums
from curvax.linalg import DenseSide, Side

__all__ = [
    "geometry_of",
    "input_moment",
    "input_sums",
    "matrix_of_params",
    "matrix_shape",
    "num_rows",
    "output_moment",
    "output_sums",
    "params_of_matrix",
]


def matrix_shape(site: LayerSite) -> tuple[tuple[int, ...], int, int]:
    """Heads or groups, the number of inputs (with the bias), and that of outputs."""
    weight = site.slice_shapes[0]
    bias = int(len(site.slice_shapes) > 1)
    if site.is_conv:
        geometry = geometry_of(site)
        size = geometry.patch_size(site.input.shape)
        groups, out = geometry.num_groups, _out_channels(site)
        heads = (groups,) if groups > 1 else ()
        return heads, size + bias, out // groups
    if site.kind == "embedding_tag":
        return (), weight[0] + bias, math.prod(weight[1:])
    return weight[:-2], weight[-2] + bias, weight[-1]


def matrix_of_params(site: LayerSite, params: Sequence[Array]) -> Array:
    """Parameters as the function has them, as (*stack, *heads, inputs, outputs)."""
    weight, *rest = site.take(params)
    heads, inputs, outputs = matrix_shape(site)
    front = weight.shape[: len(site.stack)]
    size = inputs - len(rest)
    if site.is_conv:
        kernel = jnp.moveaxis(weight, _kernel_axes(site, weight.ndim), range(-len(_order(site)), 0))
        if heads:
            kernel = kernel.reshape(*front, size, *heads, outputs)
            weight = jnp.swapaxes(kernel, -3, -2)
        else:
            weight = kernel
    weight = weight.reshape(*front, *heads, size, outputs)
    if not rest:
        return weight
    return jnp.concatenate([weight, rest[0].reshape(*front, *heads, 1, outputs)], axis=-2)


def params_of_matrix(site: LayerSite, matrix: Array) -> list[Array]:
    """What `matrix_of_params` made of parameters, back."""
    heads, _, _ = matrix_shape(site)
    front = matrix.shape[: len(site.stack)]
    has_bias = len(site.slice_shapes) > 1
    weight = matrix[..., :-1, :] if has_bias else matrix
    shape = site.slice_shapes[0]
    if site.is_conv:
        ordered = [shape[axis] for axis in _order(site)]
        if heads:
            weight = jnp.swapaxes(weight, -3, -2)
        weight = weight.reshape(*front, *ordered)
        weight = jnp.moveaxis(weight, range(-len(ordered), 0), _kernel_axes(site, weight.ndim))
    taken = [weight.reshape(*front, *shape)]
    if has_bias:
        taken.append(matrix[..., -1, :].reshape(*front, *site.slice_shapes[1]))
    return site.put(taken)


def num_rows(site: LayerSite) -> int:
    """At how many positions the same weights are applied, over all steps that share them."""
    if site.is_conv:
        numbers = site.convolution["dimension_numbers"]
        shape = site.output.shape
        count = math.prod(shape[axis] for axis in (numbers.out_spec[0], *numbers.out_spec[2:]))
        return count * site.repeats
    heads, _, outputs = matrix_shape(site)
    return math.prod(site.output.shape) // max(math.prod(heads) * outputs, 1) * site.repeats


def input_moment(site: LayerSite, side: Side, x: Array, dtype: Any) -> Array:
    """The sum over positions, in one step, of outer products of rows."""
    has_bias = len(site.slice_shapes) > 1
    if site.kind == "embedding_tag":
        counts = jnp.zeros((site.slice_shapes[0][0],), dtype)
        return side.of_diagonal(counts.at[x.reshape(-1)].add(1, mode="drop"))
    x = x.astype(dtype)
    if not site.is_conv:
        rows = _rows(site, x)
        if has_bias:
            rows = jnp.concatenate([rows, jnp.ones_like(rows[..., :1])], -1)
        return side.of_rows(rows)
    geometry = geometry_of(site)
    if isinstance(side, DenseSide):
        moment, sums = patch_moment_sums(x, geometry, with_first=has_bias)
    else:
        moment = _patch_sums(x**2, geometry)
        sums = _patch_sums(x, geometry) if has_bias else None
    count = num_rows(site) // site.repeats
    return _bordered(side, moment, sums, count) if has_bias else moment


def output_moment(site: LayerSite, side: Side, cotangent: Array, dtype: Any) -> Array:
    """The sum over positions, in one step, of outer products of cotangents."""
    return side.of_rows(_output_rows(site, cotangent.astype(dtype)))


def input_sums(site: LayerSite, x: Array, dtype: Any) -> Array:
    """The sum over the positions of each example of its rows: (*heads, examples, inputs)."""
    if site.kind == "embedding_tag":
        table = site.slice_shapes[0][0]
        indices = site.by_example(x, False)
        indices = indices.reshape(indices.shape[0], -1)
        zeros = jnp.zeros((indices.shape[0], table), dtype)
        return zeros.at[jnp.arange(indices.shape[0])[:, None], indices].add(1, mode="drop")
    x = x.astype(dtype)
    if site.is_conv:
        sums = jnp.sum(extract_patches(x, geometry_of(site)), -2)
        count = math.prod(site.output.shape) // max(sums.shape[-2] * _out_channels(site), 1)
    else:
        rows = _examples_of_rows(site, _rows(site, x))
        sums, count = jnp.sum(rows, -2), rows.shape[-2]
    if len(site.slice_shapes) == 1:
        return sums
    return jnp.concatenate([sums, jnp.full_like(sums[..., :1], count)], -1)


def output_sums(site: LayerSite, cotangent: Array, dtype: Any) -> Array:
    """The sum over the positions of each example of its cotangents."""
    rows = _output_rows(site, cotangent.astype(dtype))
    if site.is_conv:
        number = site.output.shape[site.convolution["dimension_numbers"].out_spec[0]]
        return jnp.sum(rows.reshape(*rows.shape[:-2], number, -1, rows.shape[-1]), -2)
    return jnp.sum(_examples_of_rows(site, rows), -2)


def geometry_of(site: LayerSite) -> ConvGeometry:
    """The geometry of a convolution."""
    settings = site.convolution
    numbers = settings["dimension_numbers"]
    kernel = tuple(site.slice_shapes[0][axis] for axis in numbers.rhs_spec[2:])
    return ConvGeometry.of(kernel, **settings)


def _rows(site: LayerSite, x: Array) -> Array:
    """Inputs as (*heads, positions, inputs)."""
    heads, inputs, _ = matrix_shape(site)
    inputs -= len(site.slice_shapes) - 1
    rows = x.reshape(-1, *heads, inputs)
    return jnp.moveaxis(rows, 0, -2)


def _output_rows(site: LayerSite, cotangent: Array) -> Array:
    """Cotangents as (*heads, positions, outputs)."""
    heads, _, outputs = matrix_shape(site)
    if site.is_conv:
        out = site.convolution["dimension_numbers"].out_spec
        cotangent = jnp.transpose(cotangent, (out[0], *out[2:], out[1]))
    return jnp.moveaxis(cotangent.reshape(-1, *heads, outputs), 0, -2)


def _examples_of_rows(site: LayerSite, rows: Array) -> Array:
    """Rows as (*heads, examples, positions of each, features)."""
    *heads, _, features = rows.shape
    if not site.is_arranged or site.num_examples is None:
        return rows.reshape(*heads, site.num_counted, -1, features)
    before, number, after = site.examples.before, site.examples.number, site.examples.after
    split = rows.reshape(*heads, before, number, after, features)
    return jnp.swapaxes(split, -4, -3).reshape(*heads, number, before * after, features)


def _patch_sums(x: Array, geometry: ConvGeometry) -> Array:
    """The sum of all patches."""
    _, sums = patch_moment_sums(x, geometry, with_first=True)
    assert sums is not None
    return sums


def _bordered(side: Side, moment: Array, sums: Array | None, count: int) -> Array:
    """The moment of rows with a one at their end."""
    assert sums is not None
    one = jnp.full((*sums.shape[:-1], 1), count, moment.dtype)
    if not isinstance(side, DenseSide):
        return jnp.concatenate([moment, one], -1)
    sums = sums.astype(moment.dtype)
    above = jnp.concatenate([moment, sums[..., :, None]], -1)
    below = jnp.concatenate([sums, one], -1)[..., None, :]
    return jnp.concatenate([above, below], -2)


def _out_channels(site: LayerSite) -> int:
    return site.slice_shapes[0][site.convolution["dimension_numbers"].rhs_spec[0]]


def _order(site: LayerSite) -> tuple[int, ...]:
    """The axes of a kernel, in the order of a patch: spatial ones, channels in, channels out."""
    out, channels, *spatial = site.convolution["dimension_numbers"].rhs_spec
    return (*spatial, channels, out)


def _kernel_axes(site: LayerSite, ndim: int) -> tuple[int, ...]:
    front = ndim - len(_order(site))
    return tuple(front + axis for axis in _order(site))
