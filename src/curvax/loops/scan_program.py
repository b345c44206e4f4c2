"""The arguments of a scan, checked and traced, as steps that can be run in any grouping.

`ScanProgram` identifies a step by its time, its index in the order of execution, so that the loops
built on it need not consider `reverse`: the step at time t reads and writes position t, or
`length - 1 - t` in reverse. Rows of `xs` are read in place (`curvax._slicing`); slicing `xs` before
the loop would copy it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from curvax import _jax, _slicing
from curvax._errors import as_integer, where
from curvax._tree import leaf_name
from curvax._types import Array, Carry, PyTree, Size, promote_weak

Body: TypeAlias = Callable[[Carry, PyTree], tuple[Carry, PyTree]]
"""The body of a scan: from a carry and a row of `xs` to the next carry and an output."""

save_all_but_reads = partial(jax.checkpoint, policy=_slicing.save_all_but_reads, prevent_cse=False)
"""Save all residuals except rows of `xs`, which the backward pass reads again from `xs`."""


class Span(NamedTuple):
    """Successive rows of `xs`, from position `start` on."""

    start: Size
    rows: PyTree


@dataclass(frozen=True)
class ScanProgram:
    """The arguments of a `jax.lax.scan`, with its body traced once for all loops that call it.

    Attributes:
        f: The traced body.
        init: The initial carry, in the dtypes that `f` returns.
        xs: The arrays to scan over.
        length: Number of steps.
        reverse: Whether steps run from the last position to the first.
        outputs: Shapes and dtypes of the output of one step.
        span: The rows of `xs` that the cotangent of `xs` is accumulated into; see `within`.
    """

    f: Body
    init: Carry
    xs: PyTree
    length: int
    reverse: bool
    outputs: PyTree
    span: Span | None = None

    @classmethod
    def of(
        cls, f: Body, init: Carry, xs: PyTree, length: int | None, reverse: bool
    ) -> "ScanProgram":
        """Check the arguments of a scan and trace its body."""
        xs, init = jax.tree.map(jnp.asarray, (xs, init))
        program = cls(f, init, xs, scan_length(xs, length), bool(reverse), None)
        with program.mesh():
            return _traced(program)

    def mesh(self) -> AbstractContextManager[object]:
        """Return the context to trace loops in: the explicit mesh of `init` and `xs`, if any."""
        return _jax.mesh_of(jax.tree.leaves((self.init, self.xs)))

    def step(self, carry: Carry, time: Size) -> tuple[Carry, PyTree]:
        """Run the step at `time`."""

        @save_all_but_reads
        def read_and_call(carry: Carry, time: Size) -> tuple[Carry, PyTree]:
            return self.f(carry, self.read(time))

        # Outside of `jit`, constants are returned as Python scalars.
        return jax.tree.map(jnp.asarray, read_and_call(carry, time))

    def read(self, time: Size) -> PyTree:
        """Return the row of `xs` that the step at `time` reads."""
        position = self.rows(time, 1).start
        row = lambda leaf, index: _slicing.read(leaf, _slicing.Row(index), 0)
        if self.span is None:
            return jax.tree.map(lambda leaf: row(leaf, position), self.xs)
        start, span_rows = self.span

        def row_in_span(leaf: Array, span_leaf: Array) -> Array:
            value = row(leaf, position)
            if not jnp.issubdtype(leaf.dtype, jnp.inexact):
                return value
            return _slicing.differentiated_as(value, row(span_leaf, position - start))

        return jax.tree.map(row_in_span, self.xs, span_rows)

    def within(self, time: Size, count: int) -> "ScanProgram":
        """Return the program for use in a loop over `count` successive steps from `time` on.

        The backward pass of each loop accumulates a cotangent of the array that the loop reads
        from. That must be the rows that the loop can read, not all of `xs`: otherwise many loops,
        in sequence or nested, would take quadratic time. Values are still read from `xs`, in place.
        """
        if self.span is not None:
            return self
        span = Span(self.rows(time, count).start, self._read_rows(time, count))
        return replace(self, span=span)

    def steps(self, carry: Carry, time: Size, count: int, unroll: int) -> tuple[Carry, PyTree]:
        """Run `count` successive steps from `time` on; outputs are stacked by position."""
        return lax.scan(self.f, carry, self._read_rows(time, count), count, self.reverse, unroll)

    def _read_rows(self, time: Size, count: int) -> PyTree:
        rows = self.rows(time, count)
        return jax.tree.map(lambda leaf: _slicing.read(leaf, rows, 0), self.xs)

    def rows(self, time: Size, count: int) -> _slicing.Rows:
        """Return the positions of `count` successive steps from `time` on."""
        return _slicing.Rows(self.length - count - time if self.reverse else time, count)


@dataclass(frozen=True)
class Outputs:
    """Buffers for `length` outputs of a scan, stacked along a new leading axis."""

    program: ScanProgram
    length: int

    def allocate(self) -> PyTree:
        """Return buffers of zeros."""
        row = lambda leaf: jax.eval_shape(lambda x: _jax.unwrap_keys(x)[None], leaf)
        rows = jax.tree.map(row, self.program.outputs)
        return jax.tree.map(lambda leaf: _slicing.allocate(self.length, leaf, 0), rows)

    def write(self, buffers: PyTree, values: PyTree, rows: _slicing.Rows) -> PyTree:
        """Return the buffers with `values` written into these rows."""
        put = lambda buffer, value: _slicing.write(buffer, _jax.unwrap_keys(value), rows, 0)
        return jax.tree.map(put, buffers, values)

    def finish(self, buffers: PyTree) -> PyTree:
        """Return filled buffers as outputs of the scan: random keys are wrapped again."""
        return jax.tree.map(_jax.wrap_keys, buffers, self.program.outputs)


def unroll_within(unroll: int | bool, length: int) -> int:
    """Return the number of steps to unroll in a loop of `length`, for a user-supplied `unroll`."""
    if isinstance(unroll, bool):
        return max(1, length) if unroll else 1
    count = as_integer(unroll)
    if count is None or count < 1:
        error = TypeError if count is None else ValueError
        raise error(f"{where()}: unroll must be a positive integer or a bool, got {unroll!r}.")
    return max(1, min(count, length))


def scan_length(xs: PyTree, length: int | None) -> int:
    """Return the number of steps of a scan over `xs`, checked against a user-supplied `length`."""
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
    count = None if length is None else as_integer(length)
    if length is not None and (count is None or count < 0):
        error = TypeError if count is None else ValueError
        raise error(f"{where()}: length must be a non-negative integer or None, got {length!r}.")
    if not sizes and count is None:
        raise ValueError(f"{where()}: there is nothing to scan over: give xs, or length.")
    for name, size in sizes.items():
        if count is not None and size != count:
            raise ValueError(f"{where()}: length={count} disagrees with {name}, which has {size}.")
        return size
    return count or 0


def _traced(program: ScanProgram) -> ScanProgram:
    """Return the program with its body traced, `init` promoted and the shapes of its outputs.

    As in `jax.lax.scan`, a weakly typed leaf of `init` is promoted to the dtype that the body
    returns. The body is then traced again.
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
