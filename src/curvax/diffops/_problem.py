"""Columns of linear maps, a block at a time.

All of this room is one thing: linear maps between pytrees, made once (`jax.linearize`, `jax.vjp`)
and applied to unit vectors in blocks, through the loop that every map goes through. What is taken
of each result, and where it goes, makes it a Jacobian, a Hessian or one of their parts.

A `BlockProblem` says that in two steps, so that the blocks can be computed in one compiled program
or, to be streamed to disk, by one program after the other.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from curvax._types import Fun, PyTree, Size
from curvax.batching import map_indices
from curvax.diffops._options import BlockOptions
from curvax.diffops._progress import Progress

__all__ = ["BlockProblem", "Part"]


@dataclass(frozen=True)
class Part:
    """`length` columns, put together along `axis` of each array: the first or the last."""

    length: int
    column: Callable[[Any, Size], PyTree]
    axis: int = 0


@dataclass(frozen=True)
class BlockProblem:
    """What to compute at a point, in parts.

    `prepare(x)` returns what columns are computed from, a pytree, and an auxiliary value. Each
    part's `column(prepared, index)` is one column.
    """

    prepare: Callable[[PyTree], tuple[Any, PyTree]]
    parts: tuple[Part, ...]

    @property
    def length(self) -> int:
        """The number of columns of the longest part."""
        return max((part.length for part in self.parts), default=0)

    def solve(
        self,
        fun: Fun,
        x: PyTree,
        options: BlockOptions,
        *,
        key: Hashable,
        progress: str | None = None,
    ) -> tuple[list[PyTree], PyTree]:
        """All parts and the auxiliary value, compiled once for `fun`, the shapes and the key."""

        def build(size: int, limit: int | None) -> Fun:
            total = sum(_num_blocks(part, size) for part in self.parts)
            shown = progress is not None and limit is None
            bar = Progress(total, progress or "") if shown else None

            def compute(x: PyTree) -> tuple[list[PyTree], PyTree]:
                prepared, aux = self.prepare(x)
                parts = [_columns(part, prepared, size, limit, bar, options) for part in self.parts]
                return parts, aux

            return compute

        return options.run(fun, build, x, key=(key, progress))


def _columns(
    part: Part,
    prepared: Any,
    size: int,
    limit: int | None,
    bar: Progress | None,
    options: BlockOptions,
) -> PyTree:
    return map_indices(
        lambda index: part.column(prepared, index),
        part.length,
        size,
        out_axes=part.axis,
        limit=limit,
        each_chunk=None if bar is None else bar.tick,
        where=options.where,
    )


def _num_blocks(part: Part, size: int) -> int:
    return max(1, -(-part.length // size))
