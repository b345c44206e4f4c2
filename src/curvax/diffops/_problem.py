"""Columns of linear maps, a block at a time.

All of this room is one thing: linear maps between pytrees, made once (`jax.linearize`, `jax.vjp`)
and applied to unit vectors in blocks, through the loop that every map goes through. What is taken
of each result, and where it goes, makes it a Jacobian, a Hessian or one of their parts.

A `Problem` is what can be computed that way, and `solve` computes it in one compiled program. A
`BlockProblem` says it in two steps, so that its blocks can also be computed by one program after
the other, to be streamed to disk.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from curvax._types import Fun, PyTree, Size
from curvax.batching import Reducer, map_indices, reduce_indices
from curvax.diffops._options import BlockOptions
from curvax.diffops._progress import Progress

__all__ = ["BlockProblem", "Blocks", "Part", "Problem", "solve"]


@dataclass(frozen=True)
class Blocks:
    """`length` columns, `size` of them at a time: all, or those of the first `limit` blocks."""

    length: int
    size: int
    limit: int | None
    bar: Progress | None
    where: str

    @property
    def count(self) -> int:
        """How many blocks there are."""
        return max(1, -(-self.length // self.size))

    def collect(self, column: Callable[[Size], PyTree], axis: int = 0) -> PyTree:
        """All columns, put together along `axis` of each array: the first or the last."""
        return map_indices(
            column,
            self.length,
            self.size,
            out_axes=axis,
            limit=self.limit,
            each_chunk=self._tick,
            where=self.where,
        )

    def reduce(
        self, column: Callable[[Size], PyTree], make_reducer: Callable[[PyTree], Reducer]
    ) -> PyTree:
        """What the reducer makes of all columns."""
        return reduce_indices(
            column,
            self.length,
            self.size,
            make_reducer,
            limit=self.limit,
            each_chunk=self._tick,
        )

    def _tick(self) -> None:
        if self.bar is not None:
            self.bar.tick()


@runtime_checkable
class Problem(Protocol):
    """What to compute at a point, in parts with some columns each."""

    def lengths(self) -> Sequence[int]:
        """The number of columns of each part."""
        ...

    def compute(self, x: PyTree, blocks: Sequence[Blocks]) -> tuple[Any, PyTree]:
        """The result, by these blocks for each part, and an auxiliary value."""
        ...


@dataclass(frozen=True)
class Part:
    """`length` columns, put together along `axis` of each array: the first or the last."""

    length: int
    column: Callable[[Any, Size], PyTree]
    axis: int = 0


@dataclass(frozen=True)
class BlockProblem:
    """Parts that are computed apart from each other, all from one thing that is prepared.

    `prepare(x)` returns what columns are computed from, a pytree, and an auxiliary value. Each
    part's `column(prepared, index)` is one column. The result is a list with each part's columns.
    """

    prepare: Callable[[PyTree], tuple[Any, PyTree]]
    parts: tuple[Part, ...]

    def lengths(self) -> Sequence[int]:
        return [part.length for part in self.parts]

    def compute(self, x: PyTree, blocks: Sequence[Blocks]) -> tuple[list[PyTree], PyTree]:
        prepared, aux = self.prepare(x)

        def columns(part: Part, blocks: Blocks) -> PyTree:
            return blocks.collect(lambda index: part.column(prepared, index), part.axis)

        return list(map(columns, self.parts, blocks)), aux


def solve(
    problem: Problem,
    fun: Fun,
    x: PyTree,
    options: BlockOptions,
    *,
    key: Hashable,
    progress: str | None = None,
) -> tuple[Any, PyTree]:
    """The result and the auxiliary value, compiled once for `fun`, the shapes and the key."""

    def build(size: int, limits: Sequence[int] | None) -> Fun:
        def compute(x: PyTree) -> tuple[Any, PyTree]:
            bar = Progress(progress) if progress is not None and limits is None else None
            lengths = problem.lengths()
            each = limits or [None] * len(lengths)
            blocks = [
                Blocks(length, size, limit, bar, options.where)
                for length, limit in zip(lengths, each, strict=True)
            ]
            if bar is not None:
                bar.total = sum(part.count for part in blocks)
            return problem.compute(x, blocks)

        return compute

    return options.run(fun, build, x, key=(key, progress), lengths=problem.lengths)
