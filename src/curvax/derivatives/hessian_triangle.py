"""The Hessian by one of its triangles.

The leaves of the point are put into a few groups, and the groups in order. A group's rows are
computed by differentiating by its own leaves alone, so nothing is done for tangents that are zero,
and only up to the columns of the groups that follow. What is left of that is a mirror image of
what is right of it elsewhere. For a network, with its layers in the order in which they are
applied, that is less than half of the work.

The groups are computed one after the other, each from a linearisation of its own, into one matrix.
The last comes first: then a row may be written from end to end, and a column too, since what is
not known yet is written later.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from curvax import _cpu, _jax
from curvax._types import Array, Fun, PyTree, Size
from curvax.derivatives.columns import Blocks
from curvax.derivatives.flat_point import Point
from curvax.derivatives.traced_function import linear_map
from curvax.maps.chunk_plan import Chunk

__all__ = ["Triangle"]


MOST_GROUPS = 8
"""Each group has a program of its own to compile."""

LEAST_COLUMNS = 32
"""With fewer columns for each group on average, there are fewer groups."""


@dataclass(frozen=True)
class Triangle:
    """The problem of the Hessian of `f` at points like `x`."""

    f: Fun
    x: PyTree
    point: Point
    has_aux: bool
    checkpoint: bool

    def lengths(self) -> Sequence[int]:
        """The number of rows of each group."""
        return [sum(self.point.sizes[leaf] for leaf in group) for group in self.groups]

    @functools.cached_property
    def groups(self) -> Sequence[range]:
        """The groups in order, each of leaves that follow upon each other."""
        program, _ = self._program
        sizes = self.point.sizes
        most = min(MOST_GROUPS, self.point.size // LEAST_COLUMNS)
        if program.effects or most < 2:  # What a function does beside computing, it does once.
            return [range(len(sizes))]
        return group_leaves(sizes, dependents(program), most)

    def compute(self, x: PyTree, blocks: Sequence[Blocks]) -> tuple[list[Any], PyTree]:
        """The matrix, alone in a list, and the auxiliary value."""
        leaves, written, aux = jax.tree.leaves(x), None, None
        for number in reversed(range(len(self.groups))):
            if len(self.groups) > 1 and not blocks[number].length:
                continue
            if written is not None:
                # Each group is linearised anew, and not beside the others.
                written, leaves = lax.optimization_barrier((written, leaves))
            written, aux = self._rows(leaves, number, blocks[number], written)
        assert written is not None
        return [written[0]], aux

    def _rows(
        self, leaves: Sequence[Array], number: int, blocks: Blocks, written: "_Written | None"
    ) -> tuple["_Written", PyTree]:
        """The matrix with the rows and the columns of a group, and the last number of these."""
        point, group = self.point, self.groups[number]
        following = [leaf for later in self.groups[number:] for leaf in later]

        def gradient(own: dict[int, Array]) -> Any:
            value = lambda some: self._value([some.get(i, x) for i, x in enumerate(leaves)])
            at = {leaf: own.get(leaf, leaves[leaf]) for leaf in following}
            return jax.grad(value, has_aux=self.has_aux)(at)

        product, aux = linear_map(
            jax.linearize, gradient, {leaf: leaves[leaf] for leaf in group}, self.has_aux
        )
        part, zero = point.part(group), _cpu.zero_after(None if written is None else written[1])

        def row(index: Size) -> Array:
            # After the groups before, of which nothing is held any more but the matrix.
            known = product(dict(zip(group, part.direction(index + zero), strict=True)))
            zeros = lambda leaf: jnp.zeros(point.shapes[leaf], point.dtypes[leaf])
            return point.flatten(
                [known[i] if i in known else zeros(i) for i in range(len(point.shapes))]
            )

        if len(self.groups) == 1:
            return (blocks.collect(row), jnp.zeros(())), aux
        start = point.offsets[group.start]
        into = lambda like: _Mirrored(like, written, start, mirrored=number + 1 < len(self.groups))
        return blocks.reduce(row, into), aux

    @functools.cached_property
    def _program(self) -> tuple[Any, Any]:
        """The function, traced, and the structure of what it returns."""
        program, shapes = jax.make_jaxpr(self.f, return_shape=True)(self.x)
        return program, jax.tree.structure(shapes)

    def _value(self, leaves: Sequence[Array]) -> Any:
        program, structure = self._program
        run = _jax.as_function(program)
        run = jax.checkpoint(run) if self.checkpoint else run
        return jax.tree.unflatten(structure, run(*leaves))


_Written = tuple[Array, Array]
"""The matrix, and some number of what was written to it last.

What comes next can wait for that number; to wait for the matrix would be to make a copy of it.
"""


@dataclass(frozen=True)
class _Mirrored:
    """Rows go where they belong in the matrix and, mirrored, where the columns are."""

    like: jax.ShapeDtypeStruct
    written: _Written | None
    start: int
    mirrored: bool

    def init(self) -> _Written:
        if self.written is not None:
            return self.written
        _, n = self.like.shape
        rows = jax.eval_shape(self._everywhere, self.like)
        return _jax.filled_like(rows, shape=(n, n)), _jax.filled_like(rows, shape=(1, 1))

    def update(self, carry: _Written, value: Array, chunk: Chunk) -> _Written:
        matrix, _ = carry
        rows, start = self._everywhere(value), self.start + chunk.examples_before
        matrix = lax.dynamic_update_slice_in_dim(matrix, rows, start, 0)
        if self.mirrored:
            matrix = lax.dynamic_update_slice_in_dim(matrix, rows.T, start, 1)
        # A number that is computed; to the left of the group's own columns it may be a mere zero.
        return matrix, rows[:1, self.start : self.start + 1]

    def finalize(self, carry: _Written, examples: Size) -> _Written:
        del examples
        return carry

    def _everywhere(self, rows: Array) -> Array:
        """Rows that can also be columns: those of a sharded point may be sharded."""
        return _jax.unsharded_along(_jax.unsharded_along(rows, 0), 1)


def dependents(program: Any) -> Sequence[int]:
    """How much of a program depends on each of its inputs, counted in numbers computed."""
    count = np.zeros(len(program.jaxpr.invars), np.int64)
    _count_dependents(program, list(np.eye(len(count), dtype=bool)), count)
    return count.tolist()


def _count_dependents(program: Any, inputs: Sequence[Any], count: Any) -> list[Any]:
    """Add what depends on each input to `count`; which inputs each output depends on."""
    jaxpr, _ = _jax.as_program(program) or (program, ())
    none = np.zeros(len(count), bool)
    depends = dict(zip(jaxpr.invars, inputs, strict=True))
    known = lambda atoms: [none if _jax.is_literal(a) else depends.get(a, none) for a in atoms]
    for eqn in jaxpr.eqns:
        read = known(eqn.invars)
        called = [p for p in _jax.parameters(eqn).values() if _jax.as_program(p) is not None]
        programs = [p for p in called if len(_inputs(p)) == len(read)]
        if len(called) == 1 and programs:
            written = _count_dependents(programs[0], read, count)
        else:
            of_any = np.any(read, axis=0) if read else none
            count += of_any * sum(getattr(v.aval, "size", 0) for v in eqn.outvars)
            written = [of_any] * len(eqn.outvars)
        depends.update(zip(eqn.outvars, written, strict=True))
    return known(jaxpr.outvars)


def _inputs(program: Any) -> Sequence[Any]:
    jaxpr, _ = _jax.as_program(program) or (program, ())
    return jaxpr.invars


def group_leaves(sizes: Sequence[int], weights: Sequence[int], most: int) -> list[range]:
    """At most so many groups of successive leaves, those on which more depends before the others.

    Neighbours are put together where that adds least to the part of the matrix to be computed.
    """
    groups = [range(leaf, leaf + 1) for leaf in range(len(sizes))]
    total = lambda group: sum(sizes[leaf] for leaf in group)
    weight = lambda group: max(weights[leaf] for leaf in group)

    def area(group: range) -> int:
        rest = sum(size for size, w in zip(sizes, weights, strict=True) if w <= weight(group))
        return total(group) * rest

    def added(left: int) -> int:
        a, b = groups[left], groups[left + 1]
        return area(range(a.start, b.stop)) - area(a) - area(b)

    while len(groups) > most:
        left = min(range(len(groups) - 1), key=added)
        groups[left : left + 2] = [range(groups[left].start, groups[left + 1].stop)]
    return sorted(groups, key=weight, reverse=True)
