"""Columns of linear maps, a block at a time.

Everything in this package is one thing: linear maps between pytrees, made once (`jax.linearize`,
`jax.vjp`) and applied to unit vectors in blocks, through the loop that every map goes through.
What is taken of each result, and where it goes, makes it a Jacobian, a Hessian or one of their
parts.

A `Problem` is what can be computed that way. A `BlockProblem` says it in two steps, so that its
columns can also be split among devices, and its blocks be computed by one program after the other,
to be streamed to disk.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax

from curvax._types import Array, PyTree, Size
from curvax.maps.chunking import map_indices, reduce_indices
from curvax.maps.reducers import Reducer

__all__ = ["BlockProblem", "Blocks", "Part", "Problem", "Progress"]


# A progress bar that a compiled program moves.
#
# The program calls back after each block. The bar begins with the first block of a run and ends
# with the last, so it is right also where one compiled program runs many times. Of several
# devices, which compute as many blocks each, the first moves it; of several processes, the first
# shows it.


class Progress:
    """A bar over `total` blocks, some of which may be done already."""

    def __init__(self, description: str, total: int = 0, done: int = 0) -> None:
        self.total = total
        self._done = done
        self._description = description
        self._bar: Any = None

    def tick(self, device: Array | None = None) -> None:
        """Another block is done, by this one of several devices; while a program is traced."""
        if device is None:
            jax.debug.callback(self.advance)
        else:
            jax.debug.callback(self._advance_on_first, device)

    def _advance_on_first(self, device: Any) -> None:
        if int(device) == 0:
            self.advance()

    def advance(self, blocks: int = 1) -> None:
        """So many more blocks are done; to be called while it runs."""
        if not blocks or jax.process_index() > 0:
            return
        from tqdm.auto import tqdm  # Which takes as long to import as all of curvax.

        if self._bar is None:
            self._bar = tqdm(
                total=self.total, desc=self._description, unit="block", initial=self._done
            )
        self._bar.update(blocks)
        if self._bar.n >= self.total:
            self._bar.close()
            self._bar = None


@dataclass(frozen=True)
class Blocks:
    """`length` columns, `size` of them at a time: all, or those of the first `limit` blocks."""

    length: int
    size: int
    limit: int | None
    bar: Progress | None
    where: str
    device: Array | None = None
    """The number of the device that computes them, where there are several."""

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
            self.bar.tick(self.device)


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
    """`length` columns, put together along `axis` of each array: the first or the last.

    Columns along the first axis may be numbered by the elements of an array of some `shape`, whose
    axes are then in the place of that one. Or a vector of all columns is made `into` something.
    """

    length: int
    column: Callable[[Any, Size], PyTree]
    axis: int = 0
    shape: tuple[int, ...] | None = None
    into: Callable[[Array], PyTree] | None = None

    def result(self, columns: PyTree) -> PyTree:
        """What all columns, put together, become."""
        if self.into is not None:
            return self.into(columns)
        shape = self.shape
        if shape is None:
            return columns
        return jax.tree.map(lambda array: array.reshape(*shape, *array.shape[1:]), columns)


@dataclass(frozen=True)
class BlockProblem:
    """Parts that are computed apart from each other, all from one thing that is prepared.

    `prepare(x)` returns what columns are computed from, a pytree, and an auxiliary value. Each
    part's `column(prepared, index)` is one column. The result is a list with that of each part.
    """

    prepare: Callable[[PyTree], tuple[Any, PyTree]]
    parts: tuple[Part, ...]

    def lengths(self) -> Sequence[int]:
        return [part.length for part in self.parts]

    def compute(self, x: PyTree, blocks: Sequence[Blocks]) -> tuple[list[PyTree], PyTree]:
        prepared, aux = self.prepare(x)

        def result(part: Part, blocks: Blocks) -> PyTree:
            column = lambda index: part.column(prepared, index)
            return part.result(blocks.collect(column, part.axis))

        return list(map(result, self.parts, blocks)), aux
