"""The assignment of examples to chunks, decided in plain Python before anything is traced.

A `ChunkPlan` divides an axis of `length` examples into chunks of at most `size`. It is a plain
value, validated on construction. The loop asks it for its runs (successive chunks of equal size,
which share one compiled body) and for the rows of each chunk.

Contiguous chunks are `[0, size)`, `[size, 2 size)`, …; the last one is short if the size does not
divide the length. With M strided chunks, chunk i holds examples i, i + M, i + 2M, …: the axis is
reshaped to `(length // M, M)` and read by columns, so that a sharded batch axis stays sharded. If M
does not divide the length, chunks differ in size by one.

A short chunk is computed by a second copy of the body. Shifting it back to overlap the previous
chunk would save that copy but compute some examples twice: a discarded duplicate of an infinite
derivative turns the gradient of its original into NaN, and side effects happen twice.

Under `shard_map` all devices run one program, though some may have one example more than others.
The plan is then made for the larger number, and the last example is an optional chunk.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import jax
import jax.numpy as jnp

from curvax._errors import as_integer, where
from curvax._slicing import Column, Rows, fold, unfold
from curvax._types import Array, Order, Size


@dataclass(frozen=True)
class Run:
    """Successive chunks of equal size, which share one loop body."""

    first: int
    """Index of the first chunk."""
    count: int
    """Number of chunks."""
    size: int
    """Number of examples in each chunk."""
    before: int
    """Number of examples in all earlier chunks."""


@dataclass(frozen=True)
class ChunkPlan:
    """`length` examples in chunks of at most `size`, contiguous or strided.

    With `optional_last`, the last example is a chunk by itself, which a device may skip.
    """

    length: int
    size: int
    order: Order = "contiguous"
    optional_last: bool = False

    def __post_init__(self) -> None:
        if self.length < 0:
            raise ValueError(f"a length is never negative, got {self.length}")
        if self.size < 1:
            raise ValueError(f"a chunk holds at least one example, got size {self.size}")
        if self.optional_last and (self.order != "contiguous" or self.length < 1):
            raise ValueError("optional_last requires a contiguous plan of at least one example")

    @classmethod
    def of(cls, length: int, size: int | None, order: Order = "contiguous") -> "ChunkPlan":
        """Return the plan for a user-supplied size: None, or one above `length`, means all."""
        return cls(length, max(1, length if size is None else min(size, length)), order)

    def balanced(self) -> "ChunkPlan":
        """Return the contiguous plan with the same number of chunks and the smallest size.

        1000 examples in chunks of at most 300 become four chunks of 250, none of them short.
        """
        return ChunkPlan(self.length, max(1, -(-self.length // self.num_chunks)))

    def with_optional(self) -> "ChunkPlan":
        """Return the contiguous plan for one more example, which is optional."""
        return ChunkPlan(self.length + 1, self.size, optional_last=True)

    @property
    def num_chunks(self) -> int:
        """Number of chunks; an empty axis is one empty chunk."""
        if self.optional_last:
            return -(-(self.length - 1) // self.size) + 1
        return max(1, -(-self.length // self.size))

    @property
    def folded(self) -> bool:
        """Whether `lay_out` folds arrays so that each chunk is a column."""
        return self.order == "strided" and self.num_chunks > 1 and len(self.runs()) == 1

    def lay_out(self, x: Array, axis: int) -> Array:
        """Return an array of examples in the layout that `Chunk.rows` indexes, without a copy."""
        return fold(x, axis, self.num_chunks) if self.folded else x

    def put_back(self, x: Array, axis: int) -> Array:
        """Invert `lay_out`."""
        return unfold(x, axis) if self.folded else x

    def runs(self, limit: Size | None = None) -> Sequence[Run]:
        """Return the runs of the first `limit` chunks, or of all if it is None or traced."""
        if self.optional_last:
            before = self.length - 1
            runs = ChunkPlan(before, self.size).runs() if before else ()
            return (*runs, Run(self.num_chunks - 1, 1, 1, before))
        if self.order == "strided":
            short, num_long = divmod(self.length, self.num_chunks)
            long = short + 1
        else:
            long = self.size
            num_long, short = divmod(self.length, self.size)
        last = min(limit, self.num_chunks) if isinstance(limit, int) else self.num_chunks
        runs = (
            Run(0, min(num_long, last), long, 0),
            Run(num_long, last - num_long, short, num_long * long),
        )
        return tuple(run for run in runs if run.count > 0)


@dataclass(frozen=True)
class Chunk:
    """One chunk of a plan. Its `index` may be traced; its size is static."""

    plan: ChunkPlan
    run: Run
    index: Size

    @property
    def size(self) -> int:
        """Number of examples in the chunk."""
        return self.run.size

    @property
    def examples_before(self) -> Size:
        """Number of examples in all earlier chunks."""
        return self.run.before + (self.index - self.run.first) * self.run.size

    @property
    def rows(self) -> Rows | Column:
        """The chunk's rows of an array in the layout of `ChunkPlan.lay_out`."""
        if self.plan.folded:
            return Column(self.index)
        if self.plan.order == "strided":
            return Rows(self.index, self.size, self.plan.num_chunks)
        return Rows(self.examples_before, self.size)


def contiguous_sizes(length: int) -> Sequence[int]:
    """Return the distinct chunk sizes for `length` examples in contiguous order, ascending."""
    return range(1, max(1, length) + 1)


@functools.lru_cache
def even_sizes(length: int) -> Sequence[int]:
    """Return the chunk sizes that differ in their number of chunks, ascending.

    Strided chunks are balanced, so that only their number matters.
    """
    largest = {-(-length // count) for count in range(1, length + 1)}
    return tuple(sorted(largest)) or (1,)


def check_order(order: Order) -> Order:
    """Return a user-supplied order if it is valid."""
    if order not in get_args(Order):
        raise ValueError(f"{where()}: order must be one of {get_args(Order)}, got {order!r}.")
    return order


def check_limit(limit: Size | None, plan: ChunkPlan) -> Size | None:
    """Return a user-supplied `num_real_microbatches`: an int in range or a clipped int32 scalar."""
    if limit is None:
        return None
    count = None if isinstance(limit, jax.Array) else as_integer(limit)
    if count is None:
        if not isinstance(limit, jax.Array) or limit.ndim or limit.dtype.kind not in "iu":
            raise TypeError(
                f"{where()}: num_real_microbatches must be None, a Python integer or an integer "
                f"scalar, got {type(limit).__name__} {limit!r}."
            )
        # Widen before clipping, since the number of chunks may overflow narrow integers; narrow
        # after it, since 64-bit values may not fit an index.
        wide = limit.astype(jnp.int32) if limit.dtype.itemsize < 4 else limit
        return jnp.clip(wide, 0, plan.num_chunks).astype(jnp.int32)
    if not 0 <= count <= plan.num_chunks:
        raise ValueError(
            f"{where()}: num_real_microbatches={count} is out of range: {plan.length} examples in "
            f"microbatches of at most {plan.size} make {plan.num_chunks}."
        )
    return count
