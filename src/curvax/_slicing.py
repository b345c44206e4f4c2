"""Rows of an array, read and written inside a loop without copying the array, and in order.

A loop over chunks of a long axis reads some rows of each input and writes the same rows of each
output. How reads and writes are expressed decides what the loop and its derivatives cost:

- A read is one `gather`. Slicing the array up before the loop would copy it wherever the chunk size
  does not divide it. The transpose of a gather adds into the cotangent in place.
- A write is one `dynamic_update_slice`, or a `scatter` of separate rows, and its tangent a
  `scatter_add` into rows that are still zero. The transpose of that is the identity for the buffer
  and a gather for the rows. The transpose of the write itself would copy all of the cotangent in
  every step.
- Rows that are read are never saved as residuals: they are still in the array. The checkpoint
  policy `save_all_but_reads` recognises these reads by their flags.
- The next computation must not start before its memory is free: `zero_after`.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from curvax import _jax
from curvax._types import ArrayLike, PyTree, Size

_IN_BOUNDS = lax.GatherScatterMode.PROMISE_IN_BOUNDS
_INDEX = jnp.int32


class _Promises(TypedDict):
    """Flags of `lax.gather` and `lax.scatter` that promise something of the indices."""

    indices_are_sorted: bool
    unique_indices: bool
    mode: lax.GatherScatterMode


_PROMISES: _Promises = {
    "indices_are_sorted": True,
    "unique_indices": True,
    "mode": _IN_BOUNDS,
}


@dataclass(frozen=True)
class Rows:
    """The `size` rows `start, start + stride, …` along an axis; `start` may be traced."""

    start: Size
    size: int
    stride: int = 1


@dataclass(frozen=True)
class Row:
    """A single row, without the axis it is taken from; `index` may be traced.

    Reading `Rows` of size one and dropping the axis would be a second operation, whose result would
    be saved as a residual.
    """

    index: Size


@dataclass(frozen=True)
class Column:
    """A column of an axis that `fold` reshaped to two axes; `index` may be traced.

    For an axis folded to `(size, stride)`, column i holds the rows `i, i + stride, …`.
    """

    index: Size


def fold(x: Array, axis: int, stride: int) -> Array:
    """Reshape an axis of `x` to two of lengths `(length // stride, stride)`, for `Column`."""
    before, length, after = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
    return x.reshape(*before, length // stride, stride, *after)


def unfold(x: Array, axis: int) -> Array:
    """Merge two axes into one. Inverse of `fold`."""
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


@dataclass(frozen=True)
class _Windows:
    """The windows of a gather or scatter that reads or writes some rows of an array.

    `starts` are the positions of the windows along `axis`, `shape` is the shape of one window,
    `collapsed` are the axes of length one that the rows do not have, and `offset` are the axes of
    the rows that the other axes become.
    """

    starts: Array
    shape: tuple[int, ...]
    axis: int
    collapsed: tuple[int, ...]
    offset: tuple[int, ...]


def _windows(shape: Sequence[int], rows: Rows | Row | Column, axis: int) -> _Windows:
    every = tuple(range(len(shape)))
    if isinstance(rows, Column):
        return _windows(shape, Row(rows.index), axis + 1)
    if isinstance(rows, Row):
        window = (*shape[:axis], 1, *shape[axis + 1 :])
        return _Windows(_index(rows.index)[None], window, axis, (axis,), every[:-1])
    if rows.stride == 1:
        window = (*shape[:axis], rows.size, *shape[axis + 1 :])
        return _Windows(_index(rows.start)[None], window, axis, (), every)
    starts = _index(rows.start) + rows.stride * jnp.arange(rows.size, dtype=_INDEX)
    window = (*shape[:axis], 1, *shape[axis + 1 :])
    return _Windows(starts[:, None], window, axis, (axis,), every[:axis] + every[axis + 1 :])


def _index(index: Size) -> Array:
    return jnp.asarray(index, _INDEX)


def read(x: Array, rows: Rows | Row | Column, axis: int) -> Array:
    """Return these rows of `x` along `axis`."""
    if isinstance(rows, Rows) and _all(rows, x.shape[axis]):
        return x
    if not isinstance(rows, Column):
        x = _jax.unsharded_along(x, axis)
    windows = _windows(x.shape, rows, axis)
    return lax.gather(
        x,
        windows.starts,
        lax.GatherDimensionNumbers(windows.offset, windows.collapsed, (windows.axis,)),
        windows.shape,
        **_PROMISES,
    )


@jax.custom_jvp
def differentiated_as(value: Array, equal: Array) -> Array:
    """Return `value` with the derivative of `equal`, which is only computed to differentiate.

    For a quantity that can be read in two ways, one of which is cheaper to evaluate and the other
    to differentiate.
    """
    del equal
    return value


@differentiated_as.defjvp
def _differentiated_as_jvp(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    return differentiated_as(*primals), tangents[1]


def save_all_but_reads(
    primitive: _jax.Primitive, *avals: _jax.AbstractValue, **params: Any
) -> bool:
    """Return whether to save a residual: all but rows, which are read again from their array.

    This is a policy for `jax.checkpoint`. A gather with all three promises is a `read`: indexing in
    `jax.numpy` never promises that its indices are in bounds. The outputs of `differentiated_as`
    also count as reads. Complex residuals are recomputed, because a checkpoint with a policy fails
    to save them: it cannot reduce their precision (JAX 0.10 to 0.12).
    """
    is_read = (
        primitive is lax.gather_p
        and params["mode"] is _IN_BOUNDS
        and params["indices_are_sorted"]
        and params["unique_indices"]
    )
    if is_read or _jax.passes_through(params):
        return False
    return not _jax.returns_complex(primitive, avals, params)


def allocate(length: int, row_like: _jax.Shaped, axis: int) -> Array:
    """Return a buffer for `write`: `length` rows of zeros along `axis`, typed like `row_like`."""
    shape = (*row_like.shape[:axis], length, *row_like.shape[axis + 1 :])
    return _jax.filled_like(row_like, shape=shape)


def write(buffer: Array, value: Array, rows: Rows | Column, axis: int) -> Array:
    """Return `buffer` with these rows along `axis` set to `value`.

    Each row must be written only once: the derivative relies on the rows being zero before.
    """
    if isinstance(rows, Rows):
        if _all(rows, buffer.shape[axis]):
            return value
        value = _jax.unsharded_along(value, axis)
    windows = _windows(buffer.shape, rows, axis)
    dims = lax.ScatterDimensionNumbers(windows.offset, windows.collapsed, (windows.axis,))
    return _write_once(dims, buffer, windows.starts, value)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _write_once(
    dims: lax.ScatterDimensionNumbers, buffer: Array, starts: Array, value: Array
) -> Array:
    if starts.ndim > 1:
        return lax.scatter(buffer, starts, value, dims, **_PROMISES)
    (axis,) = dims.scatter_dims_to_operand_dims
    window = lax.expand_dims(value, dims.inserted_window_dims)
    return lax.dynamic_update_slice_in_dim(buffer, window, starts[0], axis)


@_write_once.defjvp
def _write_once_jvp(
    dims: lax.ScatterDimensionNumbers,
    primals: tuple[Array, Array, Array],
    tangents: tuple[Array, ArrayLike, ArrayLike],
) -> tuple[Array, Array]:
    buffer, starts, value = primals
    buffer_dot, _, value_dot = tangents
    written = _write_once(dims, buffer, starts, value)
    if not jnp.issubdtype(buffer.dtype, jnp.inexact):
        return written, buffer_dot
    # The rows were zero before, so adding to them equals replacing them.
    return written, lax.scatter_add(buffer_dot, starts, value_dot, dims, **_PROMISES)


def _all(rows: Rows, length: int) -> bool:
    return rows.stride == 1 and rows.size == length


def zero_after(tree: PyTree) -> Array:
    """Return a zero that the compiler cannot compute before the arrays of the tree.

    Whatever depends on it is scheduled after them, so that the temporaries of both are not alive
    together. XLA drops optimization barriers before it schedules a program, so the zero must be a
    value that XLA cannot infer: whether an element is a NaN of one payload that no computation
    produces. Arrays with a sharding in their type are skipped. Measured for a map over two chunks,
    by benchmarks/cpu_workarounds.py: 0.5 of the temporaries of the map without it.
    """
    for leaf in jax.tree.leaves(tree):
        plain = _jax.sharding_of(leaf) is None and not _jax.is_varying(leaf)
        bits = _PAYLOADS.get(str(leaf.dtype))
        if plain and bits is not None and leaf.size:
            element = lax.slice(leaf, (0,) * leaf.ndim, (1,) * leaf.ndim).reshape(())
            pattern = lax.bitcast_convert_type(lax.stop_gradient(element), bits.dtype)
            return (pattern == bits).astype(jnp.int32)
    return jnp.zeros((), jnp.int32)


def is_order_marker(bits: object) -> bool:
    """Return whether these are the bits of the NaN that `zero_after` compares with."""
    dtype = getattr(bits, "dtype", None)
    return any(dtype == payload.dtype and bool(bits == payload) for payload in _PAYLOADS.values())


_PAYLOADS = {
    "float16": np.uint16(0x7D5A),
    "bfloat16": np.uint16(0x7FA5),
    "float32": np.uint32(0x7FA5A5A5),
    "float64": np.uint64(0x7FF5A5A5A5A5A5A5),
}
