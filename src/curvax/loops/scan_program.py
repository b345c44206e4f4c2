"""A scan as the user gave it, checked, and taken apart into steps that can be run in any grouping.

`ScanProgram` numbers the steps in the order in which they run, so that the loops built on it need
not think about `reverse`: step t reads and writes position t, or `length - 1 - t`. It reads `xs`
in place (`curvax._slicing`) wherever the loop stands, so they are not copied to be scanned over.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from curvax import _jax, _slicing
from curvax._errors import as_integer, where
from curvax._tree import leaf_name
from curvax._types import Array, Carry, PyTree, Size, promote_weak

Body = Callable[[Any, Any], tuple[Any, Any]]

save_all_but_reads = partial(jax.checkpoint, policy=_slicing.save_all_but_reads, prevent_cse=False)
"""Keeps what a function reads of `xs` from being saved for its gradient: it is still there."""


@dataclass(frozen=True)
class ScanProgram:
    """`f` over `length` steps from `init`, as in `jax.lax.scan`.

    `f` is traced once for all the loops that call it. `init` has the types that `f` returns.
    `outputs` are the shapes of what one step puts out. `span` are rows of `xs` from some position
    on, by way of which the derivative with respect to `xs` goes.
    """

    f: Body
    init: Carry
    xs: PyTree
    length: int
    reverse: bool
    outputs: PyTree
    span: tuple[Size, PyTree] | None = None

    @classmethod
    def of(
        cls, f: Body, init: Carry, xs: PyTree, length: int | None, reverse: bool
    ) -> "ScanProgram":
        """Check the arguments of a scan and trace its body."""
        xs, init = jax.tree.map(jnp.asarray, (xs, init))
        program = cls(f, init, xs, scan_length(xs, length), bool(reverse), None)
        with program.mesh():
            return _traced(program)

    def mesh(self) -> AbstractContextManager[Any]:
        """Return the context to trace loops in: the explicit mesh of `init` and `xs`, if any."""
        return _jax.mesh_of(jax.tree.leaves((self.init, self.xs)))

    def step(self, carry: Carry, time: Size) -> tuple[Carry, PyTree]:
        """The step that runs at that time."""

        @save_all_but_reads
        def read_and_call(carry: Carry, time: Size) -> tuple[Carry, PyTree]:
            return self.f(carry, self.read(time))

        # Without `jit`, constants come out as Python numbers.
        return jax.tree.map(jnp.asarray, read_and_call(carry, time))

    def read(self, time: Size) -> PyTree:
        """What the step that runs at that time reads of `xs`."""
        position = self.rows(time, 1).start
        row = lambda leaf, index: _slicing.read(leaf, _slicing.Row(index), 0)
        if self.span is None:
            return jax.tree.map(lambda leaf: row(leaf, position), self.xs)
        start, span = self.span

        def row_in_span(leaf: Array, spanned: Array) -> Array:
            if not jnp.issubdtype(leaf.dtype, jnp.inexact):
                return row(leaf, position)
            value = row(leaf, position)
            return _slicing.differentiated_as(value, row(spanned, position - start))

        return jax.tree.map(row_in_span, self.xs, span)

    def within(self, time: Size, count: int) -> "ScanProgram":
        """The program for use in a loop over `count` successive steps from that time on.

        The gradient with respect to `xs` adds up an array like what it read from, once for each
        loop that does so. That has to be the rows that a loop can read, not all of `xs`: else
        many loops, one after the other or inside another, would take quadratic time. The values
        still come from `xs`, in place.
        """
        if self.span is not None:
            return self
        return replace(self, span=(self.rows(time, count).start, self._part(time, count)))

    def steps(self, carry: Carry, time: Size, count: int, unroll: int) -> tuple[Carry, PyTree]:
        """`count` successive steps from that time on, and all they put out, by position."""
        return lax.scan(self.f, carry, self._part(time, count), count, self.reverse, unroll)

    def _part(self, time: Size, count: int) -> PyTree:
        rows = self.rows(time, count)
        return jax.tree.map(lambda leaf: _slicing.read(leaf, rows, 0), self.xs)

    def rows(self, time: Size, count: int) -> _slicing.Rows:
        """The positions of `count` successive steps from that time on."""
        return _slicing.Rows(self.length - count - time if self.reverse else time, count)


@dataclass(frozen=True)
class Outputs:
    """Room for some of the outputs of a scan, along a new leading axis of `length`."""

    program: ScanProgram
    length: int

    def allocate(self) -> PyTree:
        """Empty buffers."""
        row = lambda leaf: jax.eval_shape(lambda x: _jax.unwrap_keys(x)[None], leaf)
        rows = jax.tree.map(row, self.program.outputs)
        return jax.tree.map(lambda leaf: _slicing.allocate(self.length, leaf, 0), rows)

    def write(self, buffers: PyTree, values: PyTree, rows: _slicing.Rows) -> PyTree:
        """The buffers with these rows filled in."""
        put = lambda buffer, value: _slicing.write(buffer, _jax.unwrap_keys(value), rows, 0)
        return jax.tree.map(put, buffers, values)

    def finish(self, buffers: PyTree) -> PyTree:
        """The collected outputs."""
        return jax.tree.map(_jax.wrap_keys, buffers, self.program.outputs)


def unroll_within(unroll: int | bool, length: int) -> int:
    """The number of steps to unroll in a loop of that length, by the user's `unroll`."""
    if isinstance(unroll, bool):
        return max(1, length) if unroll else 1
    number = as_integer(unroll)
    if number is None or number < 1:
        error = TypeError if number is None else ValueError
        raise error(f"{where()}: unroll must be a positive integer or a bool, got {unroll!r}.")
    return max(1, min(number, length))


def scan_length(xs: PyTree, length: int | None) -> int:
    """The number of steps of a scan, by what it scans over and what the user said."""
    xs = jax.tree.map(jnp.asarray, xs)
    sizes: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(xs):
        if leaf.ndim == 0:
            raise ValueError(
                f"{where()}: {leaf_name('xs', path)} is zero-dimensional and cannot be scanned "
                f"over. Give it a leading axis, or let f close over it."
            )
        sizes[leaf_name("xs", path)] = leaf.shape[0]
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} has {size}" for name, size in sizes.items())
        raise ValueError(f"{where()}: all of xs must have the same leading size, but {listed}.")
    number = None if length is None else as_integer(length)
    if length is not None and (number is None or number < 0):
        error = TypeError if number is None else ValueError
        raise error(f"{where()}: length must be a non-negative integer or None, got {length!r}.")
    if not sizes and number is None:
        raise ValueError(f"{where()}: there is nothing to scan over: give xs, or length.")
    for name, size in sizes.items():
        if number is not None and size != number:
            raise ValueError(f"{where()}: length={number} disagrees with {name}, which has {size}.")
        return size
    return number or 0


def _traced(program: ScanProgram) -> ScanProgram:
    """The program with its body traced, `init` in the types it returns, and its outputs' shapes.

    As in `jax.lax.scan`, a number of weak type in `init` takes on the dtype that comes back. Then
    the body is traced a second time.
    """
    init = program.init
    body, carry, outputs = _trace_body(program, init)
    if jax.tree.structure(carry) == jax.tree.structure(init):
        promoted = jax.tree.map(promote_weak, init, carry)
        if _types(promoted) != _types(init):
            init = promoted
            body, carry, outputs = _trace_body(program, init)
    _check_carry(init, carry)
    return replace(program, f=body, init=init, outputs=outputs)


def _trace_body(program: ScanProgram, init: Carry) -> tuple[Body, Carry, PyTree]:
    if program.length:
        x = jax.eval_shape(program.read, 0)
    else:
        row = lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape[1:], leaf.dtype, weak_type=jax.typeof(leaf).weak_type
        )
        x = jax.tree.map(row, program.xs)
    body = _jax.trace(program.f, init, x)
    returned = jax.eval_shape(body, init, x)
    if not (isinstance(returned, tuple) and len(returned) == 2):
        raise TypeError(
            f"{where()}: f must return a pair (carry, y), got {type(returned).__name__} with the "
            f"structure {jax.tree.structure(returned)}."
        )
    return body, *returned


def _check_carry(given: Carry, returned: Carry) -> None:
    message = f"{where()}: f must return a carry like the one it is given; "
    before, after = map(jax.tree.structure, (given, returned))
    if before != after:
        raise TypeError(f"{message}it was given {before} and returned {after}.")
    names = [leaf_name("carry", path) for path, _ in jax.tree_util.tree_leaves_with_path(given)]
    changes = [
        f"{name} was {old} and came back as {new}"
        for name, old, new in zip(names, _types(given), _types(returned), strict=True)
        if old != new
    ]
    if changes:
        raise TypeError(f"{message}{', '.join(changes)}.")


def _types(tree: PyTree) -> list[str]:
    return [f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(tree)]
