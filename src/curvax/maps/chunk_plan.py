"""How examples are dealt out to chunks, decided in plain Python before anything is traced.

A `ChunkPlan` cuts an axis of `length` examples into chunks of at most `size`. It is a value: it
validates once, prints and compares. The loop asks it for its runs (successive chunks of one size,
which one compiled body serves) and for the rows that a chunk holds.

Contiguous chunks are `[0, size)`, `[size, 2 size)`, …; where the size does not divide the length
the last is short. Strided, with M chunks, chunk i holds examples i, i + M, i + 2M, …: the axis is
filled in as rows of length M and read by columns, so a batch axis that is sharded stays sharded.
Where that does not come out even the last row is short, and chunks differ in size by one.

A short chunk is computed as it is, by a second copy of the body. Moving it back to overlap the
chunk before would save that copy, but runs some examples twice: a discarded duplicate of an
infinite derivative turns the gradient of its original into NaN, and side effects happen twice.

On several devices one program serves all, and some may have one example more than others. Such a
plan is made for the most, and the last example is a chunk of its own, which is optional.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import jax
import jax.numpy as jnp

from curvax._errors import as_integer, where
from curvax._slicing import Column, Rows, fold, unfold
from curvax._types import Array, Order, Size


@dataclass(frozen=True)
class Run:
    """`count` successive chunks of one size, from chunk `first` on, after `before` examples."""

    first: int
    count: int
    size: int
    before: int


@dataclass(frozen=True)
class ChunkPlan:
    """`length` examples in chunks of at most `size`, contiguous or strided.

    With `optional_last`, the last is a chunk of its own, which may be left out.
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
            raise ValueError("only a contiguous plan has a last example that can be optional")

    @classmethod
    def of(cls, length: int, size: int | None, order: Order = "contiguous") -> "ChunkPlan":
        """The plan for a size as the user gave it: None, or more than there are, means all."""
        return cls(length, max(1, length if size is None else min(size, length)), order)

    def balanced(self) -> "ChunkPlan":
        """The contiguous plan with as many chunks, each as small as that allows.

        1000 examples in chunks of at most 300 become four of 250, with no short one.
        """
        return ChunkPlan(self.length, max(1, -(-self.length // self.num_chunks)))

    def with_optional(self) -> "ChunkPlan":
        """The contiguous plan for one example more, which is optional."""
        return ChunkPlan(self.length + 1, self.size, optional_last=True)

    @property
    def num_chunks(self) -> int:
        """How many chunks there are; an empty axis is one empty chunk."""
        if self.optional_last:
            return -(-(self.length - 1) // self.size) + 1
        return max(1, -(-self.length // self.size))

    @property
    def folded(self) -> bool:
        """Whether arrays are to be folded so that each chunk is a column of them."""
        return self.order == "strided" and self.num_chunks > 1 and len(self.runs()) == 1

    def lay_out(self, x: Array, axis: int) -> Array:
        """An array of examples along `axis` as the rows of chunks address it. No copy is made."""
        return fold(x, axis, self.num_chunks) if self.folded else x

    def put_back(self, x: Array, axis: int) -> Array:
        """What `lay_out` undid."""
        return unfold(x, axis) if self.folded else x

    def runs(self, limit: Size | None = None) -> Sequence[Run]:
        """The runs, in order, of all chunks or of the first `limit` if that is known now."""
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
    """One chunk of a plan as a loop meets it: its `index` may be traced, its size is not."""

    plan: ChunkPlan
    run: Run
    index: Size

    @property
    def size(self) -> int:
        """How many examples it holds."""
        return self.run.size

    @property
    def examples_before(self) -> Size:
        """How many examples the chunks before it hold."""
        return self.run.before + (self.index - self.run.first) * self.run.size

    @property
    def rows(self) -> Rows | Column:
        """Which examples it holds, of an array laid out as the plan says."""
        if self.plan.folded:
            return Column(self.index)
        if self.plan.order == "strided":
            return Rows(self.index, self.size, self.plan.num_chunks)
        return Rows(self.examples_before, self.size)


def contiguous_sizes(length: int) -> Sequence[int]:
    """All sizes that make a difference for so many examples, in ascending order."""
    return range(1, max(1, length) + 1)


@functools.lru_cache
def even_sizes(length: int) -> Sequence[int]:
    """The same where examples are dealt out evenly, so that their number of chunks decides."""
    largest = {-(-length // count) for count in range(1, length + 1)}
    return tuple(sorted(largest)) or (1,)


def check_order(order: Any) -> Order:
    """An order as the user gave it."""
    if order not in get_args(Order):
        raise ValueError(f"{where()}: order must be one of {get_args(Order)}, got {order!r}.")
    return order


def check_limit(limit: Any, plan: ChunkPlan) -> Size | None:
    """`num_real_microbatches` as the user gave it: None, an int in range, or a scalar array."""
    if limit is None:
        return None
    number = None if isinstance(limit, jax.Array) else as_integer(limit)
    if number is None:
        if not isinstance(limit, jax.Array) or limit.ndim or limit.dtype.kind not in "iu":
            raise TypeError(
                f"{where()}: num_real_microbatches must be None, a Python integer or an integer "
                f"scalar, got {type(limit).__name__} {limit!r}."
            )
        # Narrow integers cannot hold the number of chunks, wide ones may not fit an index.
        wide = limit.astype(jnp.int32) if limit.dtype.itemsize < 4 else limit
        return jnp.clip(wide, 0, plan.num_chunks).astype(jnp.int32)
    if not 0 <= number <= plan.num_chunks:
        raise ValueError(
            f"{where()}: num_real_microbatches={number} is out of range: {plan.length} examples in "
            f"microbatches of at most {plan.size} make {plan.num_chunks}."
        )
    return number
