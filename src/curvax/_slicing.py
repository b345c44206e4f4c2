"""Rows of an array, read and written inside a loop without copying the array, and in order.

A loop over chunks of a long axis reads some rows of each input and writes the same rows of each
output. How that is written decides what the loop and its derivatives cost:

- A read is one `gather`. Slicing the array up before the loop instead would copy it wherever the
  chunks do not divide it. The transpose of a gather adds into the cotangent in place.
- A write is one `dynamic_update_slice`, or a `scatter` of separate rows, and its tangent a
  `scatter_add` into rows that are still zero. The transpose of that is the identity for the buffer
  and a gather for the rows. The transpose of the write itself would copy the whole cotangent in
  every step.
- Rows that are read are never saved for the backward pass: they are still in the array. The
  checkpoint policy `save_all_but_reads` says so, and knows our reads by their flags.
- What is computed next must not begin before its memory is free: `zero_after`.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from curvax import _jax
from curvax._types import PyTree, Size

_IN_BOUNDS = lax.GatherScatterMode.PROMISE_IN_BOUNDS
_PROMISES: Any = {"indices_are_sorted": True, "unique_indices": True, "mode": _IN_BOUNDS}
_INDEX = jnp.int32


@dataclass(frozen=True)
class Rows:
    """The rows `start, start + stride, …` along an axis, `size` of them; `start` may be traced."""

    start: Size
    size: int
    stride: int = 1


@dataclass(frozen=True)
class Row:
    """A single row, without the axis it is taken from; `index` may be traced.

    To read one row of `Rows` and drop the axis would be a second operation, whose result would be
    saved for the backward pass.
    """

    index: Size


@dataclass(frozen=True)
class Column:
    """A column of an axis that `fold` has made two of; `index` may be traced.

    Of an axis folded to `(size, stride)` column i holds the rows `i, i + stride, …`.
    """

    index: Size


def fold(x: Array, axis: int, stride: int) -> Array:
    """`x` with its axis made two of `(length // stride, stride)`; for use with `Column`."""
    before, length, after = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
    return x.reshape(*before, length // stride, stride, *after)


def unfold(x: Array, axis: int) -> Array:
    """What `fold` undid."""
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


@dataclass(frozen=True)
class _Windows:
    """How a gather or scatter gets at some rows of an array.

    `starts` are the positions of its windows along `axis`, `shape` the shape of one of them,
    `collapsed` the axes along which a window is a single element that the rows do not have, and
    `offset` the axes of the rows that the others become.
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


def _index(number: Size) -> Array:
    return jnp.asarray(number, _INDEX)


def read(x: Array, rows: Rows | Row | Column, axis: int) -> Array:
    """Those rows of `x` along `axis`."""
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
    """`value`, with the derivative of `equal`, which is never computed unless to differentiate.

    For one thing that can be read from two places, of which one is the better for its value and the
    other for its derivative.
    """
    del equal
    return value


@differentiated_as.defjvp
def _differentiated_as_jvp(primals: Any, tangents: Any) -> tuple[Array, Any]:
    return differentiated_as(*primals), tangents[1]


def save_all_but_reads(primitive: Any, *avals: Any, **params: Any) -> bool:
    """Checkpoint policy: save what the backward pass needs, but read rows again from their array.

    A gather with all three promises is ours: indexing in `jax.numpy` never promises by itself that
    its indices are in bounds. What `differentiated_as` passes through is a read, too. Complex
    numbers are computed again, because a checkpoint with a policy cannot save them: it fails to
    limit their precision (JAX 0.10 to 0.12).
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


def allocate(length: int, row_like: Any, axis: int) -> Array:
    """A buffer for `write`: `length` rows of zeros along `axis`, like the rows of `row_like`."""
    shape = (*row_like.shape[:axis], length, *row_like.shape[axis + 1 :])
    return _jax.filled_like(row_like, shape=shape)


def write(buffer: Array, value: Array, rows: Rows | Column, axis: int) -> Array:
    """`buffer` with those rows along `axis` replaced by `value`; each row is written once."""
    if isinstance(rows, Rows):
        if _all(rows, buffer.shape[axis]):
            return value
        value = _jax.unsharded_along(value, axis)
    windows = _windows(buffer.shape, rows, axis)
    numbers = lax.ScatterDimensionNumbers(windows.offset, windows.collapsed, (windows.axis,))
    return _write_once(numbers, buffer, windows.starts, value)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _write_once(numbers: Any, buffer: Array, starts: Array, value: Array) -> Array:
    if starts.ndim > 1:
        return lax.scatter(buffer, starts, value, numbers, **_PROMISES)
    (axis,) = numbers.scatter_dims_to_operand_dims
    window = lax.expand_dims(value, numbers.inserted_window_dims)
    return lax.dynamic_update_slice_in_dim(buffer, window, starts[0], axis)


@_write_once.defjvp
def _write_once_jvp(numbers: Any, primals: Any, tangents: Any) -> tuple[Array, Any]:
    buffer, starts, value = primals
    buffer_dot, _, value_dot = tangents
    written = _write_once(numbers, buffer, starts, value)
    if not jnp.issubdtype(buffer.dtype, jnp.inexact):
        return written, buffer_dot
    # The rows were zero before, so adding to them is as good as replacing them.
    return written, lax.scatter_add(buffer_dot, starts, value_dot, numbers, **_PROMISES)


def _all(rows: Rows, length: int) -> bool:
    return rows.stride == 1 and rows.size == length


def zero_after(tree: PyTree) -> Array:
    """Return zero, which the compiler cannot compute before it has the arrays of the tree.

    What depends on it is computed after them, so that the temporaries of both are not alive
    together. XLA drops optimization barriers before it orders a program, so it takes a number that
    XLA does not know: here, whether an element is one NaN payload that no computation makes. Arrays
    that are sharded by their types are skipped. Measured for a map over two chunks, by
    benchmarks/cpu_workarounds.py: 0.5 of the temporaries of the map without it.
    """
    for leaf in jax.tree.leaves(tree):
        plain = _jax.sharding_of(leaf) is None and not _jax.is_varying(leaf)
        bits = _PAYLOADS.get(str(leaf.dtype))
        if plain and bits is not None and leaf.size:
            element = lax.slice(leaf, (0,) * leaf.ndim, (1,) * leaf.ndim).reshape(())
            pattern = lax.bitcast_convert_type(lax.stop_gradient(element), bits.dtype)
            return (pattern == bits).astype(jnp.int32)
    return jnp.zeros((), jnp.int32)


def is_order_marker(bits: Any) -> bool:
    """Return whether these are the bits of the NaN with which `zero_after` compares."""
    dtype = getattr(bits, "dtype", None)
    return any(dtype == each.dtype and bool(bits == each) for each in _PAYLOADS.values())


_PAYLOADS = {
    "float16": np.uint16(0x7D5A),
    "bfloat16": np.uint16(0x7FA5),
    "float32": np.uint32(0x7FA5A5A5),
    "float64": np.uint64(0x7FF5A5A5A5A5A5A5),
}
