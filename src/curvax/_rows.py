"""Rows of an array, read and written inside a loop without copying the array.

A loop over chunks of a long axis reads some rows of each input and writes the same rows of each
output. How that is written decides what the loop and its derivatives cost:

- A read is one `gather`. Slicing the array up before the loop instead would copy it wherever the
  chunks do not divide it. The transpose of a gather adds into the cotangent in place.
- A write of numbers with derivatives is one `scatter_add` into an empty buffer. Its transpose
  with respect to the buffer is the identity and to the rows a gather. The transpose of
  `dynamic_update_slice` would copy the whole cotangent in every step.
- Rows that are read are never saved for the backward pass: they are still in the array. The
  checkpoint policy `save_all_but_reads` says so, and knows our reads by their flags.

Buffers start at negative zero, which is the neutral element of addition: 0.0 + (-0.0) is 0.0, but
-0.0 + x is x for every x.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from curvax import _compat
from curvax._types import Size

__all__ = [
    "Column",
    "Rows",
    "allocate",
    "fold",
    "read",
    "save_all_but_reads",
    "unfold",
    "write",
]

_IN_BOUNDS = lax.GatherScatterMode.PROMISE_IN_BOUNDS
_INDEX = jnp.int32


@dataclass(frozen=True)
class Rows:
    """The rows `start, start + stride, …` along an axis, `size` of them; `start` may be traced."""

    start: Size
    size: int
    stride: int = 1


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


def _windows(shape: Sequence[int], rows: Rows | Column, axis: int) -> _Windows:
    every = tuple(range(len(shape)))
    if isinstance(rows, Column):
        window = (*shape[: axis + 1], 1, *shape[axis + 2 :])
        return _Windows(_index(rows.index)[None], window, axis + 1, (axis + 1,), every[:-1])
    if rows.stride == 1:
        window = (*shape[:axis], rows.size, *shape[axis + 1 :])
        return _Windows(_index(rows.start)[None], window, axis, (), every)
    starts = _index(rows.start) + rows.stride * jnp.arange(rows.size, dtype=_INDEX)
    window = (*shape[:axis], 1, *shape[axis + 1 :])
    return _Windows(starts[:, None], window, axis, (axis,), every[:axis] + every[axis + 1 :])


def _index(number: Size) -> Array:
    return jnp.asarray(number, _INDEX)


def read(x: Array, rows: Rows | Column, axis: int) -> Array:
    """Those rows of `x` along `axis`."""
    if isinstance(rows, Rows):
        if _all(rows, x.shape[axis]):
            return x
        x = _compat.unsharded_along(x, axis)
    windows = _windows(x.shape, rows, axis)
    return lax.gather(
        x,
        windows.starts,
        lax.GatherDimensionNumbers(windows.offset, windows.collapsed, (windows.axis,)),
        windows.shape,
        indices_are_sorted=True,
        unique_indices=True,
        mode=_IN_BOUNDS,
    )


def save_all_but_reads(primitive: Any, *_: Any, **params: Any) -> bool:
    """Checkpoint policy: save what the backward pass needs, but read rows again from their array.

    A gather with all three promises is ours; `jax.numpy` indexing makes none by itself.
    """
    return not (
        primitive is lax.gather_p
        and params["mode"] is _IN_BOUNDS
        and params["indices_are_sorted"]
        and params["unique_indices"]
    )


def allocate(length: int, row_like: Any, axis: int, *, all_written: bool = True) -> Array:
    """A buffer for `write`: `length` rows along `axis` like the rows of `row_like`.

    Rows that are never written are zero; say so with `all_written=False`.
    """
    shape = (*row_like.shape[:axis], length, *row_like.shape[axis + 1 :])
    neutral: complex = 0
    if all_written and jnp.issubdtype(row_like.dtype, jnp.inexact):
        is_complex = jnp.issubdtype(row_like.dtype, jnp.complexfloating)
        neutral = complex(-0.0, -0.0) if is_complex else -0.0
    return _compat.filled_like(row_like, neutral, shape)


def write(buffer: Array, value: Array, rows: Rows | Column, axis: int) -> Array:
    """`buffer` with those rows along `axis` replaced by `value`; each row is written once."""
    if isinstance(rows, Rows):
        if _all(rows, buffer.shape[axis]):
            return value
        value = _compat.unsharded_along(value, axis)
    windows = _windows(buffer.shape, rows, axis)
    put = lax.scatter_add if jnp.issubdtype(buffer.dtype, jnp.inexact) else lax.scatter
    return put(
        buffer,
        windows.starts,
        value,
        lax.ScatterDimensionNumbers(windows.offset, windows.collapsed, (windows.axis,)),
        indices_are_sorted=True,
        unique_indices=True,
        mode=_IN_BOUNDS,
    )


def _all(rows: Rows, length: int) -> bool:
    return rows.stride == 1 and rows.size == length
